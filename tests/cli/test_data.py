from __future__ import annotations

import shutil
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.cli.conftest import Make, save

from anybatch.cli import images
from anybatch.cli.data import Arrays, ClassFiles, open_data
from anybatch.cli.faults import DataError, MissingExtraError
from anybatch.cli.folders import hold_out, list_labelled, list_pairs
from anybatch.cli.images import (
    Header,
    Unreadable,
    mask_ids,
    read_header,
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
        save(file, np.repeat(np.uint8([0, 255]), 256).reshape(16, 32))
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
    assert isinstance(mask_ids(tmp_path / "gone.png"), Unreadable)
    assert isinstance(read_header(tmp_path / "gone.png"), Unreadable)


@pytest.mark.filterwarnings("error")
def test_a_broken_tiff_becomes_one_sentence_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """libtiff writes to the file descriptor of stderr, and Pillow warns of tags."""
    file = tmp_path / "a.tif"
    draw = np.random.default_rng(0).integers(0, 255, (32, 32, 3)).astype(np.uint8)
    Image.fromarray(draw).save(file, compression="tiff_adobe_deflate")
    content = file.read_bytes()
    file.write_bytes(content[:60] + bytes(200) + content[260:])
    found = read_pixels(file, 3, None)
    assert isinstance(found, Unreadable)
    assert found.reason == "its pixels cannot be decoded (decoder error -2)"
    two_widths = content.replace(struct.pack("<HHI", 256, 4, 1), struct.pack("<HHI", 256, 4, 2))
    two_widths = two_widths.replace(struct.pack("<HHI", 256, 3, 1), struct.pack("<HHI", 256, 3, 2))
    file.write_bytes(two_widths)
    assert two_widths != content
    read_header(file)
    assert capfd.readouterr().err == ""


def test_deep_and_odd_pixels(tmp_path: Path) -> None:
    wide = tmp_path / "wide.png"
    Image.fromarray(np.array([[0, 1000], [65535, 5]], np.uint16)).save(wide)
    pixels = read_pixels(wide, 1, None)
    assert not isinstance(pixels, Unreadable)
    np.testing.assert_allclose(unit_range(pixels)[0, 0, 1], 1000 / 65535, rtol=1e-6)
    Image.fromarray(np.zeros((2, 2), np.float32)).save(tmp_path / "float.tif")
    found = read_pixels(tmp_path / "float.tif", 1, None)
    assert isinstance(found, Unreadable)
    assert found.reason == "pixels have 32 bits, unlike those of the images looked at"


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(
        MissingExtraError, match=r"pip install 'anybatch\[demo\]'; or name a folder"
    ):
        open_data(Settings())


def test_hidden_folders_are_no_data_and_linked_ones_are(classes: Make, tmp_path: Path) -> None:
    """A notebook's checkpoints were trained on, and a class that is a link's target left out."""
    folder = classes(count=3)
    pixels = np.zeros((12, 12, 3), np.uint8)
    for hidden in (".ipynb_checkpoints/a.png", "inner/.cache/b.png", "inner/.c.png"):
        save(folder / "dark" / hidden, pixels)
    save(tmp_path / "elsewhere" / "deep" / "linked.png", pixels)
    (folder / "dark" / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "dark" / "inner" / "round").symlink_to(folder / "dark")  # a circle
    (folder / "dark" / "twice").symlink_to(tmp_path / "elsewhere")
    names = [path.name for path, _ in list_labelled(folder, ["bright", "dark"])]
    assert sorted(names) == ["0.png", "0.png", "1.png", "1.png", "2.png", "2.png", "linked.png"]


TURNED = {1: [[1, 2, 3], [4, 5, 6]], 2: [[3, 2, 1], [6, 5, 4]], 3: [[6, 5, 4], [3, 2, 1]]}
TURNED |= {4: [[4, 5, 6], [1, 2, 3]], 5: [[1, 4], [2, 5], [3, 6]], 6: [[4, 1], [5, 2], [6, 3]]}
TURNED |= {7: [[6, 3], [5, 2], [4, 1]], 8: [[3, 6], [2, 5], [1, 4]]}


@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", TURNED)
def test_a_photo_and_its_mask_are_turned_as_their_exif_says(
    tmp_path: Path, suffix: str, orientation: int
) -> None:
    """Stored pixels 1 to 6 become what the EXIF specification draws for each orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.repeat(np.repeat(np.uint8(TURNED[1]) * 40, 8, 0), 8, 1)
    file = tmp_path / f"photo.{suffix}"
    Image.fromarray(stored).save(file, exif=exif, lossless=True)
    expected = np.repeat(np.repeat(np.uint8(TURNED[orientation]) * 40, 8, 0), 8, 1)
    header, pixels, ids = read_header(file), read_pixels(file, 1, None), mask_ids(file)
    assert not isinstance(header, Unreadable)
    assert header.size == expected.shape
    assert np.array_equal(pixels[0], expected)
    assert np.array_equal(ids, expected)


def tiff(path: Path, pixels: np.ndarray, orientation: int = 1) -> None:
    """Write a TIFF of any dtype by hand: Pillow writes few of them."""
    sample = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
    height, width = pixels.shape
    bits, data = pixels.dtype.itemsize * 8, pixels.tobytes()
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: 1, 273: 8 + 2 + 12 * 11 + 4}
    tags |= {274: orientation, 277: 1, 278: height, 279: len(data), 339: sample}
    fields = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    head = b"II*\0" + struct.pack("<IH", 8, len(tags))
    path.write_bytes(head + fields + struct.pack("<I", 0) + data)


@pytest.mark.parametrize(
    ("dtype", "low", "high", "note"),
    [
        ("uint8", 0, 255, None),
        ("uint16", 0, 65535, "pixels: 16 bits in 8 files, 0 to 65535 read as 0 to 1"),
        ("int16", -900, 30000, "32 bits in 8 files, -900 to 30000, the range of 8, read as 0 to 1"),
        ("uint32", 7, 3_000_000_000, "32 bits in 8 files, 7 to 3e+09, the range of 8"),
        ("int32", -5, 70_000, "32 bits in 8 files, -5 to 70000, the range of 8"),
        ("float32", -0.5, 2.5, "32 bits in 8 files, -0.5 to 2.5, the range of 8"),
    ],
)
def test_deep_pixels_are_scaled_by_their_type_or_the_folder_and_it_is_said(
    tmp_path: Path, dtype: str, low: float, high: float, note: str | None
) -> None:
    """32 bits were clipped to 65,535 in silence, and negative ones to 0."""
    ramp = np.linspace(low, high, 8 * 16).astype(dtype).reshape(8, 4, 4)
    ramp.ravel()[[0, -1]] = low, high
    for index, pixels in enumerate(ramp):
        tiff(tmp_path / "d" / "ab"[index % 2] / f"{index}.tif", pixels)
    data = opened(tmp_path / "d")
    assert data.in_channels == 1
    assert [n for n in data.notes if "bits" in n] == ([] if note is None else [data.notes[-1]])
    assert note is None or note in data.notes[-1]
    for source in (data.train, data.test):
        for row, path in enumerate(source.paths):  # type: ignore[attr-defined]
            found = unit_range(source.read(row)[0])[0]  # type: ignore[index, arg-type]
            expected = (ramp[int(path.stem)].astype(np.float64) - low) / (high - low)
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_unsigned_pixels_that_lie_on_their_side_stay_unsigned(tmp_path: Path) -> None:
    stored = np.uint32([[1, 2, 3], [4, 5, 3_000_000_000]])
    tiff(tmp_path / "a.tif", stored, orientation=6)
    found = read_pixels(tmp_path / "a.tif", 1, None, (0, 3e9))
    np.testing.assert_allclose(found[0], np.rot90(stored, -1) / 3e9, rtol=1e-6)


def test_pixels_without_a_value_are_named(tmp_path: Path) -> None:
    for index in range(4):
        values = np.float32([[0, 1], [2, np.nan if index == 3 else 3]])
        tiff(tmp_path / "d" / "ab"[index % 2] / f"{index}.tif", values)
    with pytest.raises(DataError, match=r"3.tif \(pixels are NaN or infinite\)"):
        list(map(opened(tmp_path / "d").train.read, range(3)))


def palette(path: Path, ids: np.ndarray, colours: list[int]) -> None:
    image = Image.fromarray(ids.astype(np.uint8), "L").copy()
    image.putpalette(colours)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


VOC = [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0]  # darker than 127 by brightness
BINARY = [0, 0, 0, 255, 255, 255]
WHITE_FIRST = [255, 255, 255, 0, 0, 0]
MASKS = {
    "0 and 255": ("png", [[0, 255], [0, 255]], None, "0 and 255 in 6 files, read as 0 and 1"),
    "0 and 1": ("png", [[0, 1], [1, 0]], None, "0 and 1 in 6 files, read as 0 and 1"),
    "one file is empty": ("png", [[0, 255], [0, 0]], None, "0 and 255 in 6 files"),
    "16 bits": ("tif", [[0, 65535], [0, 65535]], None, "0 and 65535 in 6 files"),
    "ids": ("png", [[0, 1], [0, 2]], None, "ids 0, 1, 2 in 6 files, 0 read as 0 and all others"),
    "ids apart": ("png", [[0, 1], [0, 200]], None, "ids 0, 1, 200 in 6 files"),
    "colour palette": ("png", [[0, 1], [0, 2]], VOC, "ids 0, 1, 2 in 6 files"),
    "one colour": ("png", [[0, 3], [0, 0]], VOC, "0 and 3 in 6 files"),
    "black and white": ("gif", [[0, 1], [1, 0]], BINARY, "0 and 255 in 6 files"),
    "white first": ("png", [[1, 0], [0, 1]], WHITE_FIRST, "0 and 255 in 6 files"),
    "jpeg": ("jpg", [[0, 250], [3, 255]], None, "in 6 files, above 127 read as 1"),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_have_one_rule_in_a_folder_and_it_is_said(tmp_path: Path, case: str) -> None:
    """A threshold for each file gave the same id two meanings; palettes went by brightness."""
    suffix, values, colours, note = MASKS[case]
    big = np.repeat(np.repeat(np.int64(values), 8, 1), 4, 0)[:, None].repeat(8, 1)
    for index in range(6):
        ids, file = big[index % 2 * 4], tmp_path / "m" / "label" / f"{index}.{suffix}"
        save(tmp_path / "m" / "image" / f"{index}.png", np.full(ids.shape, 9, np.uint8))
        if colours is not None:
            palette(file, ids, colours)
        else:
            save(file, ids.astype(np.uint16 if ids.max() > 255 else np.uint8))
    data = opened(tmp_path / "m")
    assert note in data.notes[-1]
    assert data.notes[-1].startswith("masks: ")
    dark = case == "white first"
    expected = [
        ((row > 127) if suffix == "jpg" else (row == 0) if dark else row > 0) for row in big
    ]
    for source in (data.train, data.test):
        for row, (_, mask) in enumerate(source.pairs):  # type: ignore[attr-defined]
            found = source.read(row)[1]  # type: ignore[index]
            assert np.array_equal(found[0], expected[int(mask.stem) % 2 * 4])


def test_many_ids_are_no_greys(masks: Make) -> None:
    folder = masks()
    for file in sorted((folder / "label").iterdir()):
        save(file, np.arange(32 * 32).reshape(32, 32).clip(0, 150).astype(np.uint8))
    data = opened(folder)
    assert "read as 0 and all others as 1" in data.notes[-1]
    assert int(data.train.read(0)[1].sum()) == 32 * 32 - 1  # type: ignore[union-attr,index]


def test_masks_of_two_kinds_of_files_are_refused(masks: Make) -> None:
    folder = masks()
    for index, file in enumerate(sorted((folder / "label").iterdir())):
        half = np.repeat(np.uint8([0, 1]), 16)[None].repeat(32, 0)
        save(file, half)
        if index == 3:
            save(file.with_suffix(".jpg"), half * 255)
            file.unlink()
    with pytest.raises(DataError, match="1 of 6 are JPEG or WebP, which change values"):
        opened(folder)


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_a_mask_that_made_no_rule_is_no_background_by_it(
    masks: Make, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("anybatch.cli.data.SAMPLE", 2)  # the first and the last mask make the rule
    folder = masks()
    greys = np.repeat(np.uint8([0] * 13 + [255] * 13), 32).reshape(26, 32)
    greys = np.concatenate([greys, np.arange(192, dtype=np.uint8).reshape(6, 32)])
    for index, file in enumerate(sorted((folder / "label").iterdir())):
        ids = np.repeat(np.uint8([0, 1]), 16)[None].repeat(32, 0)
        save(file.with_suffix(suffix if index != 2 else ".png"), ids if index == 2 else greys)
        if suffix != ".png" and index != 2:
            file.unlink()
    if suffix == ".jpg":
        with pytest.raises(DataError, match="5 of 6 are JPEG or WebP"):
            opened(folder)
        return
    data = opened(folder, skip=True)
    samples = [source.read(row) for source in (data.train, data.test) for row in range(len(source))]
    assert ["as one of ids" in str(sample) for sample in samples].count(True) == 1


@pytest.mark.parametrize(
    "values", [np.full((4, 4, 4), 9, np.uint8), np.full((4, 4), np.inf, np.float32)]
)
def test_a_mask_without_ids_is_named(tmp_path: Path, values: np.ndarray) -> None:
    path = tmp_path / "m.tif"
    Image.fromarray(values, "CMYK" if values.ndim == 3 else None).save(path)
    assert "a mask must have" in str(images.mask_ids(path))


def test_a_palette_with_transparency_is_read_by_index(tmp_path: Path) -> None:
    ids = np.arange(16, dtype=np.uint8).reshape(4, 4)
    image = Image.fromarray(ids).convert("P")
    image.putpalette([shade for i in range(16) for shade in (i * 9, 3, 7)])
    image.convert("PA").save(tmp_path / "m.tif")
    assert np.array_equal(images.mask_ids(tmp_path / "m.tif"), ids)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1, 2], [1, 2]], "in 6 files they have 1, 2: the least is not 0"),
        ([[0, 1], [0, 255]], "they have 0, 1, 255: 255 may be foreground, or to be ignored"),
    ],
)
def test_masks_without_one_meaning_are_refused(
    masks: Make, values: list[list[int]], message: str
) -> None:
    folder = masks()
    for index, file in enumerate(sorted((folder / "label").iterdir())):
        save(file, np.repeat(np.uint8(values[index % 2]), 16)[None].repeat(32, 0))
    with pytest.raises(DataError, match=message):
        opened(folder)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.uint8([[[9, 0, 0]]]).repeat(32, 0).repeat(32, 1), "ids or greys, it has colours"),
        (np.full((32, 32), 0.5, np.float32), "whole numbers, it has fractions"),
        (np.full((32, 32), np.nan, np.float32), "whole numbers, it has fractions"),
        (np.full((32, 32), 3, np.uint8), "the mask has 3, where the others have 0, 255 only"),
    ],
)
def test_a_mask_that_breaks_the_rule_of_its_folder_is_named(
    masks: Make, monkeypatch: pytest.MonkeyPatch, pixels: np.ndarray, message: str
) -> None:
    monkeypatch.setattr("anybatch.cli.data.SAMPLE", 2)  # the first and the last mask make the rule
    folder = masks()
    Image.fromarray(pixels).save(folder / "label" / "2.tif")
    (folder / "label" / "2.png").unlink()
    data = opened(folder, skip=True)
    assert "in 2 of 6 files" in data.notes[-1]
    samples = [source.read(row) for source in (data.train, data.test) for row in range(len(source))]
    assert [message in str(sample) for sample in samples].count(True) == 1
