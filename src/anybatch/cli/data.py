"""Data set of a run: detection of its format, its split, and the facts that a model needs.

The number of channels and classes, the size of the images, and the mean and deviation of the
pixels come from the data itself: from the headers, and from a sample of the training images that
is the same every time. Automatic decisions are listed in `Data.notes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from anybatch.cli import folders, images
from anybatch.cli.faults import DataError, MissingExtraError
from anybatch.cli.images import Header, MaskRule, Pixels, Range, Size, Unreadable
from anybatch.cli.settings import Settings, Task

T = TypeVar("T")

SAMPLE = 256  # training images that are read for their mean and deviation


@dataclass(frozen=True)
class Data:
    """A data set ready to be read.

    `num_classes` is the width of a model's last layer: 1 for a mask. `size` is (height, width) of
    every image before cropping. `mean` and `std` are of pixels between 0 and 1, by channel.
    """

    task: Task
    train: Source
    test: Source
    num_classes: int
    in_channels: int
    size: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...]


def open_data(settings: Settings, image_size: Size | None = None) -> Data:
    """Return the data set `settings.data` names, split into training and test.

    `image_size` (height, width) resizes every image; with None all must have one size.

    Raises:
        DataError: when there is no usable data; every fault found is named.
        MissingExtraError: when the digits are requested and scikit-learn is not installed.
    """
    if settings.data == "digits":
        return _open_digits(settings, image_size)
    folder = Path(settings.data)
    train_folder, test_folder = folders.split_folders(folder)
    both = folders.looks_like_segmentation(folder)
    task: Task = settings.task or ("segmentation" if both else "classification")
    if task == "classification" and both:
        raise DataError(
            f"{folder} holds images and masks ('image', 'label'): use --task segmentation."
        )
    if task == "segmentation":
        return _open_pairs(settings, train_folder, test_folder, image_size)
    return _open_classes(settings, train_folder, test_folder, image_size)


def _open_digits(settings: Settings, image_size: Size | None) -> Data:
    if settings.task == "segmentation":
        raise DataError("the digits have no masks: use --task classification, or another --data.")
    if image_size is not None:
        raise DataError("the digits are 8x8 pixels and are not resized: leave --image-size out.")
    found = digits()
    train, test = folders.hold_out(range(len(found)), found.classes.tolist())
    sources = [Arrays(found.pixels[rows], found.classes[rows]) for rows in (train, test)]
    return _data(settings, "classification", sources, 10, Shape(1, (8, 8), (1, None, None), ()))


def _open_classes(
    settings: Settings, train_folder: Path, test_folder: Path | None, image_size: Size | None
) -> Data:
    classes = folders.list_classes(train_folder)
    train = folders.list_labelled(train_folder, classes)
    if test_folder is None:
        train, test = folders.hold_out(train, [number for _, number in train])
    else:
        test = folders.list_labelled(test_folder, classes)
    found = _shape([path for path, _ in (*train, *test)], settings, image_size)
    sources = [
        ClassFiles(tuple(p for p, _ in part), tuple(c for _, c in part), *found.reading)
        for part in (train, test)
    ]
    notes = _notes(len(train), len(test), test_folder)
    return _data(settings, "classification", sources, len(classes), found, *notes, *found.notes)


def _open_pairs(
    settings: Settings, train_folder: Path, test_folder: Path | None, image_size: Size | None
) -> Data:
    train = folders.list_pairs(train_folder)
    if test_folder is None:
        train, test = folders.hold_out(train, [0] * len(train))
    else:
        test = folders.list_pairs(test_folder)
    found = _shape([image for image, _ in (*train, *test)], settings, image_size)
    masks = [mask for _, mask in (*train, *test)]
    rule, words = images.mask_rule(_spread(masks, SAMPLE), masks)
    sources = [MaskFiles(tuple(part), *found.reading, rule) for part in (train, test)]
    notes = (*_notes(len(train), len(test), test_folder), *found.notes, words)
    return _data(settings, "segmentation", sources, 1, found, *notes)


def _data(
    settings: Settings, task: Task, sources: Sequence[Source], width: int, found: Shape, *notes: str
) -> Data:
    mean, std = _statistics(sources[0], skip_corrupt=settings.skip_corrupt)
    train, test = sources
    return Data(task, train, test, width, found.channels, found.size, mean, std, notes)


def _notes(train: int, test: int, test_folder: Path | None) -> tuple[str, ...]:
    if test_folder is not None:
        return ()
    return (f"no test folder: {test} of {train + test} samples are held out for the test",)


class Shape(NamedTuple):
    """Form of all images of a folder: channels, size, and the range of 32-bit pixels."""

    channels: int
    size: Size
    reading: tuple[int, Size | None, Range | None]  # of `read_pixels`, behind the path
    notes: tuple[str, ...]


def _shape(files: Sequence[Path], settings: Settings, image_size: Size | None) -> Shape:
    """Return the shape of all images: without `image_size` every header is read."""
    looked = files if image_size is None else _spread(files, SAMPLE)
    headers = [(path, images.read_header(path)) for path in looked]
    broken = [found for _, found in headers if isinstance(found, Unreadable)]
    good = [(path, found) for path, found in headers if isinstance(found, Header)]
    if broken and not settings.skip_corrupt:
        raise corrupt(broken)
    if not good:
        raise DataError(f"none of {len(looked)} images can be read: {_named(broken)}.")
    channels = 1 if all(found.grey for _, found in good) else 3
    first, header = good[0]
    other = next(((path, found) for path, found in good if found.size != header.size), None)
    if image_size is None and other is not None:
        sizes = [f"{path} is {_text(found.size)}" for path, found in ((first, header), other)]
        raise DataError(
            f"all images must have one size: {', '.join(sizes)}. "
            "Give --image-size to have them resized."
        )
    deep = {bits: [path for path, found in good if found.bits == bits] for bits in (16, 32)}
    scale, notes = None, []
    if deep[16]:
        notes.append(f"pixels: 16 bits in {len(deep[16])} files, 0 to 65535 read as 0 to 1")
    if deep[32]:
        some = _spread(deep[32], SAMPLE)
        scale = images.range_of(some)
        notes.append(
            f"pixels: 32 bits in {len(deep[32])} files, {scale[0]:g} to {scale[1]:g}, the range of "
            f"{len(some)}, read as 0 to 1"
        )
    size = header.size if image_size is None else image_size
    return Shape(channels, size, (channels, image_size, scale), tuple(notes))


def _statistics(
    source: Source, *, skip_corrupt: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and deviation of each channel over a spread sample of `source`."""
    broken: list[Unreadable] = []
    total = squares = np.zeros(1)
    pixels = foreground = 0
    masks = False
    for index in _spread(range(len(source)), SAMPLE):
        sample = source.read(index)
        if isinstance(sample, Unreadable):
            broken.append(sample)
            continue
        image = images.unit_range(sample[0]).astype(np.float64)
        total = total + image.sum(axis=(1, 2))
        squares = squares + (image**2).sum(axis=(1, 2))
        pixels += image[0].size
        masks = not isinstance(sample[1], int)
        foreground += int(np.sum(sample[1]))
    if broken and not skip_corrupt:
        raise corrupt(broken)
    if not pixels:
        raise DataError(f"no training image can be read: {_named(broken)}.")
    if masks and not foreground:
        raise DataError(images.NO_FOREGROUND)
    mean = total / pixels
    std = np.sqrt(np.maximum(squares / pixels - mean**2, 0))
    std[std < 1e-6] = 1.0  # a constant channel stays zero
    return tuple(mean.tolist()), tuple(std.tolist())


