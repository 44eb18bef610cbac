"""Sources of samples: scikit-learn's digits, a folder of classes, or images with masks.

A source is a list of samples that are read one at a time; later transforms (crop, flip, normalise)
are not part of the source. torchvision's ImageFolder stops at the first broken file and has no
masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from anybatch.cli.faults import MissingExtraError
from anybatch.cli.images import Pixels, Size, Unreadable, read_mask, read_pixels

Target = int | NDArray[np.uint8]  # a class, or a mask [1, H, W]
Sample = tuple[Pixels, Target]  # pixels [C, H, W]

CACHE_BYTES = 2**29  # decoded images kept in memory, by each process that reads them


class Source(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def read(self, index: int) -> Sample | Unreadable:
        """Return one sample, or why it cannot be read."""


@dataclass(frozen=True)
class Arrays:
    """Samples in memory: pixels [N, C, H, W] and classes [N]."""

    pixels: NDArray[np.uint8]
    classes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, index: int) -> Sample | Unreadable:
        """Return one sample."""
        return self.pixels[index], int(self.classes[index])


@dataclass(frozen=True)
class ClassFiles:
    """Image files and their classes; `size` None reads them as they are."""

    paths: tuple[Path, ...]
    classes: tuple[int, ...]
    channels: int
    size: Size | None

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Sample | Unreadable:
        """Read one image."""
        pixels = read_pixels(self.paths[index], self.channels, self.size)
        return pixels if isinstance(pixels, Unreadable) else (pixels, self.classes[index])


@dataclass(frozen=True)
class MaskFiles:
    """Image files and their mask files; `size` None reads them as they are."""

    pairs: tuple[tuple[Path, Path], ...]
    channels: int
    size: Size | None

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, index: int) -> Sample | Unreadable:
        """Read one image and its mask, which must be of one size."""
        image, mask = self.pairs[index]
        pixels = read_pixels(image, self.channels, self.size)
        if isinstance(pixels, Unreadable):
            return pixels
        foreground = read_mask(mask, self.size)
        if isinstance(foreground, Unreadable):
            return foreground
        if foreground.shape[1:] != pixels.shape[1:]:
            is_, needed = ("x".join(map(str, a.shape[1:])) for a in (foreground, pixels))
            return Unreadable(str(mask), f"the mask is {is_} and its image {needed}")
        return pixels, foreground


def cached(source: Source, sample_bytes: int) -> Callable[[int], Sample | Unreadable]:
    """Return `source.read` with a cache of its latest results, up to 512 MiB of them."""
    keep = max(1, CACHE_BYTES // max(1, sample_bytes))
    return functools.lru_cache(maxsize=keep)(source.read)


def digits() -> Arrays:
    """Return scikit-learn's 1,797 handwritten digits, 8x8 pixels, 10 classes.

    Raises:
        MissingExtraError: when scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError(
            "The digits come with scikit-learn, which is not installed: "
            "pip install 'anybatch[demo]'."
        ) from error
    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)[:, None]
    return Arrays(pixels, found.target.astype(np.int64))
