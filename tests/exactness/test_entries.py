"""Lists with one entry a sample are cut as tensors are; what cannot be told apart is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.oracle import assert_exact, state_after, undivided
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import Dataset

import anybatch
from anybatch import Engine, LazyBatch
from anybatch.errors import BatchError

N, SIZES = 11, (4, 7)

ENTRIES: dict[str, tuple[Callable[[int], Any], Callable[[Any], float]]] = {
    "lengths": (lambda i: 1 + i % 5, float),
    "numbers": (lambda i: 0.5 + i, float),
    "0-dim arrays": (lambda i: np.float64(i + 1), float),
    "texts": (lambda i: "ab" * (i + 1), len),
    "bytes": (lambda i: b"x" * (i % 3 + 1), len),
    "flags": (lambda i: i % 3 == 0, lambda flag: 1.0 + flag),
    "some": (lambda i: None if i % 2 else i, lambda i: 1.0 if i is None else i + 2.0),
    "spans": (lambda i: (i, 2 * i + 1), lambda span: span[1] - span[0] + 1.0),
    "boxes": (lambda i: [i, i + 1, 3], sum),
    "words": (lambda i: ("a",) * (i % 4), lambda words: 1.0 + len(words)),
    "mappings": (lambda i: {"id": i, "name": "a" * i}, lambda entry: entry["id"] + 1.0),
}


class Net(nn.Module):
    """Weights its samples by the entries that it is given, if any. `norm` lets samples meet."""

    def __init__(self, weight: Callable[[Any], float], *, norm: bool) -> None:
        super().__init__()
        self.weight = weight
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4) if norm else nn.Tanh())

    def forward(self, x: Tensor, entries: Any = None) -> Tensor:
        found: Tensor = self.layers(x)
        return found if entries is None else found * weights(entries, found, self.weight)


def weights(entries: Any, like: Tensor, weight: Callable[[Any], float]) -> Tensor:
    assert len(entries) == len(like)
    return like.new_tensor([float(weight(entry)) for entry in entries]).unsqueeze(1)


def entries_of(variant: str, first: int = 0, stop: int = N) -> list[Any]:
    return [ENTRIES[variant][0](i) for i in range(first, stop)]


def batch(variant: str, *, inside: bool, rows: slice = slice(None)) -> tuple[Any, Any]:
    torch.manual_seed(0)
    x, y = torch.randn(N, 5).double()[rows], torch.randn(N, 4).double()[rows]
    entries = entries_of(variant)[rows]
    return ((x, entries), {"y": y}) if inside else (x, {"y": y, "of": {"each": entries}})


def loss_of(variant: str, *, inside: bool) -> Callable[[Any, Any], Tensor]:
    def each(out: Tensor, targets: Any) -> Tensor:
        errors = (out - targets["y"]).square()
        if not inside:
            errors = errors * weights(targets["of"]["each"], out, ENTRIES[variant][1])
        return errors.mean(1)

    return each


def net(variant: str, *, norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    return Net(ENTRIES[variant][1], norm=norm).double()


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 11])
@pytest.mark.parametrize("form", ["per sample", "coupled", "lanes"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("variant", ENTRIES)
def test_entries_go_with_their_rows(
    variant: str, inside: bool, form: str, micro_batch: int
) -> None:
    """Lists of numbers went whole to every micro-batch: 28 % of the gradient, and 'exact'."""
    inputs, targets = batch(variant, inside=inside)
    each, model = loss_of(variant, inside=inside), net(variant, norm=form == "lanes")

    def mean(out: Tensor, targets: Any) -> Tensor:
        return each(out, targets).mean().sqrt()

    loss = anybatch.Loss.per_sample(each) if form == "per sample" else mean

    def run(copied: nn.Module) -> Tensor:
        return Engine(copied, loss, micro_batch=micro_batch).backward(inputs, targets)

    full = (lambda o, t: each(o, t).mean()) if form == "per sample" else mean
    assert_exact(state_after(model, run), undivided(model, full, inputs, targets))


@pytest.mark.parametrize("variant", ["lengths", "texts", "mappings"])
def test_entries_are_cut_under_a_budget_and_again_where_memory_runs_out(variant: str) -> None:
    inputs, targets = batch(variant, inside=True)
    model, each = net(variant), loss_of(variant, inside=True)

    def run(copied: nn.Module) -> Tensor:
        fails = [True]

        def once(_module: nn.Module, args: Any) -> None:
            if fails and len(args[0]) == 8 and torch.is_grad_enabled():
                fails.clear()
                raise torch.OutOfMemoryError("out of memory")

        copied.layers.register_forward_pre_hook(once)
        return Engine(copied, lambda o, t: each(o, t).mean(), micro_batch=8).backward(
            inputs, targets
        )

    want = undivided(model, lambda o, t: each(o, t).mean(), inputs, targets)
    assert_exact(state_after(model, run), want)

    def budget(copied: nn.Module) -> Tensor:
        engine = Engine(copied, lambda o, t: each(o, t).mean(), memory="1MiB")
        return engine.backward(inputs, targets)

    assert_exact(state_after(model, budget), want)


def test_a_list_that_makes_the_last_samples_others_is_planned_for() -> None:
    """A dry run compared its first micro-batches: a step held 2.5 times what was predicted."""
    torch.manual_seed(0)
    model, n, few = nn.Linear(6, 4).double(), 40, 4
    x, y = torch.randn(n, 6).double(), torch.randn(n, 4).double()
    targets = {"y": y, "flags": [i < n - few for i in range(n)]}

    def loss(out: Tensor, targets: Any) -> Tensor:
        return (F.mse_loss if any(targets["flags"]) else F.l1_loss)(out, targets["y"])

    engine = Engine(model, loss, memory="1GiB", micro_batch=few)
    engine.backward(x, targets)
    assert engine.last is not None
    assert engine.last.peak_bytes is not None
    assert engine.last.predicted_bytes is not None
    assert engine.last.peak_bytes <= engine.last.predicted_bytes


class Rows(Dataset[Any]):
    """Pairs whose input has a length beside its row."""

    def __init__(self, x: Tensor, lengths: list[int], y: Tensor) -> None:
        self.x, self.lengths, self.y = x, lengths, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.lengths[i], self.y[i]


def collated(items: list[Any]) -> Any:
    x, lengths, y = zip(*items, strict=True)
    return (torch.stack(x), list(lengths)), torch.stack(y)


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found: Tensor = self.gru(packed)[1][0]
        return found


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 4, 11])
def test_lengths_in_a_list_pack_sequences(micro_batch: int, lazy: bool) -> None:
    """It ended in an IndexError."""
    torch.manual_seed(2)
    x, y, lengths = torch.randn(N, 6, 3).double(), torch.randn(N, 4).double(), entries_of("lengths")
    model = Packs().double()
    options: tuple[Any, ...] = ({"x": x, "lengths": lengths}, y)
    loaded = LazyBatch(Rows(x, lengths, y), collate_fn=collated)

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, nn.MSELoss(), micro_batch=micro_batch)
        return engine.backward(loaded) if lazy else engine.backward(*options)

    assert_exact(state_after(model, run), undivided(model, nn.MSELoss(), *options))


def on_rank(rank: int, size: int, form: str) -> Any:
    first = sum(SIZES[:rank])
    rows = slice(first, first + SIZES[rank])
    inputs, targets = batch("lengths", inside=form == "lanes", rows=rows)
    each = loss_of("lengths", inside=form == "lanes")

    def run(copied: nn.Module) -> Tensor:
        engine = Engine(copied, lambda o, t: each(o, t).mean().sqrt(), micro_batch=3)
        return engine.backward(inputs, targets)

    return state_after(net("lengths", norm=form == "lanes"), run)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with ranks(len(SIZES)) as found:
        yield found


@pytest.mark.parametrize("form", ["coupled", "lanes"])
def test_entries_of_all_ranks_are_joined(pool: Pool, form: str) -> None:
    inputs, targets = batch("lengths", inside=form == "lanes")
    each = loss_of("lengths", inside=form == "lanes")
    model = net("lengths", norm=form == "lanes")
    want = undivided(model, lambda o, t: each(o, t).mean().sqrt(), inputs, targets)
    for found in pool.run(on_rank, form):
        assert_exact(found, want)


class Names(NamedTuple):
    x: Tensor
    names: list[str]


class Graphs:
    """A batch of a person's own, as of TensorDict or of graphs."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.batch_size = x, [len(x)]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: Any) -> Graphs:
        return Graphs(self.x[i])


