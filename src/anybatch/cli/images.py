"""Read one image or mask from a file, and say plainly which file cannot be read.

Pillow raises a dozen types of errors for a broken file, some of them without its name. Here each
becomes one `Unreadable` value: a value, not an exception, so that it crosses from a loader's worker
process unharmed and the run decides whether to stop or to skip.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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
