"""Gradients that are sent to other ranks before backward has ended, from the second step on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.faults import in_backward, unwalked
from tests.oracle import assert_exact, same, snapshot, state_after, state_of
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from anybatch import Engine, LazyBatch
from anybatch.devices import Group
from anybatch.distributed import buckets, gradients
from anybatch.planner.full_batch import COLLECTIVES

SIZE, SHARDS = 3, (5, 0, 8)
N, MICRO = 13, 3


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    with ranks(SIZE, fresh=True) as found:
        found.run(many_pieces)
        yield found


def many_pieces(_rank: int, _size: int) -> None:
    """Let every weight of a tiny model be a piece of its own, and its biases one."""
    buckets.SMALL = 7


class Net(nn.Module):
    """Three layers, the middle one called as often as asked; a table whose gradient is sparse.

    Args:
        variant: "twice" calls the middle layer in two checkpointed parts, each with a backward of
            its own; "missing" leaves it out on the first rank; "sparse" adds the table; "views"
            adds two weights as views, which get one gradient.
    """

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.first, self.middle, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.table = nn.Embedding(4, 5, sparse=True)
        self.other = nn.Parameter(torch.randn(4, 9))
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 5] -> [n, 3]."""
        if self.variant == "sparse":
            x = x + self.table((x[:, 0] > 0).long())
        if self.variant.startswith("views"):
            both = self.middle.weight.view(-1) + self.other.view(-1)
            return self.last(self.first(x).tanh() @ both.tanh().view(6, 6))
        h = self.first(x).tanh()
        if self.variant == "missing":
            skips = x[:, :1] > 0
            if bool(skips.all()):
                return self.last(h)
            return self.last(torch.where(skips, h, self.middle(h)))
        if self.variant == "twice":
            for _ in range(2):
                h = checkpoint(self.middle, h, use_reentrant=True)
            return self.last(h)
        return self.last(self.middle(h).tanh())


