from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.cli.conftest import Make, save

from anybatch.cli.data import Arrays, ClassFiles, open_data
from anybatch.cli.faults import DataError, MissingExtraError
from anybatch.cli.folders import (
    Header,
    Unreadable,
    hold_out,
    list_pairs,
    read_header,
    read_mask,
    read_pixels,
    unit_range,
)
from anybatch.cli.settings import Settings


def opened(folder: Path, *, task: str | None = None, skip: bool = False):  # noqa: ANN201
    return open_data(Settings(data=str(folder), task=task, skip_corrupt=skip))  # type: ignore[arg-type]


def test_the_digits_are_split_alike_each_time_and_class_by_class() -> None:
    first, second = open_data(Settings()), open_data(Settings(seed=5))
    assert isinstance(first.train, Arrays)
    assert isinstance(first.test, Arrays)
    assert (len(first.train), len(first.test)) == (1437, 360)
    assert np.array_equal(first.test.pixels, second.test.pixels)  # type: ignore[attr-defined]
    counts = Counter(first.test.classes.tolist())
    assert set(counts) == set(range(10))
    assert max(counts.values()) - min(counts.values()) <= 3
    assert (first.num_classes, first.in_channels, first.size) == (10, 1, (8, 8))


def test_mean_and_deviation_are_those_of_the_training_set(classes: Make) -> None:
    data = opened(classes(count=9, size=6))
    pixels = np.stack([data.train.read(i)[0] for i in range(len(data.train))]) / 255  # type: ignore[index]
    np.testing.assert_allclose(data.mean, pixels.mean(axis=(0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(data.std, pixels.std(axis=(0, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize("counts", [[10, 3], [1, 9], [2, 2], [1, 1], [1, 1, 1], [50, 1, 7], [2]])
def test_a_fifth_is_held_out_and_every_sample_is_somewhere(counts: list[int]) -> None:
    labels = [number for number, count in enumerate(counts) for _ in range(count)]
    train, test = hold_out(range(len(labels)), labels)
    assert sorted(train + test) == list(range(len(labels)))
    assert len(test) >= 1
    assert len(test) <= -(-len(labels) // 5)
    if max(counts) > 1:  # a class never leaves the training set
        assert {labels[index] for index in train} == set(labels)


def test_a_folder_without_a_split_is_split_and_says_so(classes: Make) -> None:
    data = opened(classes(count=10))
    assert (len(data.train), len(data.test)) == (16, 4)
    assert data.notes == ("no test folder: 4 of 20 samples are held out for the test",)
    assert (data.num_classes, data.in_channels, data.size) == (2, 3, (12, 12))


@pytest.mark.parametrize("second", ["test", "val"])
def test_a_folder_with_a_split_is_used_as_it_is(classes: Make, second: str) -> None:
    data = opened(classes(count=3, parts=f"train,{second}"))
    assert (len(data.train), len(data.test), data.notes) == (6, 6, ())
    assert isinstance(data.test, ClassFiles)
    assert all(second in path.parts for path in data.test.paths)


def test_grey_images_have_one_channel_and_masks_are_zero_and_one(masks: Make) -> None:
    for value in (255, 1):
        data = opened(masks(f"m{value}", count=5, value=value))
        assert (data.task, data.num_classes, data.in_channels) == ("segmentation", 1, 1)
        sample = data.train.read(0)
        assert not isinstance(sample, Unreadable)
        assert np.unique(sample[1]).tolist() == [0, 1]  # type: ignore[arg-type]
        assert (sample[0][sample[1] == 1] >= 150).all()


def test_images_are_resized_on_demand_and_else_must_be_of_one_size(classes: Make) -> None:
    folder = classes(count=3)
    save(folder / "dark" / "other.png", np.zeros((7, 9, 3), np.uint8))
    with pytest.raises(DataError, match=r"one size: .*12x12, .*other.png is 9x7. Give --image-si"):
        opened(folder)
    data = open_data(Settings(data=str(folder)), image_size=(6, 10))
    shapes = {data.train.read(i)[0].shape for i in range(len(data.train))}  # type: ignore[union-attr]
    assert shapes == {(3, 6, 10)}


def test_faults_of_a_folder_are_named(tmp_path: Path, classes: Make, masks: Make) -> None:
    with pytest.raises(DataError, match=r"must be 'digits' or a folder that exists; got"):
        opened(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"at least two folders, one for each class; found none"):
        opened(tmp_path / "empty")
    one = classes("one")
    shutil.rmtree(one / "dark")
    with pytest.raises(DataError, match=r"at least two folders.*found only 'bright'"):
        opened(one)
    hollow = classes("hollow")
    (hollow / "void").mkdir()
    with pytest.raises(DataError, match=r"class 'void' has no image"):
        opened(hollow)
    half = classes("half", parts="train")
    with pytest.raises(DataError, match=r"has a folder 'train' and must have 'test' beside it"):
        opened(half)
    more = classes("more", parts="train,test")
    (more / "train" / "dark").rename(more / "train" / "darker")
    with pytest.raises(DataError, match=r"class 'dark' is not a training class"):
        opened(more)
    with pytest.raises(DataError, match=r"images and masks .*use --task segmentation"):
        opened(masks(), task="classification")
    with pytest.raises(
        DataError, match=r"'image' and 'label' for segmentation; 'image' and 'label'"
    ):
        opened(classes("plain"), task="segmentation")
    with pytest.raises(DataError, match=r"the digits have no masks"):
        open_data(Settings(task="segmentation"))
    with pytest.raises(DataError, match=r"the digits are 8x8 pixels and are not resized"):
        open_data(Settings(), image_size=(9, 9))


def test_a_folder_that_may_not_be_read_is_named(
    classes: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    folder = classes()
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match=r"data cannot be read: Permission denied"):
        opened(folder)


def test_one_sample_is_too_few(masks: Make) -> None:
    with pytest.raises(DataError, match=r"at least two samples are needed, .*; got 1"):
        opened(masks(count=1))


def test_images_without_masks_and_masks_without_images_are_named(masks: Make) -> None:
    folder = masks(count=4)
    (folder / "label" / "1.png").unlink()
    (folder / "image" / "3.png").unlink()
    with pytest.raises(DataError, match=r"1.png has no mask; 3.png has no image"):
        opened(folder)
    for file in (folder / "label").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"0.png has no mask; 1.png has no mask; 2.png has no mask"):
        opened(folder)
    for file in (folder / "image").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"no image at all"):
        opened(folder)


def test_a_mask_may_be_called_after_its_image(masks: Make) -> None:
    folder = masks(count=3)
    for file in list((folder / "label").iterdir()):
        file.rename(file.with_name(f"{file.stem}_mask.png"))
    assert [mask.name for _, mask in list_pairs(folder)] == [f"{i}_mask.png" for i in range(3)]
    (folder / "image" / "2.jpg").write_bytes((folder / "image" / "2.png").read_bytes())
    with pytest.raises(DataError, match=r"2.jpg and 2.png have one name"):
        list_pairs(folder)


def test_masks_without_foreground_are_noticed(masks: Make) -> None:
    folder = masks()
    for file in (folder / "label").iterdir():
        Image.fromarray(np.zeros((32, 32), np.uint8)).save(file)
    with pytest.raises(DataError, match=r"no mask has a foreground pixel: masks must be 0"):
        opened(folder)


def test_a_mask_of_another_size_is_named(masks: Make) -> None:
    folder = masks()
    for file in (folder / "label").iterdir():
        save(file, np.full((16, 32), 255, np.uint8))
    with pytest.raises(DataError, match=r"the mask is 16x32 and its image 32x32"):
        opened(folder)


def test_broken_files_are_named_and_by_option_skipped(classes: Make) -> None:
    folder = classes(count=8)
    (folder / "dark" / "0.png").write_bytes(b"this is no image")
    content = (folder / "dark" / "1.png").read_bytes()
    (folder / "dark" / "1.png").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"1 file cannot be read: .*0.png \(cannot identify.*"):
        opened(folder)
    (folder / "dark" / "0.png").unlink()
    with pytest.raises(DataError, match=r"dark/1.png \(.*\). Repair .* use --skip-corrupt"):
        opened(folder)
    assert len(opened(folder, skip=True).train) > 0
    for file in folder.rglob("*.png"):
        file.write_bytes(b"")
    with pytest.raises(DataError, match=r"none of 15 images can be read: .*; and 10 more"):
        opened(folder, skip=True)


def test_headers_may_be_complete_where_bodies_are_not(classes: Make) -> None:
    folder = classes(count=4)
    for file in folder.rglob("*.png"):
        file.write_bytes(file.read_bytes()[:60])
        assert isinstance(read_header(file), Header)
    with pytest.raises(DataError, match=r"no training image can be read: .*bright/0.png \("):
        opened(folder, skip=True)


def test_every_sort_of_broken_file_becomes_a_value(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    save(file, np.random.default_rng(0).integers(0, 255, (40, 40, 3)).astype(np.uint8))
    content = file.read_bytes()
    for length in range(0, len(content), max(1, len(content) // 60)):
        file.write_bytes(content[:length])
        found = read_pixels(file, 3, None)
        assert isinstance(found, (Unreadable, np.ndarray))
        if length < len(content) // 2:
            assert isinstance(found, Unreadable)
            assert found.path == str(file)
            assert found.reason
    assert isinstance(read_pixels(tmp_path / "gone.png", 3, None), Unreadable)
    assert isinstance(read_mask(tmp_path / "gone.png", None), Unreadable)
    assert isinstance(read_header(tmp_path / "gone.png"), Unreadable)


def test_deep_and_odd_pixels(tmp_path: Path) -> None:
    wide = tmp_path / "wide.png"
    Image.fromarray(np.array([[0, 1000], [65535, 5]], np.uint16)).save(wide)
    pixels = read_pixels(wide, 1, None)
    assert not isinstance(pixels, Unreadable)
    np.testing.assert_allclose(unit_range(pixels)[0, 0, 1], 1000 / 65535, rtol=1e-6)
    Image.fromarray(np.zeros((2, 2), np.float32)).save(tmp_path / "float.tif")
    found = read_pixels(tmp_path / "float.tif", 1, None)
    assert found == Unreadable(str(tmp_path / "float.tif"), "pixels are floating-point numbers")


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'anybatch\[demo\]'"):
        open_data(Settings())
