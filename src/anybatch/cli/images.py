"""Read one image or mask from a file, and say plainly which file cannot be read.

Pillow raises a dozen types of errors for a broken file, some of them without its name. Here each
becomes one `Unreadable` value: a value, not an exception, so that it crosses from a loader's
worker process unharmed and the run decides whether to stop or to skip.

An image is turned as its EXIF orientation says. What its numbers mean is one rule for a folder,
not for a file: `MaskRule` for masks, and for pixels without a range of their own, of 32 bits or
floating-point, the `Range` of the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError, _imaging

from anybatch.cli.faults import DataError

Pixels = NDArray[np.uint8 | np.uint16 | np.float32]
Size = tuple[int, int]  # height, width
Range = tuple[float, float]  # the pixels that are read as 0 and as 1

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
BOMB = Image.DecompressionBombError
BROKEN = (OSError, SyntaxError, ValueError, TypeError, EOFError, struct.error, BOMB)
GREY_MODES = ("1", "L", "LA", "I", "F")  # and those of 16 bits
ORIENTATION, SAMPLE_FORMAT, UNSIGNED = 0x0112, 339, (1,)  # tags of EXIF and TIFF
LEVELS, GREYS = 32, 128  # more values in masks may be levels of grey, then read from 128 on as 1
NO_FOREGROUND = "no mask has a foreground pixel: masks must be 0, and 255 for foreground."
LOSSY = (".jpeg", ".jpg", ".webp")
with contextlib.suppress(AttributeError, OSError):  # libtiff would print the reason to stderr
    ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler(None)


class Unreadable(NamedTuple):
    """A file that could not be read, and why."""

    path: str
    reason: str


class Header(NamedTuple):
    """Facts of an image, read without decoding it; 32 `bits` are pixels without a range."""

    size: Size
    grey: bool
    bits: int


class MaskRule(NamedTuple):
    """Meaning of the numbers in all masks of a folder: 0 is background, from `least` on foreground.

    `values` are those that may occur; None: all.
    """

    least: int
    values: tuple[int, ...] | None


def read_header(path: Path) -> Header | Unreadable:
    """Return the facts of the image at `path`, without decoding it."""
    try:
        with _opened(path) as image:
            # Pillow has turned the size of a TIFF already.
            across = image.format != "TIFF" and _orientation(image) in (5, 6, 7, 8)
            size = (image.width, image.height) if across else (image.height, image.width)
            deep = image.mode[:4] == "I;16" or (image.mode == "I" and image.format != "TIFF")
            bits = 16 if deep else 32 if image.mode in ("I", "F") else 8
            return Header(size, bits == 16 or image.mode in GREY_MODES, bits)
    except BROKEN as error:
        return Unreadable(str(path), _reason(error))


def read_pixels(
    path: Path, channels: int, size: Size | None, scale: Range | None = None
) -> Pixels | Unreadable:
    """Return the image at `path` as [channels, H, W]: of 8 or 16 bits, or float32 from 0 to 1.

    `path`: of the file. `channels`: with 1 colours become grey, with 3 grey becomes colour. `size`:
    (height, width) that it is resized to, bilinearly; None: its own. `scale`: what pixels of 32
    bits are read by.
    """
    if isinstance(header := read_header(path), Unreadable):
        return header
    if header.bits == 32 and scale is None:
        return Unreadable(str(path), "pixels have 32 bits, unlike those of the images looked at")
    try:
        with _opened(path) as image:
            turned = _turned(image)
            if header.bits == 8:
                plain = turned.convert("L" if channels == 1 else "RGB")
                array = np.asarray(_resized(plain, size, Image.Resampling.BILINEAR), dtype=np.uint8)
                return array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0).copy()
            if header.bits == 32 and scale is not None:
                low, high = scale
                unit = (_numbers(turned) - low) / (high - low or 1)
                turned = Image.fromarray(unit.astype(np.float32))
            else:
                turned = turned.convert("I")
            array = np.asarray(_resized(turned, size, Image.Resampling.BILINEAR))
    except BROKEN as error:
        return Unreadable(str(path), _reason(error))
    if not np.isfinite(array).all():
        return Unreadable(str(path), "pixels are NaN or infinite")
    deep = array if header.bits == 32 else np.clip(array, 0, 65535).astype(np.uint16)
    return np.repeat(deep[None], channels, axis=0)


def range_of(paths: Sequence[Path]) -> Range:
    """Return the least and the greatest pixel of all images that can be read; (0, 1) of none."""
    ends: list[float] = []
    for path in paths:
        try:
            with _opened(path) as image:
                numbers = _numbers(image)
        except BROKEN:
            continue
        numbers = numbers[np.isfinite(numbers)]
        ends += [float(numbers.min()), float(numbers.max())] if numbers.size else []
    return (min(ends), max(ends)) if ends else (0.0, 1.0)


def read_mask(path: Path, size: Size | None, rule: MaskRule) -> NDArray[np.uint8] | Unreadable:
    """Return the mask at `path` as zeros and ones [1, H, W]; `size` resizes it to nearest pixels.

    A value that the folder's `rule` does not have makes it unreadable.
    """
    ids = mask_ids(path, size)
    if isinstance(ids, Unreadable):
        return ids
    if rule.least == GREYS and path.suffix.lower() not in LOSSY and 0 < ids.max() < GREYS:
        return Unreadable(str(path), f"the mask has no grey above {ids.max()}, as one of ids")
    if rule.values is not None and (other := set(np.unique(ids).tolist()) - set(rule.values)):
        wanted, found = (", ".join(map(str, sorted(some))) for some in (rule.values, other))
        return Unreadable(str(path), f"the mask has {found}, where the others have {wanted} only")
    return (ids >= rule.least).astype(np.uint8)[None]


def mask_ids(path: Path, size: Size | None = None) -> NDArray[np.int64] | Unreadable:
    """Return the numbers of the mask at `path` as [H, W]: greys, or indices of a colour palette."""
    try:
        with _opened(path) as image:
            if path.suffix.lower() in LOSSY:  # greys that were compressed as colours
                image = image.convert("L")  # noqa: PLW2901
            turned = _turned(image)
            palette = np.asarray(turned.getpalette() or [], np.uint8).reshape(-1, 3)
            grey = turned.mode == "P" and not np.ptp(palette, axis=1).any()
            turned = turned.convert("L") if turned.mode in ("1", "LA") or grey else turned
            bands = [np.asarray(band) for band in turned.split() if turned.mode[:3] == "RGB"][:3]
            if turned.mode == "PA" or (bands and all((band == bands[0]).all() for band in bands)):
                turned = turned.getchannel(0)
            if len(turned.getbands()) > 1:
                return Unreadable(str(path), "a mask must have ids or greys, it has colours")
            numbers = _numbers(_resized(turned, size, Image.Resampling.NEAREST))
    except BROKEN as error:
        return Unreadable(str(path), _reason(error))
    if not np.isfinite(numbers).all() or (numbers != np.floor(numbers)).any():
        return Unreadable(str(path), "a mask must have whole numbers, it has fractions")
    return numbers.astype(np.int64)


def mask_rule(paths: Sequence[Path], every: Sequence[Path]) -> tuple[MaskRule, str]:
    """Return one rule for the masks of a folder, from some of them, and the rule in words.

    Raises:
        DataError: their numbers have no one meaning.
    """
    each = [mask_ids(path) for path in paths]
    ids = [found for found in each if not isinstance(found, Unreadable)]
    values = sorted({value for found in ids for value in np.unique(found).tolist()})
    named = ", ".join(map(str, values[:LEVELS]))
    total, lossy = len(every), [path.suffix.lower() in LOSSY for path in every]
    where = f"in {len(paths)} of {total} files" if len(paths) < total else f"in {total} files"
    if not values or values == [0]:
        raise DataError(NO_FOREGROUND)
    if any(lossy) != all(lossy):
        raise DataError(
            f"masks must be files of one kind; {sum(lossy)} of {total} are JPEG or WebP, which "
            "change values, and others are not. Write all as PNG, of 0 and 255."
        )
    ends = np.concatenate([np.isin(found, (0, 255)).ravel() for found in ids]).mean()
    levels = values[0] >= 0 and values[-1] == 255 and ends > 0.5
    if all(lossy) or (len(values) > LEVELS and levels):  # greys at edges, and not many ids
        words = f"masks: greys {values[0]} to {values[-1]} {where}, above 127 read as 1"
        return MaskRule(GREYS, None), words
    if values[0] != 0 or (len(values) > 2 and 255 in values):
        fault = "the least is not 0" if values[0] else "255 may be foreground, or to be ignored"
        raise DataError(
            f"masks must be 0 for background and another number for foreground; {where} they have "
            f"{named}: {fault}. Write masks of 0 and 255."
        )
    if len(values) == 2:
        words = f"masks: 0 and {values[1]} {where}, read as 0 and 1"
        return MaskRule(values[1], tuple(values)), words
    return MaskRule(1, None), f"masks: ids {named} {where}, 0 read as 0 and all others as 1"


def unit_range(pixels: Pixels) -> NDArray[np.float32]:
    """Return the pixels as float32 between 0 and 1."""
    most = {np.dtype(np.uint8): 255, np.dtype(np.uint16): 65535}.get(pixels.dtype, 1)
    return np.asarray(pixels, np.float32) / np.float32(most)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    # By its name Pillow would map the file, and mix up the rows of a TIFF that lies on its side
    # (test_a_photo_and_its_mask_are_turned_as_their_exif_says).
    quiet = warnings.catch_warnings(action="ignore", category=UserWarning)
    with path.open("rb") as file, quiet, Image.open(file) as image:
        yield image


def _orientation(image: Image.Image) -> int:
    # A PNG is decoded to look for EXIF behind its pixels; there it is not looked for.
    if image.format == "PNG" and not {"exif", "Raw profile type exif"} & image.info.keys():
        return 1
    return int(image.getexif().get(ORIENTATION, 1))


def _turned(image: Image.Image) -> Image.Image:
    """Return the image as its EXIF orientation says."""
    as_it_is = image.format == "TIFF" or _orientation(image) == 1  # decoding turns a TIFF
    return image if as_it_is else ImageOps.exif_transpose(image)


def _numbers(image: Image.Image) -> NDArray[np.float64]:
    """Return the numbers of an image with one channel, in their own range."""
    tags = getattr(image, "tag_v2", {})
    array = np.asarray(image)
    unsigned = tags and array.dtype == np.int32 and tags.get(SAMPLE_FORMAT, UNSIGNED) == UNSIGNED
    return (array.view(np.uint32) if unsigned else array).astype(np.float64)


def _resized(image: Image.Image, size: Size | None, how: Image.Resampling) -> Image.Image:
    height, width = size or (image.height, image.width)
    return image if image.size == (width, height) else image.resize((width, height), how)


def _reason(error: Exception) -> str:
    unknown = isinstance(error, UnidentifiedImageError)
    text = "cannot identify image file" if unknown else getattr(error, "strerror", None)
    text = str(text or str(error) or type(error).__name__).splitlines()[0]
    return f"its pixels cannot be decoded ({text})" if text.startswith("decoder error") else text
