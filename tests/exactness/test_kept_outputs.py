"""`engine.outputs`: the outputs of all samples, as the undivided model returns them.

Kept only where asked for, and within the budget. Every mechanism is compared with the model itself
on the full batch in float64.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
from tests.limits.test_budget import Draw, dice, draw, metered_step
from tests.limits.test_chunked_budget import Net as Wide
from tests.limits.test_chunked_budget import loss_fn as of_words
from tests.limits.test_out_of_memory import Fault, Fuse, at
from tests.oracle import assert_exact, call
from tests.pool import Pool, ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import anybatch
from anybatch import Encoders, Engine, LazyBatch, Plan
from anybatch.core import pytree
from anybatch.errors import BatchError, BudgetError

N = 10


def rows(n: int = N) -> Tensor:
    return torch.randn(n, 5, dtype=torch.float64)


def mlp(*norms: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), *norms, nn.Tanh(), nn.Linear(6, 3)).double()


class Pair(NamedTuple):
    left: Tensor
    right: dict[str, Tensor]


@dataclass
class Found:
    score: Tensor
    hidden: Tensor


class Tree(nn.Module):
    """Returns a tree: rows first, rows second, and a number of the model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net, self.rnn = kind, mlp(), nn.LSTM(5, 3, 2, batch_first=True).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        score, (_, state) = self.net(x), self.rnn(x[:, None])[1]
        if self.kind == "named":
            return Pair(score, {"state": state, "scale": self.scale.detach()})
        return Found(score, state) if self.kind == "dataclass" else (score, [state, None, 3])


