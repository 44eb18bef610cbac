from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from tests.cli.conftest import Make

from anybatch.cli.data import Arrays, Data, open_data
from anybatch.cli.faults import SettingsError
from anybatch.cli.settings import Settings
from anybatch.cli.views import InEpochs, Loader, Views, _begin_worker, fixed_offsets, make_views


def arrays(n: int = 11, size: int = 6) -> Arrays:
    pixels = np.arange(n * size * size, dtype=np.int64).reshape(n, 1, size, size) % 251
    return Arrays(pixels.astype(np.uint8), np.arange(n))


def views(source: Arrays, **more: object) -> Views:
    return Views(source, (0.0,), (1.0,), (4, 4), **more)  # type: ignore[arg-type]


def all_samples(loader: Loader, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(loader.epoch(epoch))
    return torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches])


def test_every_sample_comes_once_an_epoch_and_the_last_batch_is_smaller() -> None:
    loader = Loader(views(arrays()), 4, seed=3, shuffle=True, workers=0)
    sizes = [len(batch.inputs) for batch in loader.epoch(1)]
    assert sizes == [4, 4, 3]
    assert len(loader) == 3
    orders = [all_samples(loader, epoch)[1] for epoch in (1, 1, 2)]
    assert all(torch.equal(order.sort().values, torch.arange(11)) for order in orders)
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


@pytest.mark.parametrize(("n", "batch", "micro"), [(11, 4, 3), (11, 4, 4), (3, 8, 2), (8, 4, 1)])
def test_micro_batches_are_counted_before_they_are_loaded(n: int, batch: int, micro: int) -> None:
    loader = Loader(views(arrays(n)), batch, seed=0, shuffle=False, workers=0)
    by_hand = sum(-(-len(found.inputs) // micro) for found in loader.epoch(1))
    assert loader.micro_batches(micro) == by_hand


def test_views_are_the_same_for_any_number_of_workers() -> None:
    single = Loader(views(arrays(), flip=True, pad=2), 4, seed=3, shuffle=True, workers=0)
    helped = Loader(views(arrays(), flip=True, pad=2), 4, seed=3, shuffle=True, workers=1)
    for epoch in (1, 2):
        for one, other in zip(all_samples(single, epoch), all_samples(helped, epoch), strict=True):
            assert torch.equal(one, other)


def test_a_random_view_is_a_piece_of_its_image_and_all_pieces_occur() -> None:
    source = arrays(1)
    image = source.pixels[0, 0] / np.float32(255)
    pieces = {}
    for top in range(3):
        for left in range(3):
            piece = image[top : top + 4, left : left + 4]
            pieces[piece.tobytes()] = piece
            pieces[np.ascontiguousarray(piece[:, ::-1]).tobytes()] = piece
    drawn = views(source, flip=True)
    keys = {drawn[epoch, 0][0].numpy()[0].tobytes() for epoch in range(300)}  # type: ignore[union-attr]
    assert keys == set(pieces)


def test_padding_is_the_mean_of_the_pixels() -> None:
    source = Arrays(np.full((1, 1, 4, 4), 255, np.uint8), np.zeros(1, np.int64))
    padded = Views(source, (0.25,), (0.5,), (4, 4), pad=3)
    values = torch.cat([padded[epoch, 0][0].unique() for epoch in range(50)])  # type: ignore[union-attr]
    assert set(values.tolist()) == {0.0, 1.5}


def test_image_and_mask_are_cut_alike(masks: Make) -> None:
    data = open_data(Settings(data=str(masks())))
    train, _ = make_views(data, crop=16, crops=1, pad=2, flip=True, seed=1)
    plain = Data(**{**vars(data), "mean": (0.0,), "std": (1.0,)})
    raw, _ = make_views(plain, crop=16, crops=1, pad=2, flip=True, seed=1)
    for key in [(epoch, index) for epoch in range(4) for index in range(len(train))]:
        view, unscaled = train[key], raw[key]
        assert torch.equal(view[1], unscaled[1])  # type: ignore[arg-type]
        assert torch.equal(unscaled[0] > 0.5, unscaled[1] == 1)  # type: ignore[operator]


def test_an_epoch_may_take_several_crops_of_an_image() -> None:
    several = views(arrays(3), crops=50)
    assert len(several) == 150
    for index in range(3):
        keys = range(50 * index, 50 * index + 50)
        drawn = [several[1, key] for key in keys]
        assert {int(target) for _, target in drawn} == {index}  # type: ignore[misc]
        assert len({image.numpy().tobytes() for image, _ in drawn}) == 9  # type: ignore[union-attr]


def test_test_views_tile_an_image_and_lie_in_its_middle() -> None:
    assert fixed_offsets((8, 8), (4, 4), tiles=True) == ((0, 0), (0, 4), (4, 0), (4, 4))
    assert fixed_offsets((9, 7), (4, 4), tiles=True) == ((0, 1), (4, 1))
    assert fixed_offsets((9, 7), (4, 4), tiles=False) == ((2, 1),)
    tiled = views(arrays(2, 8), offsets=fixed_offsets((8, 8), (4, 4), tiles=True))
    assert len(tiled) == 8
    corners = [tiled[1, index][0][0, 0, 0].item() * 255 for index in range(4)]  # type: ignore[union-attr]
    np.testing.assert_allclose(corners, [0, 4, 32, 36], atol=1e-4)


def test_a_crop_larger_than_the_image_is_refused() -> None:
    data = open_data(Settings())
    with pytest.raises(SettingsError, match=r"crop must be at most the image's 8 pixels; got 9"):
        make_views(data, crop=9, crops=1, pad=0, flip=False, seed=0)


def test_the_order_without_shuffling_is_the_order() -> None:
    assert list(InEpochs(3, 2, 7, shuffle=False)) == [[(0, 0), (0, 1)], [(0, 2)]]


def test_a_reader_that_sends_to_a_run_that_has_ended_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anybatch.cli.views.deaf", lambda: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    _begin_worker(0)
    for error in (EOFError(), ConnectionResetError("peer"), BrokenPipeError()):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == ""
    sys.excepthook(ValueError, ValueError("another"), None)
    assert "another" in capsys.readouterr().err
