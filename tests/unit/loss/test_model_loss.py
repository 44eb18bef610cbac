"""Engine(model): the loss that a model returns, exact without a declaration, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tests.oracle import assert_exact, copy_of, error_of, snapshot, state_after, state_of, undivided
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import anybatch
from anybatch import Engine, LazyBatch, Loss
from anybatch.core.barrier import looks_here
from anybatch.errors import LossError, NotExactError

N, T, V = 7, 5, 11
Lose = Callable[[Tensor, Tensor], Tensor]


class Language(nn.Module):
    """A small language model: `lose` takes its loss, `form` is what it returns."""

    def __init__(self, lose: Lose, form: Callable[[Tensor, Tensor], Any], *, norm: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 6), nn.Linear(6, V)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Dropout(0.5)
        self.lose, self.form = lose, form

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        h = torch.tanh(self.embed(ids))
        h = self.norm(h.flatten(0, 1)).view_as(h)
        logits = self.head(h)
        return self.form(self.lose(logits, labels), logits)


@dataclass
class Found:
    loss: Tensor
    logits: Tensor


class Named(NamedTuple):
    logits: Tensor
    loss: Tensor


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a tensor": lambda loss, _: loss,
    "a tuple": lambda loss, logits: (loss, logits),
    "a list": lambda loss, logits: [loss, logits],
    "a mapping": lambda loss, logits: {"logits": logits, "loss": loss},
    "a dataclass": Found,
    "a named tuple": lambda loss, logits: Named(logits, loss),
    "an object": lambda loss, logits: SimpleNamespace(loss=loss, logits=logits),
}


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def two_terms(logits: Tensor, labels: Tensor) -> Tensor:
    first = F.cross_entropy(logits[:, 0], labels[:, 0].clamp(min=0))
    return shifted(logits, labels) + 0.1 * first


def untraced(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).flatten(0, 1)[:, 0].logsumexp(0)


def model(lose: Lose = shifted, form: str = "a mapping", *, norm: bool = False) -> Language:
    return Language(lose, FORMS[form], norm=norm).double().train(norm)


def batch(n: int = N) -> dict[str, Tensor]:
    labels = torch.randint(V, (n, T))
    labels[torch.rand(n, T) < 0.4] = -100
    labels[-1] = -100  # a tail of one has nothing to predict
    labels[0, 2] = 4
    return {"ids": torch.randint(V, (n, T)), "labels": labels}


def loss_of(outputs: Any) -> Tensor:
    if isinstance(outputs, dict):
        return outputs["loss"]
    if isinstance(outputs, tuple | list) and not hasattr(outputs, "loss"):
        return outputs[0]
    return getattr(outputs, "loss", outputs)


def assert_full_batch(
    net: nn.Module, rows: dict[str, Tensor], inputs: Any = None, **how: Any
) -> Engine:
    """Assert Law 1 for two steps of an engine, and return it."""
    engines: list[Engine] = []

    def run(copied: nn.Module) -> Tensor:
        engines.append(Engine(copied, inputs, **how))
        moved = [b.clone() for b in copied.buffers()]
        engines[0].backward(dict(rows))
        copied.zero_grad()
        for buffer, before in zip(copied.buffers(), moved, strict=True):
            buffer.copy_(before)
        return engines[0].backward(dict(rows))

    want = undivided(net, loss_of, rows, None)
    assert_exact(state_after(net, run), want)
    return engines[0]


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("form", FORMS)
def test_in_any_form_in_which_a_model_returns_its_loss(form: str, micro_batch: int) -> None:
    engine = assert_full_batch(model(form=form), batch(), micro_batch=micro_batch)
    assert engine.plan is not None
    assert engine.plan.mechanism == ("streaming" if micro_batch < N else "undivided")


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3, 4, 6])  # in lanes a tail of 3 may come first
@pytest.mark.parametrize("norm", [False, True], ids=["streaming", "lanes"])
@pytest.mark.parametrize("lose", [shifted, summed, two_terms])
def test_it_is_exact_where_samples_meet_and_where_not(
    lose: Lose, norm: bool, micro_batch: int
) -> None:
    engine = assert_full_batch(model(lose, norm=norm), batch(), micro_batch=micro_batch)
    assert engine.plan is not None
    assert engine.plan.mechanism == ("lockstep" if norm else "streaming")


def test_a_batch_of_one_sample() -> None:
    assert_full_batch(model(), {name: x[:1] for name, x in batch().items()}, micro_batch=1)


def test_within_a_budget() -> None:
    rows = batch(64)
    net = model()
    needed = anybatch.plan(net, None, (rows, None), memory="1GiB", timed=False).memory
    assert needed is not None
    engine = assert_full_batch(net, rows, memory=needed.floor + 1000)
    assert engine.plan is not None
    assert engine.plan.micro_batch < 64
    assert engine.plan.exact


def test_a_batch_that_is_loaded_on_the_way() -> None:
    net, rows = model(), batch()
    items: Any = [{name: column[i] for name, column in rows.items()} for i in range(N)]
    got = state_after(net, lambda m: Engine(m, micro_batch=3).backward(LazyBatch(items)))
    assert_exact(got, undivided(net, loss_of, rows, None))


def test_draws_of_the_full_batch() -> None:
    net, rows = model().train(), batch()
    torch.manual_seed(3)
    want = undivided(net, loss_of, rows, None)
    torch.manual_seed(3)
    got = state_after(net, lambda m: Engine(m, micro_batch=3, rng="batch").backward(rows))
    assert_exact(got, want)


@pytest.mark.parametrize("norm", [False, True], ids=["streaming", "lanes"])
@pytest.mark.parametrize("form", ["a mapping", "a dataclass", "a tuple"])
def test_an_observer_gets_what_the_model_returns(form: str, norm: bool) -> None:
    net, rows = model(form=form, norm=norm), batch()
    observed: list[Any] = []

    def observe(outputs: Any, targets: Any) -> None:
        assert targets is None
        observed.append(outputs)

    engine = Engine(net, micro_batch=3)
    engine.backward(rows, observe=observe)
    engine.evaluate(rows, observe=observe)
    with torch.no_grad():
        variant = type(net(**rows))
    assert [type(one) for one in observed] == [variant] * 6
    tensors = [t for one in observed for _, t in anybatch.core.pytree.tensors(one)]
    assert not any(t.requires_grad for t in tensors)
    logits = [t for t in tensors if t.dim() == 3]
    assert [len(t) for t in logits] == [3, 3, 1] * 2


def test_evaluation_and_check() -> None:
    net, rows = model(), batch()
    want = net(**rows)["loss"].detach()
    assert_exact({"loss": Engine(net, micro_batch=2).evaluate(rows)}, {"loss": want})
    report = anybatch.check(net, None, (rows, None))
    assert report.exact
    assert {split.mechanism for split in report.splits} == {"streaming"}


def test_a_lack_of_memory_is_made_good() -> None:
    net, rows, left = model(), batch(), [None]

    def lose(logits: Tensor, labels: Tensor) -> Tensor:
        computes = not (looks_here() or isinstance(logits, FakeTensor))
        if len(logits) == 4 and computes and left:
            left.clear()
            raise torch.OutOfMemoryError("out of memory")
        return shifted(logits, labels)

    net.lose = lose
    want = undivided(model_like(net, shifted), loss_of, rows, None)
    engine = Engine(net, micro_batch=4)
    loss = engine.backward(rows)
    assert engine.last is not None
    assert engine.last.retries == 1
    assert_exact(state_of(net, loss), want)


def model_like(net: Language, lose: Lose) -> Language:
    copied = copy_of(net)
    copied.lose = lose
    return copied


def test_mixed_precision_with_a_scaler() -> None:
    net, rows = model().float(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = undivided(net, loss_of, rows, None)
        got = state_after(net, lambda m: Engine(m, micro_batch=N).backward(rows, scaler=scaler))
        parts = state_after(net, lambda m: Engine(m, micro_batch=3).backward(rows, scaler=scaler))
    for name in want:
        scale = 4.0 if name.endswith(".grad") else 1.0
        assert torch.equal(got[name], want[name] * scale)
    truth = undivided(copy_of(net).double(), loss_of, rows, None)
    parts = {n: t / 4.0 if n.endswith(".grad") else t for n, t in parts.items()}
    ours, torchs = (max(error_of(one, truth).values()) for one in (parts, want))
    assert ours <= 1.5 * torchs  # each micro-batch rounds its own gradients to bfloat16


def test_a_step_leaves_no_hook_and_no_attribute() -> None:
    net = model()
    before, names = snapshot(net)["hooks"], set(vars(net))
    Engine(net, micro_batch=2).backward(batch())
    assert snapshot(net)["hooks"] == before
    assert set(vars(net)) == names


@pytest.mark.product
@pytest.mark.parametrize(
    ("form", "match"),
    [
        (lambda _, logits: logits, r"without a loss_fn .* a tensor of shape \([467], 5, 11\)"),
        (lambda _, logits: {"logits": logits}, "a mapping of logits: give a loss_fn"),
        (lambda _, logits: (logits, 1), "a tuple that begins with a tensor of shape"),
        (lambda _, logits: SimpleNamespace(x=logits), "SimpleNamespace: give a loss_fn"),
        (lambda loss, logits: (None, logits), "a tuple that begins with NoneType"),
    ],
)
@pytest.mark.parametrize("micro_batch", [3, N])
def test_a_model_that_returns_no_loss_lacks_a_loss_fn(
    form: Any, match: str, micro_batch: int
) -> None:
    net = Language(shifted, form, norm=False).double().eval()
    with pytest.raises(LossError, match=match.replace("[67]", str(N if micro_batch == N else 6))):
        Engine(net, micro_batch=micro_batch).backward(batch())


def test_what_cannot_be_traced_is_refused_with_the_operation_and_the_ways_out() -> None:
    ways = (
        r"something else \(Neg\): declare Loss.inside\(count=...\) if it is a mean, or mark "
        "the part in which samples meet with anybatch.coupled, and the square of a weight by "
        r"coupled\(lambda value: 0.1 \* value\)\(weight.square\(\).sum\(\)\), or give micro_batch"
    )
    with pytest.raises(LossError, match=ways):
        Engine(model(untraced), micro_batch=3).backward(batch())
    assert_full_batch(model(untraced), batch(), micro_batch=N)


def test_a_compiled_model_is_refused_by_name() -> None:
    compiled = model()
    compiled.compile(backend="eager")
    with pytest.raises(LossError, match="torch.compile has compiled as a whole"):
        Engine(compiled, micro_batch=3).backward(batch())


def unshifted(inputs: Any, _: Any) -> Tensor:
    found: Tensor = (inputs["labels"] != -100).sum()
    return found


def shifts(inputs: Any, _: Any) -> Tensor:
    found: Tensor = (inputs["labels"][:, 1:] != -100).sum()
    return found


@pytest.mark.parametrize("memory", [None, "1MiB"])
@pytest.mark.parametrize("norm", [False, True], ids=["streaming", "lanes"])
def test_a_count_that_contradicts_what_is_traced_is_refused_with_both_numbers(
    norm: bool, memory: str | None
) -> None:
    net, rows = model(norm=norm), batch()
    rows["labels"][:3] = 4
    how: Any = {"micro_batch": 3} if memory is None else {"memory": memory}
    full = int(unshifted(rows, None)), int(shifts(rows, None))
    match = (
        "of [1-3] samples count says .* and the model divides by .* .cross_entropy., of 7 it says "
        f"{full[0]} and the model divides by {full[1]}. Leave the declaration out"
    )
    if memory is not None:
        match = "count says .* and the model divides by"
    engine = Engine(net, Loss.inside(count=unshifted), **how)
    with pytest.raises(LossError, match=match):  # a step that fits undivided counts nothing
        (engine.backward if memory is None else engine.foresee)(rows)


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3, 6])
@pytest.mark.parametrize(
    "count", [shifts, lambda i, t: 3 * shifts(i, t), lambda i, t: shifts(i, t) / 7]
)
def test_a_count_in_any_unit_is_accepted_and_shown(count: Any, micro_batch: int) -> None:
    engine = assert_full_batch(model(), batch(), Loss.inside(count=count), micro_batch=micro_batch)
    assert not engine._inputs.loss.believed


def test_class_weights_that_are_rounded_otherwise_are_the_same() -> None:
    weight = torch.rand(V)

    def lose(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight.to(logits))

    def count(inputs: Any, _: Any) -> Tensor:
        labels = inputs["labels"]
        return sum((weight[k] * (labels == k).sum() for k in range(V)), torch.zeros(()))

    assert_full_batch(model(lose), batch(), Loss.inside(count=count), micro_batch=2)


@pytest.mark.parametrize("micro_batch", [1, 3, 6])
def test_where_nothing_can_be_traced_a_count_is_believed(micro_batch: int) -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, each: Tensor) -> Tensor:
            ctx.shape = each.shape
            return each.mean()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            found: Tensor = dy.expand(ctx.shape) / ctx.shape.numel()
            return found

    def lose(logits: Tensor, labels: Tensor) -> Tensor:
        picked = logits.log_softmax(-1)[..., 0]
        found: Tensor = Own.apply(picked * (labels > 3))  # type: ignore[no-untyped-call]
        return found

    loss = Loss.inside(count=lambda inputs, _: len(inputs["ids"]))
    engine = assert_full_batch(model(lose), batch(), loss, micro_batch=micro_batch)
    assert engine._inputs.loss.believed
    assert engine.plan is not None
    assert engine.plan.loss == "inside the model, its count declared"


def active(logits: Tensor, labels: Tensor) -> Tensor:
    """Take the rows that count by a mask: how many there are depends on their values."""
    retained = labels.flatten() != -100
    return F.cross_entropy(logits.flatten(0, 1)[retained], labels.flatten()[retained])


@pytest.mark.parametrize("micro_batch", [2, 3])
def test_a_count_is_compared_at_every_micro_batch_where_the_full_batch_is_not_traced(
    micro_batch: int,
) -> None:
    rows = batch()
    rows["labels"][-1, 0] = 3
    assert_full_batch(model(active), rows, Loss.inside(count=unshifted), micro_batch=micro_batch)
    with pytest.raises(LossError, match="count says .* and the model divides by .*cross_entropy"):
        Engine(model(active), Loss.inside(count=shifts), micro_batch=micro_batch).backward(rows)


@pytest.mark.parametrize("micro_batch", [1, 3, 6])
def test_a_plain_sum_can_be_declared(micro_batch: int) -> None:
    engine = assert_full_batch(
        model(summed), batch(), Loss.inside(count=None), micro_batch=micro_batch
    )
    assert not engine._inputs.loss.believed


@pytest.mark.parametrize("norm", [False, True], ids=["streaming", "lanes"])
@pytest.mark.parametrize("micro_batch", [1, 3, 6])
def test_a_plain_sum_that_cannot_be_traced_is_believed(micro_batch: int, norm: bool) -> None:
    def lose(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.square().flatten(1).sum(1).cumsum(0)[-1]

    loss = Loss.inside(count=None)
    engine = assert_full_batch(model(lose, norm=norm), batch(), loss, micro_batch=micro_batch)
    assert engine._inputs.loss.believed


@pytest.mark.parametrize(
    ("lose", "count", "match"),
    [
        (shifted, None, "declares the loss as a sum, while cross_entropy in it is a mean"),
        (summed, unshifted, "declares the loss as a mean, while cross_entropy in it is a sum"),
    ],
)
def test_a_sum_and_a_mean_contradict_each_other(lose: Lose, count: Any, match: str) -> None:
    with pytest.raises(LossError, match=match):
        Engine(model(lose), Loss.inside(count=count), micro_batch=3).backward(batch())


def crossed(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.flatten(1)
    return F.cross_entropy(rows @ rows.T, labels[:, 0].clamp(min=0) * 0)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize(
    ("count", "match"),
    [
        (None, "meet in Language, in mm"),
        (lambda inputs, _: len(inputs["ids"]), "meet in Language, in mm"),
    ],
)
def test_a_loss_that_compares_samples_is_refused(count: Any, match: str, micro_batch: int) -> None:
    batch_inputs = None if count is None else Loss.inside(count=count)
    with pytest.raises(NotExactError, match=match):
        Engine(model(crossed), batch_inputs, micro_batch=micro_batch).backward(batch())


def test_a_place_among_gathered_rows_belongs_to_no_sample() -> None:
    def lose(logits: Tensor, labels: Tensor) -> Tensor:
        rows = logits.flatten(1)
        others, begin = anybatch.gather_batch(rows)
        return F.cross_entropy(rows @ others.T, torch.arange(len(rows)) + begin)

    net, rows = model(lose), batch()
    got = state_after(net, lambda m: Engine(m, micro_batch=3).backward(rows))
    assert_exact(got, undivided(net, loss_of, rows, None))


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_part_of_the_batch_is_refused(micro_batch: int) -> None:
    def lose(logits: Tensor, labels: Tensor) -> Tensor:
        half = (len(logits) + 1) // 2
        return shifted(logits[:half], labels[:half])

    with pytest.raises((LossError, NotExactError), match="do not grow with|keep their place"):
        Engine(model(lose), micro_batch=micro_batch).backward(batch())


def other_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return shifted(logits, labels.roll(1, 0))


def other_values(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits, logits.detach().roll(1, 0))


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("lose", [other_labels, other_values])
def test_labels_of_another_sample_are_refused(lose: Lose, micro_batch: int, declared: bool) -> None:
    batch_inputs = Loss.inside(count=lambda inputs, _: inputs["ids"].numel()) if declared else None
    with pytest.raises(NotExactError, match="samples must (not meet|keep their place)"):
        Engine(model(lose), batch_inputs, micro_batch=micro_batch).backward(batch())