class Inside(nn.Module):
    """Returns its loss with other outputs; a tensor of 4 rows belongs to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.heads = mlp(), nn.Parameter(torch.randn(4, 2, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "heads": self.heads * 2}


def encoders() -> nn.Module:
    return Encoders({"image": mlp(), "text": mlp()})


def by_score(outputs: Any, targets: Tensor) -> Tensor:
    found = next(iter(pytree.flat(outputs)))
    return F.cross_entropy(found, targets)


def nearest(outputs: Any, _: Tensor) -> Tensor:
    return F.cross_entropy(outputs["image"] @ outputs["text"].t(), torch.arange(N))


def of_shares(outputs: Tensor, targets: Tensor) -> Tensor:
    return dice(outputs, F.one_hot(targets, 3).double())


def pair() -> Any:
    return {"image": rows(), "text": rows()}


def image_rows() -> Tensor:
    return torch.randn(N, 3, 8, 8, dtype=torch.float64)


def convolutions() -> nn.Module:
    first = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(144, 3)).double()


Make = tuple[Callable[[], nn.Module], Any, Callable[[], Any], str]
MECHANISMS: dict[str, Make] = {
    "streaming": (mlp, nn.CrossEntropyLoss(), rows, "streaming"),
    "two passes": (mlp, of_shares, rows, "two-pass"),
    "named tuple": (lambda: Tree("named"), by_score, rows, "streaming"),
    "dataclass": (lambda: Tree("dataclass"), by_score, rows, "streaming"),
    "tuple, coupled": (
        lambda: Tree("tuple"),
        lambda outputs, targets: of_shares(outputs[0], targets),
        rows,
        "two-pass",
    ),
    "encoders": (encoders, nearest, pair, "two-pass"),
    "lockstep": (lambda: mlp(nn.BatchNorm1d(6)), nn.CrossEntropyLoss(), rows, "lockstep"),
    "lockstep, coupled": (lambda: mlp(nn.BatchNorm1d(6)), of_shares, rows, "lockstep"),
    "convolutions": (convolutions, F.cross_entropy, image_rows, "lockstep"),
}


def made(name: str) -> tuple[nn.Module, Any, Any, Tensor, str]:
    torch.manual_seed(0)
    make, loss, inputs, mechanism = MECHANISMS[name]
    return make(), loss, inputs(), torch.randint(3, (N,)), mechanism


def flat(tree: Any) -> dict[str, Tensor]:
    return {path: tensor.detach() for path, tensor in pytree.tensors(tree, "outputs")}


def of_model(model: nn.Module, inputs: Any) -> Any:
    return call(copy.deepcopy(model), inputs)


def assert_outputs(engine: Engine, want: Any) -> None:
    assert type(engine.outputs) is type(want)
    assert_exact(flat(engine.outputs), flat(want))
    assert not any(tensor.requires_grad for tensor in flat(engine.outputs).values())


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [4, 5, 1, N])
@pytest.mark.parametrize("name", MECHANISMS)
def test_they_are_those_of_the_undivided_batch(name: str, micro_batch: int) -> None:
    model, loss, inputs, targets, mechanism = made(name)
    engine = Engine(model, loss, micro_batch=micro_batch, keep_outputs=True)
    assert engine.outputs is None
    for _ in range(2):
        want = of_model(model, inputs)
        engine.backward(inputs, targets)
        assert_outputs(engine, want)
    assert engine.plan is not None
    assert engine.plan.mechanism == ("undivided" if micro_batch == N else mechanism)
    model.eval()
    want = of_model(model, inputs)
    engine.evaluate(inputs, targets)
    assert_outputs(engine, want)


@pytest.mark.parametrize("micro_batch", [4, 5, 2])
def test_a_loss_among_them_is_that_of_the_full_batch(micro_batch: int) -> None:
    """A tensor with as many rows as a micro-batch, which belong to no sample, stays as it is."""
    torch.manual_seed(0)
    model, inputs = Inside(), (torch.randn(8, 5).double(), torch.randint(3, (8,)))
    inputs[1][:3] = -100
    want = of_model(model, inputs)
    engine = Engine(model, micro_batch=micro_batch, keep_outputs=True)
    engine.backward(inputs)
    assert_outputs(engine, want)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), of_shares])
def test_with_full_batch_draws_they_are_those_of_the_same_seed(loss: Any) -> None:
    torch.manual_seed(0)
    model, x, y = mlp(nn.Dropout(0.5)), rows(), torch.randint(3, (N,))
    torch.manual_seed(1)
    want = model(x)
    torch.manual_seed(1)
    engine = Engine(model, loss, micro_batch=4, rng="batch", keep_outputs=True)
    engine.backward(x, y)
    assert_outputs(engine, want)


def test_under_autocast_they_have_its_dtype() -> None:
    torch.manual_seed(0)
    model, x, y = mlp().float(), rows().float(), torch.randint(3, (N,))
    engine = Engine(model, nn.CrossEntropyLoss(), micro_batch=4, keep_outputs=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine.backward(x, y)
        want = torch.cat([model(part) for part in x.split(4)])
    assert engine.outputs.dtype == torch.bfloat16
    assert torch.equal(engine.outputs, want)


def test_a_batch_that_is_loaded_on_the_way() -> None:
    torch.manual_seed(0)
    model, x, y = mlp(), rows(), torch.randint(3, (N,))
    engine = Engine(model, nn.CrossEntropyLoss(), micro_batch=4, keep_outputs=True)
    engine.backward(LazyBatch(TensorDataset(x, y), range(N)))
    assert_outputs(engine, model(x))


class Lengths(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return torch.randn(4 if at < 4 else 6, 5).double(), torch.zeros(4 if at < 4 else 6).long()


def test_rows_of_several_lengths_are_refused() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    model = mlp()
    engine = Engine(model, loss, micro_batch=2, keep_outputs=True)
    with pytest.raises(BatchError, match=r"agree in all dimensions but that of the samples, and "):
        engine.backward(LazyBatch(Lengths(), range(N)))
    assert engine.outputs is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_value_of_a_micro_batch_is_refused() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, y), "size": logits.detach().square().mean()}

    inputs = rows(), torch.randint(3, (N,))
    Engine(Both(), micro_batch=4).backward(inputs)
    with pytest.raises(BatchError, match=r"the same in every micro-batch, and outputs\['size'\]"):
        Engine(Both(), micro_batch=4, keep_outputs=True).backward(inputs)


class Fails(nn.Module):
    """Runs out of memory once, at some call of forward or of backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.net, self.where, self.fault = mlp(), where, Fault()

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            self.fault(len(x))
            return cast(Tensor, self.net(x))
        return cast(Tensor, Fuse.apply(self.net(x), self.fault))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), of_shares])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", [0, 1])
def test_a_step_that_was_tried_again_has_no_stale_parts(call: int, where: str, loss: Any) -> None:
    torch.manual_seed(0)
    x, y = rows(), torch.randint(3, (N,))
    model = Fails(where)
    engine = Engine(model, loss, micro_batch=4, keep_outputs=True)
    engine.backward(x, y)
    model.fault.sizes.clear()
    model.fault.when = at(call)
    engine.backward(x + 1, y)
    assert model.fault.failed
    assert engine.last is not None
    assert engine.last.retries == 1
    assert_outputs(engine, model.net(x + 1))


def test_they_are_none_after_a_step_that_failed_and_absent_where_not_asked_for() -> None:
    model, x, y = mlp(), rows(), torch.randint(3, (N,))
    engine = Engine(model, nn.CrossEntropyLoss(), micro_batch=4, keep_outputs=True)
    engine.backward(x, y)
    with pytest.raises(BatchError):
        engine.backward(x, y[:3])
    assert engine.outputs is None
    plain = Engine(model, nn.CrossEntropyLoss(), micro_batch=4)
    with pytest.raises(AttributeError, match=r"Engine\(\.\.\., keep_outputs=True\) keeps them"):
        _ = plain.outputs


