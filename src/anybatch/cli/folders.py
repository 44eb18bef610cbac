"""List a data folder: which images there are, of which class or with which mask, and the split.

    DIR/<class>/*                DIR/{train,test}/<class>/*                classification
    DIR/{image,label}/*          DIR/{train,test}/{image,label}/*          segmentation

Where there is no test folder a fifth is held out, class by class, by a draw that is always the
same, so that runs with different seeds are measured on one test set. Nothing is decoded here.
Every fault of the folder is gathered and said in one error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from anybatch.cli.faults import DataError
from anybatch.cli.images import SUFFIXES

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
    """Return the images under `folder`, sorted; a hidden folder is none of the data.

    Linked folders are read too, each real folder once.
    """
    found: list[Path] = []
    read: set[str] = set()

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error

    for at, below, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(at)
        below[:] = [] if real in read else sorted(n for n in below if not n.startswith("."))
        files = [Path(at, n) for n in names if real not in read and not n.startswith(".")]
        found += [file for file in files if file.suffix.lower() in SUFFIXES]
        read.add(real)
    return sorted(found)


def _by_stem(files: list[Path], ending: str, faults: list[str]) -> dict[str, Path]:
    stems: dict[str, Path] = {}
    for file in files:
        stem = file.stem.removesuffix(ending) if ending else file.stem
        if stem in stems:
            faults.append(f"{stems[stem].name} and {file.name} have one name")
        stems[stem] = file
    return stems
