"""An LSTM's workspace: what its real kernel keeps, and what is foreseen without data."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.memory import meter as hidden
from anybatch.memory.meter import Meter

CPU = torch.device("cpu")
AMPLE = 1 << 30
PAGE = 4096
BUFFERS = 8


class Kernels(TorchDispatchMode):
    """Notes rows and kept bytes of each kernel of an LSTM, and whether it runs on fakes."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[tuple[int, int, bool]] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) == hidden.RECURRENT:
            largest = result[-1]
            size = 0 if largest is None else largest.numel()
            self.observed.append((int(args[0].shape[1]), size, isinstance(args[0], FakeTensor)))
        return result


def step(model: Any, rows: Tensor, *, grad: bool = True) -> None:
    with torch.set_grad_enabled(grad):
        out = model(rows)[0]
        if out.requires_grad:
            out.sum().backward()


def foreseen_of(layer: nn.Module, x: Tensor, spare: int, *, grad: bool = True) -> int:
    """Return the peak of a step without data."""
    layer.zero_grad()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {name: mode.from_tensor(p) for name, p in layer.named_parameters()}
        model = partial(torch.func.functional_call, layer, fakes)
        with Meter(CPU, {"there": fakes.values()}, spare=spare) as meter:
            step(model, mode.from_tensor(x), grad=grad)
    return meter.peak


def peaks(layer: nn.RNNBase, x: Tensor, spare: int, *, grad: bool = True) -> tuple[int, int, int]:
    """Return the real peak, the foreseen one, and the bytes by which this may be higher."""
    with Kernels() as kernels, Meter(CPU, {"there": layer.parameters()}) as real:
        step(layer, x, grad=grad)
    foreseen = foreseen_of(layer, x, spare, grad=grad)
    return (
        real.peak,
        foreseen,
        sum(tolerance(n, spare) for n, retained, _ in kernels.observed if retained),
    )


def tolerance(rows: int, spare: int) -> int:
    """Return by how much a bound may be above what is rounded up itself."""
    once = BUFFERS * PAGE
    return once + -(-rows * once // (hidden.MOST if spare == AMPLE else 1))


LAYERS: dict[str, Any] = {
    "one": lambda: nn.LSTM(16, 24),
    "wide": lambda: nn.LSTM(64, 128, batch_first=True),
    "several": lambda: nn.LSTM(16, 24, num_layers=3, dropout=0.5),
    "both ways": lambda: nn.LSTM(16, 24, num_layers=2, bidirectional=True),
    "rows first": lambda: nn.LSTM(16, 24, 2, batch_first=True),
    "no bias": lambda: nn.LSTM(16, 24, bias=False),
}
OTHERS: dict[str, Any] = {
    "LSTM with a projection": lambda: nn.LSTM(16, 24, proj_size=8),
    "LSTM in float64": lambda: nn.LSTM(16, 24).double(),
    "GRU": lambda: nn.GRU(16, 24, 2),
    "RNN": lambda: nn.RNN(16, 24, 2),
}
"""Of which torch makes several kernels, none of which hides anything."""


def inputs_of(layer: nn.RNNBase, length: int, rows: int) -> Tensor:
    shape = (rows, length) if layer.batch_first else (length, rows)
    return torch.randn(*shape, layer.input_size, dtype=next(layer.parameters()).dtype)


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("spare", [0, AMPLE], ids=["no room", "room"])
@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_what_an_lstm_holds_is_foreseen_never_below_and_not_far_above(
    name: str, length: int, spare: int
) -> None:
    layer = LAYERS[name]()
    for rows in (1, 2, 5, 33):
        real, foreseen, more = peaks(layer, inputs_of(layer, length, rows), spare)
        assert real <= foreseen <= real + more, rows


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
@pytest.mark.parametrize("name", OTHERS)
def test_recurrent_layers_of_many_kernels_hide_nothing(name: str) -> None:
    layer = OTHERS[name]()
    for rows in (1, 5):
        real, foreseen, more = peaks(layer, inputs_of(layer, 7, rows), AMPLE)
        assert more == 0
        assert foreseen == real


@pytest.mark.parametrize("spare", [0, AMPLE], ids=["no room", "room"])
def test_where_a_workspace_is_not_tiny_little_is_foreseen_too_much(spare: int) -> None:
    layer = LAYERS["wide"]()
    for rows in (4, 9, 48):
        real, foreseen, _ = peaks(layer, inputs_of(layer, 64, rows), spare)
        assert real <= foreseen <= 1.05 * real


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_saved_depends_on_who_asks_for_gradients_and_not_on_training(
    *, trains: bool, grad: bool
) -> None:
    layer = LAYERS["several"]().train(trains)
    real, foreseen, more = peaks(layer, inputs_of(layer, 7, 5), AMPLE, grad=grad)
    assert (more > 0) == grad
    assert real <= foreseen <= real + more


def test_layers_that_are_frozen_keep_as_much() -> None:
    layer = LAYERS["one"]().requires_grad_(False)
    real, foreseen, more = peaks(layer, inputs_of(layer, 7, 5), AMPLE)
    assert real <= foreseen <= real + more


def test_in_half_precision_it_is_foreseen_where_there_is_such_a_kernel() -> None:
    layer = LAYERS["several"]().bfloat16()
    real, foreseen, more = peaks(layer, inputs_of(layer, 7, 5), AMPLE)
    assert real <= foreseen <= real + more


def test_a_second_rehearsal_runs_nothing_real() -> None:
    layer, ran = nn.LSTM(13, 17), list[int]()
    for _ in range(2):
        with Kernels() as kernels:
            foreseen_of(layer, torch.zeros(7, 5, 13), AMPLE)
        ran.append(sum(not fake for *_, fake in kernels.observed))
    assert ran == [2, 0]  # of one row, and of several


def test_what_is_run_has_spare_memory() -> None:
    layer = nn.LSTM(32, 32)  # a row takes more than the gradients of the weights
    x = torch.zeros(20, 6, 32)
    hidden._run.cache_clear()
    for spare, rows in ((0, 1), (3 * 62976, 2), (4 * 62976, 4), (99 * 62976, 8)):
        with Kernels() as kernels, Meter(CPU) as real:
            foreseen_of(layer, x, spare)
        assert max(n for n, _, fake in kernels.observed if not fake) == rows
        assert real.peak <= max(spare, 62976) + 64
        hidden._run.cache_clear()


def test_more_spare_memory_never_foresees_more() -> None:
    layer, x = nn.LSTM(32, 32), torch.zeros(20, 6, 32)
    found = [foreseen_of(layer, x, spare * 62976) for spare in range(12)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_it_is_no_part_of_the_step_that_is_counted() -> None:
    layer, x = nn.LSTM(32, 32), torch.zeros(20, 6, 32)
    hidden._run.cache_clear()
    assert foreseen_of(layer, x, AMPLE) == foreseen_of(layer, x, AMPLE)