def keeping(it: Draw, memory: int | str) -> Engine:
    loss, optimizer = it.loss, it.optimizer
    return Engine(it.model, loss, optimizer, memory=memory, cache=None, keep_outputs=True)


def test_a_budget_holds_with_them(counted: Callable[..., int]) -> None:
    for seed in range(counted(60, 20)):
        it = draw(seed)
        memory = keeping(it, "1GiB").foresee(it.x, it.y, timed=False).memory
        assert memory is not None
        low, high = sorted((memory.floor, memory.undivided))
        for given in (low, random.Random(seed).randint(low, high)):
            budget, engine = given, keeping(it, given)
            try:
                metered_step(it, engine, it.x, it.y)  # and what planning leaves to the collector
            except BudgetError as error:  # with less room less is tried out
                budget = error.needed
                engine = keeping(it, budget)
                metered_step(it, engine, it.x, it.y)
            assert engine.last is not None
            assert (engine.last.peak_bytes or 0) <= budget, seed
            for _ in range(2):
                assert metered_step(it, engine, it.x, it.y) <= budget, seed


@pytest.mark.large(few=4)
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_budget_below_the_undivided_step_divides_it_and_keeps_them(name: str) -> None:
    model, loss, inputs, targets, _ = made(name)
    of_any = Engine(model, loss, memory="1GiB", cache=None, keep_outputs=True)
    memory = of_any.foresee(inputs, targets, timed=False).memory
    assert memory is not None
    budget = max(memory.floor, (memory.floor + memory.undivided) // 2)
    engine = Engine(model, loss, memory=budget, cache=None, keep_outputs=True)
    for _ in range(3):
        want = of_model(model, inputs)
        model.zero_grad()
        engine.backward(inputs, targets)
        assert_outputs(engine, want)
        assert engine.last is not None
        assert engine.last.predicted_bytes is not None
        assert (engine.last.peak_bytes or 0) <= engine.last.predicted_bytes <= budget


def test_logits_that_are_kept_are_not_computed_in_chunks() -> None:
    torch.manual_seed(0)
    model, x = Wide(inside=False).double(), torch.randint(3000, (12, 24))
    y = torch.randint(3000, (12, 24))
    engine = Engine(model, of_words, memory="24MiB", cache=None, keep_outputs=True)
    engine.backward(x, y)
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert not engine.plan.memory.chunked
    assert_outputs(engine, model(x))
    with pytest.raises(BudgetError, match="outputs 6.6 MiB"):
        Engine(model, of_words, memory="3800KiB", cache=None, keep_outputs=True).backward(x, y)


def test_a_plan_that_does_not_count_them_is_refused() -> None:
    model, x, y = mlp(), rows(), torch.randint(3, (N,))
    loss = nn.CrossEntropyLoss()
    plan = anybatch.plan(model, loss, (x, y), memory="1MiB", timed=False)
    with pytest.raises(ValueError, match="must count the outputs that are kept, and this one"):
        Engine(model, loss, plan=plan, keep_outputs=True)
    keeps = Engine(model, loss, memory="2KiB", cache=None, keep_outputs=True).foresee(x, y)
    engine = Engine(model, loss, plan=Plan.from_json(keeps.to_json()), keep_outputs=True)
    engine.backward(x, y)
    assert_outputs(engine, model(x))


SIZES = 7, 0, 3


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with ranks(len(SIZES)) as found:
        yield found


def on_rank(rank: int, _size: int, name: str, micro_batch: int) -> Any:
    model, loss, inputs, targets, _ = made(name)
    begin = sum(SIZES[:rank])
    own, aims = (pytree.rows(tree, begin, begin + SIZES[rank], N) for tree in (inputs, targets))
    engine = Engine(model, loss, micro_batch=micro_batch, keep_outputs=True)
    engine.backward(own, aims)
    return engine.outputs


@pytest.mark.product
@pytest.mark.parametrize("name", ["streaming", "two passes", "lockstep", "lockstep, coupled"])
@pytest.mark.parametrize("micro_batch", [2, N])
def test_over_ranks_each_has_those_of_its_own_samples(
    pool: Pool, name: str, micro_batch: int
) -> None:
    model, _, inputs, _, _ = made(name)
    want, found = model(inputs).detach(), pool.run(on_rank, name, micro_batch)
    assert found[1] is None
    for part, rank in (want[:7], 0), (want[7:], 2):
        assert_exact({"outputs": found[rank]}, {"outputs": part})
