"""List a data folder: which images there are, of which class or with which mask, and the split.

    DIR/<class>/*                DIR/{train,test}/<class>/*                classification
    DIR/{image,label}/*          DIR/{train,test}/{image,label}/*          segmentation

Where there is no test folder a fifth is held out, class by class, by a draw that is always the
same, so that runs with different seeds are measured on one test set. Nothing is decoded here.
Every fault of the folder is gathered and said in one error.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from anybatch.cli.faults import DataError

Labelled = tuple[Path, int]
Pair = tuple[Path, Path]
T = TypeVar("T")

HELD_OUT = 0.2
SPLIT_SEED = 0
NAMED = 5  # faults named in full; the rest are counted
TESTS = ("test", "val")


def looks_like_segmentation(folder: Path) -> bool:
    """Return whether `folder`, or its train folder, holds an image and a label folder."""
    return any((at / "image").is_dir() and (at / "label").is_dir() for at in _roots(folder))


def split_folders(folder: Path) -> tuple[Path, Path | None]:
    """Return (where training samples are, where test samples are or None).

    Raises:
        DataError: when `folder` is none, cannot be read, or has only one half of a split.
    """
    if not folder.is_dir():
        raise DataError(f"data must be 'digits' or a folder that exists; got {str(folder)!r}.")
    train, tests = folder / "train", [folder / name for name in TESTS]
    test = next((at for at in tests if at.is_dir()), None)
    if train.is_dir() and test is not None:
        return train, test
    if train.is_dir() or test is not None:
        has, lacks = ("train", "test") if train.is_dir() else ("test", "train")
        raise DataError(
            f"{folder} has a folder {has!r} and must have {lacks!r} beside it; "
            f"add it, or give the folder {has!r} itself to have it split."
        )
    return folder, None


def list_classes(folder: Path) -> list[str]:
    """Return the sorted names of the class folders of `folder`: at least two.

    Raises:
        DataError: when there are fewer.
    """
    names = sorted(at.name for at in _entries(folder) if at.is_dir())
    if len(names) < 2:
        found = f"only {names[0]!r}" if names else "none"
        raise DataError(
            f"{folder} must hold at least two folders, one for each class; found {found}. "
            "Put the images of each class into a folder of its name."
        )
    return names


def list_labelled(folder: Path, classes: Sequence[str]) -> list[Labelled]:
    """Return every image under `folder` with the number of its class, sorted by path.

    Raises:
        DataError: when a class has no image, or a class folder is not in `classes`.
    """
    present = [at.name for at in _entries(folder) if at.is_dir()]
    faults = [f"class {name!r} is not a training class" for name in present if name not in classes]
    found: list[Labelled] = []
    for number, name in enumerate(classes):
        files = _images(folder / name) if name in present else []
        if not files and folder.name not in TESTS:
            faults.append(f"class {name!r} has no image")
        found += [(file, number) for file in files]
    if not faults and not found:
        faults.append("no image at all")
    if faults:
        raise DataError(f"{folder}: {shorten(faults)}.")
    return found


def list_pairs(folder: Path) -> list[Pair]:
    """Return every (image, mask) of `folder`/image and `folder`/label, sorted by name.

    A mask has the name of its image, or that name followed by "_mask"; the suffix may differ.

    Raises:
        DataError: naming every image without a mask and mask without an image.
    """
    missing = [name for name in ("image", "label") if not (folder / name).is_dir()]
    if missing:
        raise DataError(
            f"{folder} must hold the folders 'image' and 'label' for segmentation; "
            f"{' and '.join(map(repr, missing))} is missing."
        )
    faults: list[str] = []
    images = _by_stem(_images(folder / "image"), "", faults)
    masks = _by_stem(_images(folder / "label"), "_mask", faults)
    faults += [f"{images[s].name} has no mask" for s in sorted(images.keys() - masks.keys())]
    faults += [f"{masks[s].name} has no image" for s in sorted(masks.keys() - images.keys())]
    if not faults and not images:
        faults.append("no image at all")
    if faults:
        raise DataError(f"{folder}: {shorten(faults)}.")
    return [(images[stem], masks[stem]) for stem in sorted(images)]


def hold_out(items: Sequence[T], classes: Sequence[int]) -> tuple[list[T], list[T]]:
    """Return (training, test): a fifth held out, rounded up, each class in its proportion.

    The draw is the same every time. Each part keeps the order of `items`.

    Raises:
        DataError: when there are fewer than two items.
    """
    if len(items) < 2:
        raise DataError(
            f"at least two samples are needed, one to train on and one to test on; "
            f"got {len(items)}."
        )
    labels = np.asarray(classes)
    wanted = math.ceil(HELD_OUT * len(items))
    names, counts = np.unique(labels, return_counts=True)
    shares = HELD_OUT * counts
    held_out = np.minimum(np.floor(shares).astype(int), counts - 1)
    for most in np.argsort(-(shares - np.floor(shares)), kind="stable"):
        if held_out.sum() < wanted and held_out[most] < counts[most] - 1:
            held_out[most] += 1
    draw = np.random.default_rng(SPLIT_SEED)
    test: set[int] = set()
    for name, take in zip(names, held_out, strict=True):
        test.update(draw.permutation(np.flatnonzero(labels == name))[:take].tolist())
    if not test:  # no class has two samples
        test.add(int(draw.integers(len(items))))
    train_items = [item for index, item in enumerate(items) if index not in test]
    return train_items, [item for index, item in enumerate(items) if index in test]


def shorten(faults: Sequence[str]) -> str:
    """Return the first five faults, and how many more there are."""
    more = len(faults) - NAMED
    return "; ".join(faults[:NAMED]) + (f"; and {more} more" if more > 0 else "")


def _roots(folder: Path) -> tuple[Path, Path]:
    return folder, folder / "train"


def _entries(folder: Path) -> list[Path]:
    try:
        return [at for at in folder.iterdir() if not at.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.") from error


def _images(folder: Path) -> list[Path]:
    try:
        return sorted(
            at
            for at in folder.rglob("*")
            if at.suffix.lower() in SUFFIXES and not at.name.startswith(".")
        )
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.") from error


def _by_stem(files: list[Path], ending: str, faults: list[str]) -> dict[str, Path]:
    stems: dict[str, Path] = {}
    for file in files:
        stem = file.stem.removesuffix(ending) if ending else file.stem
        if stem in stems:
            faults.append(f"{stems[stem].name} and {file.name} have one name")
        stems[stem] = file
    return stems


# Read one image or mask from a file, and say plainly which file cannot be read.
#
# Pillow raises a dozen types of errors for a broken file, some of them without its name. Here each
# becomes one `Unreadable` value: a value, not an exception, so that it crosses from a loader's
# worker process unharmed and the run decides whether to stop or to skip.

Pixels = NDArray[np.uint8 | np.uint16]
Size = tuple[int, int]  # height, width

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)
GREY_MODES = ("1", "L", "LA", "I", "I;16", "I;16B", "I;16L")


class Unreadable(NamedTuple):
    """A file that could not be read, and why."""

    path: str
    reason: str


class Header(NamedTuple):
    """Size of an image and whether it is grey, read without decoding its pixels."""

    size: Size
    grey: bool


def read_header(path: Path) -> Header | Unreadable:
    """Return the size of the image at `path` and whether it is grey, without decoding it."""
    try:
        with Image.open(path) as image:
            return Header((image.height, image.width), image.mode in GREY_MODES)
    except BROKEN as error:
        return Unreadable(str(path), _reason(error))


def read_pixels(path: Path, channels: int, size: Size | None) -> Pixels | Unreadable:
    """Return the image at `path` as [channels, H, W], 8 or 16 bits a pixel.

    With `channels=1` colours become grey, with 3 grey becomes colour. `size` (height, width)
    resizes it, bilinearly.
    """
    try:
        with Image.open(path) as image:
            if image.mode == "F":
                return Unreadable(str(path), "pixels are floating-point numbers")
            if image.mode.startswith("I"):
                wide = _resized(image.convert("I"), size, Image.Resampling.BILINEAR)
                grey = np.clip(np.asarray(wide), 0, 65535).astype(np.uint16)
                return np.repeat(grey[None], channels, axis=0)
            plain = image.convert("L" if channels == 1 else "RGB")
            array = np.asarray(_resized(plain, size, Image.Resampling.BILINEAR), dtype=np.uint8)
    except BROKEN as error:
        return Unreadable(str(path), _reason(error))
    return array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))


def read_mask(path: Path, size: Size | None) -> NDArray[np.uint8] | Unreadable:
    """Return the mask at `path` as zeros and ones [1, H, W]; `size` resizes it to nearest pixels.

    Values above 127 are foreground; in a mask that has no value above 1, ones are.
    """
    try:
        with Image.open(path) as image:
            grey = _resized(image.convert("L"), size, Image.Resampling.NEAREST)
            array = np.asarray(grey)
    except BROKEN as error:
        return Unreadable(str(path), _reason(error))
    foreground = array > (127 if array.max() > 1 else 0)
    return foreground.astype(np.uint8)[None]


def unit_range(pixels: Pixels) -> NDArray[np.float32]:
    """Return the pixels as float32 between 0 and 1."""
    return pixels.astype(np.float32) / np.float32(np.iinfo(pixels.dtype).max)


def _resized(image: Image.Image, size: Size | None, how: Image.Resampling) -> Image.Image:
    if size is None or (image.height, image.width) == size:
        return image
    return image.resize((size[1], size[0]), how)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
