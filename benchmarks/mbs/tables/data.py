"""The images of the tables: the first so many of a folder, as a folder of links.

The command takes whole folders. A table needs 2,000 images of 5,000, the same ones each time, and
from few masks as many crops; nothing is copied.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from anybatch.cli.folders import hold_out, list_pairs, split_folders
from anybatch.cli.images import SUFFIXES

TEST_SHARE = 4  # training images for each test image


@dataclass(frozen=True)
class Prepared:
    """A folder as the command takes it, and how many crops of each image make an epoch."""

    folder: Path
    crops: int = 1


def prepare_images(source: Path, samples: int | None, links: Path) -> Prepared:
    """Return `source` itself, or a folder of links to `samples` of its training images.

    `source` is train/CLASS/* and test/CLASS/*. Each class gives its first files by name, in equal
    shares, and a quarter of that many of its test files.
    """
    if samples is None:
        return Prepared(source.resolve())
    shutil.rmtree(links, ignore_errors=True)
    for part, share in (("train", 1), ("test", TEST_SHARE)):
        classes = sorted(at for at in (source / part).iterdir() if at.is_dir())
        for each in classes:
            files = sorted(at for at in each.iterdir() if at.suffix.lower() in SUFFIXES)
            to = links / part / each.name
            to.mkdir(parents=True)
            for file in files[: max(1, samples // len(classes) // share)]:
                (to / file.name).symlink_to(file.resolve())
    return Prepared(links.resolve())


def prepare_masks(source: Path, samples: int | None) -> Prepared:
    """Return `source` with as many crops of each training image as make at least `samples`."""
    if samples is None:
        return Prepared(source.resolve())
    train, test = split_folders(source)
    pairs = list_pairs(train)
    if test is None:
        pairs, _ = hold_out(pairs, [0] * len(pairs))
    return Prepared(source.resolve(), -(-samples // len(pairs)))