def make(variant: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(4)
    x, y = torch.randn(N, 5).double(), torch.randint(3, (N,))
    if variant == "missing":
        x[:, 0] = torch.where(torch.arange(N) < 5, 1.0, -1.0)
    if variant == "half":
        return Net(variant).bfloat16(), x.bfloat16(), y
    return Net(variant).double(), x, y


def sliced(rank: int, tensor: Tensor) -> Tensor:
    begin = sum(SHARDS[:rank])
    return tensor[begin : begin + SHARDS[rank]]


class Early:
    """Counts the pieces that were on their way when backward had ended, a step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __enter__(self) -> Early:
        self._send: Callable[..., None] = buckets.Pieces.send
        real, counts = self._send, self.counts

        def send(self: buckets.Pieces, totals: Any) -> None:
            counts.append(len(self.contributed))
            real(self, totals)

        buckets.Pieces.send = send  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        buckets.Pieces.send = self._send  # type: ignore[method-assign]


def loss_of(variant: str) -> Any:
    if variant == "coupled":
        return lambda out, y: (out.T @ F.one_hot(y, 3).double()).square().mean()
    return lambda out, y: F.cross_entropy(out, y, ignore_index=1)


def three_steps(rank: int, _size: int, variant: str, overlap: bool) -> Any:
    """Return the gradients of a third step, and how many places were early in each."""
    model, x, y = make(variant)
    x, y = sliced(rank, x), sliced(rank, y)
    gradients.OVERLAP = overlap

    def run(copied: nn.Module) -> Tensor:
        batch: Any = (LazyBatch(TensorDataset(x, y)),) if variant == "late" and len(x) else (x, y)
        micro_batch = N if variant == "views at once" else MICRO
        engine = Engine(copied, loss_of(variant), micro_batch=micro_batch)
        for _ in range(2):
            engine.backward(*batch)
            if variant != "added":
                copied.zero_grad()
        return engine.backward(*batch)

    try:
        with Early() as early:
            state = state_after(model, run)
    finally:
        gradients.OVERLAP = True
    return {name: t.to_dense() for name, t in state.items()}, early.counts


def truth(variant: str) -> dict[str, Tensor]:
    model, x, y = make(variant)

    def run(copied: nn.Module) -> Tensor:
        for _ in range(3 if variant == "added" else 1):
            loss: Tensor = loss_of(variant)(copied(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return {name: t.to_dense() for name, t in state_after(model, run).items()}


@pytest.mark.large(few=4)
@pytest.mark.parametrize(
    ("variant", "early"),
    [
        ("plain", [0, 6, 0, 6, 0]),  # what was not on its way comes after the rest
        ("added", [0, 6, 0, 6, 0]),
        ("sparse", [0, 6, 0, 6, 0]),
        ("missing", [0, 1, 0, 1, 0]),  # on the first rank; what comes before a missing one waits
        ("half", [0, 6, 0, 6, 0]),
        ("views", [0, 6, 0, 6, 0]),
        ("views at once", [0, 6, 0, 6, 0]),
        ("twice", [0, 6, 0, 0]),  # begins again once, and never tries again
        ("late", [0, 0, 0]),
        ("coupled", [0, 0, 0]),
    ],
)
def test_gradients_sent_early_are_those_sent_late_bit_for_bit(
    workers: Pool, variant: str, early: list[int]
) -> None:
    on, off = workers.run(three_steps, variant, True), workers.run(three_steps, variant, False)
    want = truth(variant)
    for rank, ((got, counts), (other, never)) in enumerate(zip(on, off, strict=True)):
        assert got.keys() == want.keys()
        if (
            variant != "half"
        ):  # of which tests/exactness/test_ranks_gradients.py says how exact it is
            assert_exact(got, want)
        for name in got:
            assert torch.equal(got[name], other[name])
            assert torch.equal(got[name], on[0][0][name])
        assert never == [0, 0, 0]
        if not SHARDS[rank]:
            assert counts == [0] * len(early)
        elif variant == "missing" and rank:
            assert counts == [0, 6, 0, 6, 0]
        else:
            assert counts == early


class Fails:
    """Raises when a gradient of a weight has been computed for the n-th time since it was armed."""

    def __init__(self, error: BaseException) -> None:
        self.calls_and_at, self.error = unwalked([0, 0]), error

    def __deepcopy__(self, memo: Any) -> Fails:
        return self

    def arm(self, at: int) -> None:
        self.calls_and_at()[:] = 0, at

    def __call__(self, *_: Any) -> None:
        found = self.calls_and_at()
        found[0] += 1
        if found[0] == found[1]:
            raise self.error


ERRORS = {
    "fault": ValueError("a fault"),
    "interrupt": KeyboardInterrupt("stop"),
    "memory": RuntimeError("can't allocate memory"),
}
PLACES = {"before": 1, "during": 3}
"""Of three micro-batches: the backward of the first, and of the last, when pieces are under way."""


def failing(rank: int, _size: int, place: str, error: str, in_accumulator: bool) -> Any:
    """Fail on the last rank in the second of three steps; make that again, where it has ended."""
    model, x, y = make("plain")
    x, y = sliced(rank, x), sliced(rank, y)
    memory = "1GiB" if in_accumulator else None
    engine = Engine(model, loss_of("plain"), micro_batch=MICRO, memory=memory)
    hook = Fails(ERRORS.get(error, ValueError()))
    handles = [in_backward(model.first, hook)] if rank == SIZE - 1 else []
    engine.backward(x, y)
    model.zero_grad()
    if in_accumulator and len(x):
        assert engine.plan is not None
        assert engine.plan.memory is not None
        largest = 8 * max(p.numel() for p in model.parameters())
        assert dict(engine.plan.memory.owners)["transfer buffers"] == largest + COLLECTIVES
    before, said = snapshot(model), ""
    hook.arm(PLACES[place] if error in ERRORS else 0)
    try:
        engine.backward(x, y)
    except BaseException as caught:
        said = f"{type(caught).__name__}: {caught}"
        assert same(snapshot(model)["gradients"], before["gradients"])
        for handle in handles:
            handle.remove()
        engine.backward(x, y)
    assert engine.last is not None
    retries, found = engine.last.retries, [p.grad for p in model.parameters()]
    model.zero_grad()
    with Early() as early:
        engine.backward(x, y)
    return said, retries, early.counts, found


@pytest.mark.product
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", ["fault", "interrupt"])
def test_a_fault_while_gradients_are_under_way_is_one_on_all_ranks(
    workers: Pool, place: str, error: str
) -> None:
    want = workers.run(failing, place, "nothing", False)
    for rank, (said, _, counts, got) in enumerate(workers.run(failing, place, error, False)):
        what = repr(ERRORS[error]).replace("('", ": ").replace("')", "")
        assert said == what if rank == SIZE - 1 else f"rank {SIZE - 1}: {what}" in said
        assert counts == [6 if SHARDS[rank] else 0, 0]
        assert all(map(same, got, want[rank][-1]))


@pytest.mark.product
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("in_accumulator", [False, True])
def test_memory_that_runs_out_while_gradients_are_under_way_costs_a_smaller_step(
    workers: Pool, place: str, in_accumulator: bool
) -> None:
    names = [name for name, _ in make("plain")[0].named_parameters()]
    want = {name: t for name, t in truth("plain").items() if name.endswith(".grad")}
    found = workers.run(failing, place, "memory", in_accumulator)
    for said, _, _, got in found:
        there = {f"{name}.grad": t for name, t in zip(names, got, strict=True) if t is not None}
        assert said == ""
        assert_exact(there, want)
        assert same(got, found[0][-1])
    assert found[-1][1] == 1


USES = ("both", "both", "one", "one", "both", "table", "both")
"""Which layers each of several steps uses."""


class Switching(Net):
    """A network whose middle layer, or table, takes part in some steps only."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, 5] -> [n, 3]."""
        if self.variant == "table":
            x = x + self.table((x[:, 0] > 0).long())
        h = self.first(x).tanh()
        return self.last(h if self.variant == "one" else self.middle(h).tanh())


def switched(
    shard: Callable[[Tensor], Tensor], run: Callable[..., Any], uses_of: tuple[str, ...] = USES
) -> list[dict[str, Tensor]]:
    """Return loss and gradients of each step; they are added to what every second one has left."""
    torch.manual_seed(4)
    model, y = Switching("both").double(), torch.randint(3, (N,))
    step, found = run(model), []
    for at, uses in enumerate(uses_of):
        model.variant, x = uses, torch.randn(N, 5).double()
        if at % 2 == 0:
            model.zero_grad()
        loss = step(shard(x), shard(y))
        found.append({n: full_tensor(g) for n, g in state_of(model, loss).items()})
    return found


def full_tensor(tensor: Any) -> Tensor:
    """Return a tensor dense, and gathered where it is spread."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.to_dense()


SPREAD = tuple(uses for uses in USES if uses != "table")
"""Without a table: a sparse gradient of what is spread is refused."""


def switching(rank: int, _size: int, spread: bool) -> list[dict[str, Tensor]]:
    def run(model: nn.Module) -> Callable[..., Tensor]:
        if spread:
            fully_shard(model)
        return Engine(model, loss_of("plain"), micro_batch=MICRO).backward

    return switched(partial(sliced, rank), run, SPREAD if spread else USES)


@pytest.mark.parametrize("spread", [False, True])
def test_a_layer_that_takes_part_in_some_steps_only_has_a_gradient_in_those(
    workers: Pool, spread: bool
) -> None:
    def run(model: nn.Module) -> Callable[..., Tensor]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = loss_of("plain")(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return step

    want = switched(lambda tensor: tensor, run, SPREAD if spread else USES)
    for found in workers.run(switching, spread):
        for got, true in zip(found, want, strict=True):
            assert_exact(got, true)


def counting(rank: int, _size: int) -> list[list[str]]:
    """Return how ranks talk in each of four steps of one kind."""
    model, x, y = make("plain")
    engine, steps = Engine(model, loss_of("plain"), micro_batch=MICRO), []
    started = Group._started

    def noted(self: Group, collective: Any, *args: Any, **named: Any) -> Any:
        steps[-1].append(getattr(collective, "__name__", ""))
        return started(self, collective, *args, **named)

    Group._started = noted  # type: ignore[method-assign]
    try:
        for _ in range(4):
            steps.append([])
            engine.backward(sliced(rank, x), sliced(rank, y))
    finally:
        Group._started = started  # type: ignore[method-assign]
    return steps


def test_a_step_like_an_earlier_one_takes_three_collectives_besides_the_sums(workers: Pool) -> None:
    begin, denominators, end = ["all_gather"] * 3
    buffers = ["all_gather", ""]  # a broadcast to the rank that has no samples
    for steps in workers.run(counting):
        sums = ["all_reduce"] * 4  # three weights and the biases
        for step in steps[2:]:
            assert step == [begin, denominators, *sums, end, *buffers]