class Held:
    def __init__(self, x: Tensor) -> None:
        self.inner = {"x": x}


@dataclass
class Record:
    x: Tensor
    names: list[str]


X = torch.zeros(4, 3)

REFUSED: list[tuple[Any, str]] = [
    ({"x": X, "of": [1, 2, 3]}, r"inputs\['of'\] has 3 for 4 samples: write tuple\(...\)"),
    ({"x": X, "of": ["a"] * 5}, r"inputs\['of'\] has 5 for 4 samples: write tuple"),
    ({"x": X, "of": (1, 2, 3, 4)}, r"inputs\['of'\] has 4 entries.*write list\(...\).*torch.Size"),
    ({"x": X, "pad": ((0, 1),) * 4}, r"a tuple of numbers belongs to, and inputs\['pad'\]"),
    ({"x": X, "of": [torch.tensor(1.0)] * 4}, r"inputs\['of'\] has 4 entries.*torch.stack"),
    ({"x": X, "of": [{"box": torch.tensor(1.0)}] * 4}, r"one tensor \[N, ...\].*torch.stack"),
    ({"x": X, "of": [torch.zeros(5)] * 4}, r"\['of'\]\[0\]: 5.*pad and stack tensors of one"),
    ({"x": X, "of": [list("abcd")] * 4}, r"which list has one entry.*write it as a mapping"),
    ((X, [1, 2]), r"inputs\[1\] has 2 for 4 samples"),
    (Record(X, ["a"]), r"inputs.names has 1 for 4 samples"),
    (Graphs(X), r"inputs is of tests.*Graphs.*pass its tensors, \{'x': inputs.x, ...\}"),
    ({"x": X, "g": Graphs(X)}, r"inputs\['g'\] is of .*Graphs, whose rows cannot be cut"),
    ({"x": X, "g": Held(X)}, r"inputs\['g'\] is of .*Held, whose rows"),
    ({"x": X, "g": deque([1, 2, 3, 4])}, r"inputs\['g'\] is of collections.deque"),
    ({"x": X, "g": (i for i in range(4))}, r"inputs\['g'\] is of builtins.generator"),
    ({"x": X, "g": range(4)}, r"inputs\['g'\] is of builtins.range"),
]


