"""What an allocator makes of bytes: by itself, in the meter, in lines, and in a forecast."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.core.absent import AbsentDevice, planned_for
from anybatch.core.optimizers import allocated, rounded, rounding
from anybatch.execution.signature import as_fakes, bytes_of, first_rows
from anybatch.memory.ledger import UNLIMITED, AffineTimeline, NotAffineError, Timeline, record
from anybatch.memory.meter import Meter
from anybatch.planner import rehearsal

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCK = 512
DEVICE = AbsentDevice("8GiB", 8 << 30)


@pytest.mark.parametrize(
    ("nbytes", "device", "expected"),
    [
        (0, CUDA, 0),
        (1, CUDA, 512),
        (512, CUDA, 512),
        (513, CUDA, 1024),
        (0, CPU, 0),
        (1, CPU, 1),
        (513, CPU, 513),
    ],
)
def test_an_allocation_is_rounded_up_as_its_device_does(
    nbytes: int, device: torch.device, expected: int
) -> None:
    assert rounded(nbytes, device) == expected


def test_the_host_rounds_only_while_it_stands_in_for_a_device() -> None:
    assert rounding(CPU) == 1
    with planned_for(DEVICE):
        assert rounding(CPU) == BLOCK
        with planned_for(None):
            assert rounding(CPU) == 1
    assert rounding(CPU) == 1


def test_a_sparse_tensor_has_memory_for_places_and_values() -> None:
    entries = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.ones(2), (9,), check_invariants=True
    )
    assert allocated(entries) == bytes_of(entries) == 2 * (8 + 4)
    with planned_for(DEVICE):
        assert allocated(entries) == 2 * BLOCK
        assert allocated(torch.ones(129)) == 2 * BLOCK


def test_the_meter_counts_every_storage_as_it_is_allocated() -> None:
    there = [torch.ones(n) for n in (1, 128, 129, 1000)]
    with planned_for(DEVICE), Meter(CPU, {"parameters": there}) as meter:
        made = [t * 2 for t in there]
        assert meter.live == 2 * sum(allocated(t) for t in there)
        view = made[0].view(1)
        del made[1:], view
        assert meter.live == sum(allocated(t) for t in (*there, *made))
    assert meter.timeline().peak == meter.peak


SIZES = st.tuples(
    st.integers(0, 2000),  # bytes at no sample
    st.integers(0, 700),  # and for each
    st.integers(0, 5),  # live from an event on
    st.integers(1, 6),  # for so many
)


def traced(spans: list[tuple[int, int, int, int]], n: int) -> Timeline:
    found = [("activations", a + b * n, first, first + more) for a, b, first, more in spans]
    return record(found, list("abcdef"), ("activations",), grain=BLOCK)


@given(st.lists(SIZES, max_size=12), st.integers(1, 300))
def test_lines_through_two_sizes_are_exact_at_every_other(
    spans: list[tuple[int, int, int, int]], n: int
) -> None:
    line = AffineTimeline.through(traced(spans, 2), traced(spans, 3), 2, 3)
    assert (line.at(n).live == traced(spans, n).live).all()
    above = line.base + n * line.slope
    assert (above >= line.at(n).live).all()


@given(st.lists(SIZES, max_size=12), st.integers(0, 400_000))
def test_the_largest_that_fits_is_that_of_brute_force(
    spans: list[tuple[int, int, int, int]], budget: int
) -> None:
    line = AffineTimeline.through(traced(spans, 2), traced(spans, 3), 2, 3)
    fits = [n for n in range(1, 900) if traced(spans, n).peak <= budget]
    largest = line.largest(budget)
    if fits and fits[-1] == 899:
        assert largest == UNLIMITED or largest >= 899
    elif fits or largest:
        assert largest == (fits[-1] if fits else 0)


def test_allocations_that_differ_have_a_bound() -> None:
    """Events are the same, and one size frees a storage later: rounding is counted for each."""
    low = record([("a", 700, 0, 2), ("a", 10, 1, 3)], ["x", "y", "z"], ("a",), grain=BLOCK)
    high = record([("a", 900, 0, 3), ("a", 10, 1, 3)], ["x", "y", "z"], ("a",), grain=BLOCK)
    line = AffineTimeline.through(low, high, 2, 3)
    assert line.spans is None
    assert (line.at(2).live >= low.live).all()
    assert (line.at(3).live >= high.live).all()
    with pytest.raises(NotAffineError):
        AffineTimeline.through(low, record([], ["x"], ("a",), grain=BLOCK), 2, 3)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 7)
        for t in range(4):
            state = self.cell(x[:, t], state)
        out: Tensor = self.out(state)
        return out


def convolved(*, norm: bool) -> nn.Module:
    middle = nn.BatchNorm2d(6) if norm else nn.GroupNorm(2, 6)
    body = nn.Conv2d(3, 6, 3, padding=1), middle, nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(6, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(9, 33), nn.GELU(), nn.Linear(33, 3)), (9,)),
    "groups": (lambda: convolved(norm=False), (3, 8, 8)),
    "batches": (lambda: convolved(norm=True), (3, 8, 8)),
    "recurrent": (Recurrent, (4, 5)),
}


@pytest.mark.product
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [1.0, 0.6, 0.2])
def test_a_plan_predicts_the_step_that_its_size_would_be(name: str, share: float) -> None:
    """The line at the size that was chosen is what a dry run of just that size counts."""
    make, shape = MODELS[name]
    model, size, device = make(), 50, AbsentDevice("1GiB", 1 << 30)
    x, y = torch.randn(size, *shape), torch.randint(0, 3, (size,))

    def plan(memory: int | None) -> anybatch.Plan:
        return anybatch.plan(
            *(copy.deepcopy(model), F.cross_entropy, (x, y)),
            device="cuda:1GiB",
            memory=memory,
            batchnorm="local",
            offload="off",
        )

    loose = plan(None).memory
    assert loose is not None
    found = plan(loose.floor + int(share * (loose.undivided - loose.floor)))
    assert found.memory is not None
    n = found.micro_batch
    engine = anybatch.Engine(model, F.cross_entropy, memory="1GiB", batchnorm="local")
    batch, modules = engine._inputs.batch(x, y), engine._inputs.modules()
    with planned_for(device):
        case = as_fakes(engine._inputs.case(batch, modules, trains=True))
        _, observed = rehearsal.inspect_model(case, 4)
        observed = rehearsal.watch_loss(case, observed)
        first = first_rows(case, size)
        line = (
            rehearsal.divided(first, n, observed, accumulator=found.accumulate == "accumulator")
            if n < size
            else rehearsal.full_batch(case, size, observed)[0]
        )
    owners = dict(found.memory.owners)
    assert (n == size) == (share == 1)
    copies = sum(map(allocated_there, model.buffers())) * (2 if n < size else 1)
    extra = owners["cuBLAS"] + owners["other tensors"] + copies
    assert found.memory.predicted == line.peak + extra


def allocated_there(tensor: Tensor) -> int:
    with planned_for(DEVICE):
        return allocated(tensor)


def test_a_loss_that_is_retained_holds_no_more_than_a_number() -> None:
    """Its terms stayed through the next step: torch's mean of squares lies in their memory."""
    trained = anybatch.Engine(nn.Linear(3, 2), F.mse_loss, micro_batch=90)
    loss = trained.backward(torch.randn(70, 3), torch.randn(70, 2))
    assert loss.untyped_storage().nbytes() == loss.element_size()
    assert trained.last is not None
    assert trained.last.loss is loss


@pytest.mark.parametrize("layers", [1, 40])
def test_every_small_parameter_takes_a_block(layers: int) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    x, y = torch.randn(8, 2), torch.randint(0, 2, (8,))
    plan = anybatch.plan(model, F.cross_entropy, (x, y), device="cuda:1GiB")
    assert plan.memory is not None
    owners = dict(plan.memory.owners)
    assert owners["parameters"] == 2 * layers * BLOCK
    assert owners["other tensors"] == BLOCK