def corrupt(broken: Sequence[Unreadable]) -> DataError:
    """Return the error that names the unreadable files and the remedy."""
    count = f"{len(broken)} file{'s' if len(broken) > 1 else ''}"
    return DataError(
        f"{count} cannot be read: {_named(broken)}. "
        "Repair or remove them, or use --skip-corrupt to train without them."
    )


def _named(broken: Sequence[Unreadable]) -> str:
    return folders.shorten([f"{found.path} ({found.reason})" for found in broken])


def _spread(items: Sequence[T], most: int) -> list[T]:
    """Return up to `most` items at equal distances."""
    rows = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[row] for row in rows]


def _text(size: Size) -> str:
    return f"{size[1]}x{size[0]}"


# Sources of samples: scikit-learn's digits, a folder of classes, or images with masks.
#
# A source is a list of samples that are read one at a time; later transforms (crop, flip,
# normalise) are not part of the source. torchvision's ImageFolder stops at the first broken file
# and has no masks.

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
    scale: Range | None

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Sample | Unreadable:
        """Read one image."""
        pixels = images.read_pixels(self.paths[index], self.channels, self.size, self.scale)
        return pixels if isinstance(pixels, Unreadable) else (pixels, self.classes[index])


@dataclass(frozen=True)
class MaskFiles:
    """Image files and their mask files; `size` None reads them as they are."""

    pairs: tuple[tuple[Path, Path], ...]
    channels: int
    size: Size | None
    scale: Range | None
    rule: MaskRule

    def __len__(self) -> int:
        return len(self.pairs)

    def read(self, index: int) -> Sample | Unreadable:
        """Read one image and its mask, which must be of one size."""
        image, mask = self.pairs[index]
        pixels = images.read_pixels(image, self.channels, self.size, self.scale)
        if isinstance(pixels, Unreadable):
            return pixels
        foreground = images.read_mask(mask, self.size, self.rule)
        if isinstance(foreground, Unreadable):
            return foreground
        if foreground.shape[1:] != pixels.shape[1:]:
            is_, needed = ("x".join(map(str, a.shape[1:])) for a in (foreground, pixels))
            return Unreadable(str(mask), f"the mask is {is_} and its image {needed}")
        return pixels, foreground


def cached(source: Source) -> Callable[[int], Sample | Unreadable]:
    """Return `source.read` with a cache of its latest results, up to 512 MiB of them."""
    return functools.lru_cache(maxsize=max(1, CACHE_BYTES // sample_bytes(source)))(source.read)


def sample_bytes(source: Source) -> int:
    """Return the bytes of the first decoded sample; a MiB if it cannot be read."""
    first = source.read(0)
    return 2**20 if isinstance(first, Unreadable) else sum(np.asarray(x).nbytes for x in first)


def digits() -> Arrays:
    """Return scikit-learn's 1,797 handwritten digits, 8x8 pixels, 10 classes.

    Raises:
        MissingExtraError: when scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingExtraError(
            "the digits, which are the default, come with scikit-learn, which is not installed: "
            "pip install 'anybatch[demo]'; or name a folder of images with --data."
        ) from error
    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)[:, None]
    return Arrays(pixels, found.target.astype(np.int64))