@pytest.mark.product
@pytest.mark.parametrize(("inputs", "words"), REFUSED, ids=range(len(REFUSED)))
@pytest.mark.parametrize("options", [{"micro_batch": 2}, {"memory": "1GiB"}], ids=["n", "memory"])
def test_what_cannot_be_cut_for_certain_is_refused(
    inputs: Any, words: str, options: dict[str, Any]
) -> None:
    """An object with rows of its own ran whole in every micro-batch."""
    model = nn.Linear(3, 2)
    with pytest.raises(BatchError, match=words):
        Engine(model, nn.MSELoss(), **options).backward(inputs, torch.zeros(4, 2))
    assert model.weight.grad is None


def test_targets_that_are_a_list_are_one_entry_a_sample() -> None:
    inputs, _ = batch("numbers", inside=False)

    def each(out: Tensor, of: list[float]) -> Tensor:
        return (out * weights(of, out, float)).square().mean(1)

    model = net("numbers")

    def run(copied: nn.Module) -> Tensor:
        loss = anybatch.Loss.per_sample(each)
        return Engine(copied, loss, micro_batch=2).backward(inputs, entries_of("numbers"))

    want = undivided(model, lambda o, t: each(o, t).mean(), inputs, entries_of("numbers"))
    assert_exact(state_after(model, run), want)
