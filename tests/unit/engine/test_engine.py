from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, same, snapshot, state_after, state_of, undivided
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import anybatch
from anybatch import Engine, Loss


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(n: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5, dtype=torch.float64), torch.randint(0, 3, (n,))


def test_gradients_that_were_there_are_added_to_and_remain_the_same_tensors() -> None:
    model, (x, y) = mlp(), batch()
    old = [torch.randn_like(p) for p in model.parameters()]
    for p, g in zip(model.parameters(), old, strict=True):
        p.grad = g
    expected = copy.deepcopy(model)
    for p, g in zip(expected.parameters(), old, strict=True):
        p.grad = g.clone()
    F.cross_entropy(expected(x), y).backward()
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    engine.backward(x, y)
    for p, q, g in zip(model.parameters(), expected.parameters(), old, strict=True):
        assert p.grad is g
        assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-13)
    assert engine.plan is not None
    assert engine.plan.accumulate == "accumulator"


def test_frozen_and_unused_parameters_remain_without_gradient() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = (nn.Linear(5, 3) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x) + self.frozen(x)

    model, (x, y) = Model().double(), batch()
    got = state_after(model, lambda m: Engine(m, F.cross_entropy, micro_batch=3).backward(x, y))
    assert_exact(got, undivided(model, F.cross_entropy, x, y))
    assert set(got) == {"loss", "used.weight.grad", "used.bias.grad"}


def test_tied_weights_receive_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.embed(tokens))

    model, tokens, y = Tied().double(), torch.randint(0, 7, (10,)), torch.randint(0, 7, (10,))
    got = state_after(
        model, lambda m: Engine(m, F.cross_entropy, micro_batch=4).backward(tokens, y)
    )
    assert_exact(got, undivided(model, F.cross_entropy, tokens, y))


def test_sparse_gradients_are_accumulated_sparse() -> None:
    model = nn.Sequential(nn.EmbeddingBag(7, 3, sparse=True)).double()
    tokens, y = torch.randint(0, 7, (10, 4)), torch.randint(0, 3, (10,))
    engine_model = copy.deepcopy(model)
    engine = Engine(engine_model, F.cross_entropy, micro_batch=4)
    F.cross_entropy(model(tokens), y).backward()
    engine.backward(tokens, y)
    (want,), (got,) = ([p.grad for p in m.parameters()] for m in (model, engine_model))
    assert got.is_sparse
    assert torch.allclose(got.to_dense(), want.to_dense(), rtol=0, atol=1e-13)
    engine.backward(tokens, y)
    (twice,) = [p.grad for p in engine_model.parameters()]
    assert torch.allclose(twice.to_dense(), 2 * want.to_dense(), rtol=0, atol=1e-13)


@dataclass(frozen=True)
class Sample:
    left: Tensor
    right: Tensor
    name: str


def test_inputs_of_every_shape_reach_the_model_as_it_expects_them() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
            return {"logits": self.a(left) + self.b(right)}

    class Unpack(nn.Module):
        def __init__(self, two: nn.Module) -> None:
            super().__init__()
            self.two = two

        def forward(self, sample: Sample) -> dict[str, Tensor]:
            assert sample.name == "kept"
            return self.two(sample.left, sample.right)

    model, (x, y) = Two().double(), batch()
    z = torch.randn_like(x)

    def loss(out: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(out["logits"], target["class"])

    want = undivided(model, loss, (x, z), {"class": y})
    for inputs in ((x, z), [x, z], {"left": x, "right": z}):
        got = state_after(
            model, lambda m, i=inputs: Engine(m, loss, micro_batch=4).backward(i, {"class": y})
        )
        assert_exact(got, want)
    sample = Sample(x, z, "kept")
    got = state_after(
        Unpack(model), lambda m: Engine(m, loss, micro_batch=4).backward(sample, {"class": y})
    )
    assert_exact({k.removeprefix("two."): v for k, v in got.items()}, want)


def test_leaf_inputs_that_require_grad_get_theirs() -> None:
    model, (x, y) = mlp(), batch()
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    F.cross_entropy(model(a), y).backward()
    Engine(model, F.cross_entropy, micro_batch=4).backward(b, y)
    assert torch.allclose(a.grad, b.grad, rtol=0, atol=1e-14)


def test_observe_sees_every_micro_batch_once_detached_in_order() -> None:
    model, (x, y) = mlp(), batch()
    for loss in (F.cross_entropy, lambda out, t: F.cross_entropy(out - out.mean(0), t)):
        observed: list[tuple[Tensor, Tensor]] = []
        engine = Engine(model, loss, micro_batch=4)
        engine.backward(x, y, observe=lambda o, t, s=observed: s.append((o, t)))
        assert [len(o) for o, _ in observed] == [4, 4, 2]
        assert not any(o.requires_grad for o, _ in observed)
        assert torch.equal(torch.cat([t for _, t in observed]), y)
        assert torch.allclose(torch.cat([o for o, _ in observed]), model(x).detach())
        again: list[Tensor] = []
        engine.evaluate(x, y, observe=lambda o, _, s=again: s.append(o))
        assert torch.allclose(torch.cat(again), model(x).detach())


def test_evaluate_gives_the_loss_and_no_gradient() -> None:
    model, (x, y) = mlp(), batch()
    for loss in (nn.CrossEntropyLoss(), lambda out, t: F.cross_entropy(out - out.mean(0), t)):
        engine = Engine(model, loss, micro_batch=4)
        value = engine.evaluate(x, y)
        assert torch.allclose(value, loss(model(x), y).detach(), rtol=0, atol=1e-14)
        assert not value.requires_grad
        assert all(p.grad is None for p in model.parameters())


def test_last_and_plan_say_what_the_step_was() -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, nn.CrossEntropyLoss(), micro_batch=4)
    assert engine.plan is None
    assert engine.last is None
    loss = engine.backward(x, y)
    last = engine.last
    assert last is not None
    assert (last.samples, last.micro_batch, last.micro_batches) == (10, 4, 3)
    assert last.loss is loss
    assert last.seconds > 0
    assert (last.peak_bytes, last.predicted_bytes, last.moved_bytes, last.retries) == (
        None,
        None,
        0,
        0,
    )
    plan = engine.plan
    assert plan is not None
    assert (plan.mechanism, plan.accumulate, plan.loss) == (
        "streaming",
        "in place",
        "cross_entropy",
    )
    engine.backward(x[:3], y[:3])
    assert engine.plan is plan, "a last partial batch does not change the plan"
    coupled = Engine(model, lambda o: o.logsumexp(0).sum(), micro_batch=4)
    coupled.backward(x)
    assert coupled.plan is not None
    assert coupled.plan.mechanism == "two-pass"
    full = Engine(model, nn.CrossEntropyLoss(), micro_batch=10)
    full.backward(x, y)
    assert full.plan is not None
    assert full.plan.mechanism == "undivided"


def test_a_batch_no_larger_than_a_micro_batch_is_torch_bit_for_bit() -> None:
    model, (x, y) = mlp(), batch()
    want = undivided(model, F.cross_entropy, x, y)
    got = state_after(model, lambda m: Engine(m, F.cross_entropy, micro_batch=10).backward(x, y))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_gan_by_joint_trains_both_models_as_undivided() -> None:
    generator, judge = nn.Linear(2, 5).double(), nn.Linear(5, 1).double()
    z, x = torch.randn(10, 2, dtype=torch.float64), torch.randn(10, 5, dtype=torch.float64)
    bce = F.binary_cross_entropy_with_logits

    def judge_loss(out: tuple[Tensor, Tensor]) -> Tensor:
        fake, real = out
        return bce(fake, torch.zeros_like(fake)) + bce(real, torch.ones_like(real))

    def fool(out: Tensor) -> Tensor:
        return bce(out, torch.ones_like(out))

    both = anybatch.joint(lambda G, D, z, x: (D(G(z).detach()), D(x)), generator, judge)
    engine = Engine(both, judge_loss, micro_batch=4)
    got = state_after(both, lambda m: Engine(m, judge_loss, micro_batch=4).backward((z, x)))
    assert_exact(got, undivided(both, judge_loss, (z, x), None))
    assert not any(name.startswith("models.0") for name in got), "the generator is detached"
    engine.backward((z, x))
    assert engine.plan is not None
    assert engine.plan.mechanism == "streaming"
    through = anybatch.joint(lambda G, D, z: D(G(z)), generator, judge)
    got = state_after(through, lambda m: Engine(m, fool, micro_batch=4).backward(z))
    assert_exact(got, undivided(through, fool, z, None))


def test_training_with_groups_clipping_and_schedule_is_the_undivided_training() -> None:
    x, y = batch(11)

    def train(step: Any) -> list[Tensor]:
        torch.manual_seed(1)
        model = mlp()
        groups = [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(model.parameters())]
        optimizer = torch.optim.AdamW(groups)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        for _ in range(20):
            optimizer.zero_grad()
            step(model, optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
        return list(model.parameters())

    plain = train(lambda m, _: F.cross_entropy(m(x), y).backward())
    split = train(
        lambda m, o: Engine(m, F.cross_entropy, optimizer=o, micro_batch=4).backward(x, y)
    )
    for p, q in zip(plain, split, strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-9)


def test_a_scaler_scales_gradients_and_not_the_loss() -> None:
    model, (x, y) = mlp(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    want = undivided(model, F.cross_entropy, x, y)
    for loss in (F.cross_entropy, lambda o, t: F.cross_entropy(o - o.mean(0), t)):
        want = undivided(model, loss, x, y)
        got = state_after(
            model,
            lambda m, f=loss: Engine(m, f, micro_batch=4).backward(x, y, scaler=scaler),
        )
        unscaled = {n: t / 1024.0 if n.endswith("grad") else t for n, t in got.items()}
        assert_exact(unscaled, want)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Engine(model, F.cross_entropy, micro_batch=4).backward(x, y, scaler=scaler)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("coupled", [False, True])
def test_under_autocast_the_error_is_that_of_bfloat16(coupled: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3))
    x, y = torch.randn(10, 5), torch.randint(0, 3, (10,))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        out = out.float()
        return F.cross_entropy(out - out.mean(0) if coupled else out, target)

    exact = undivided(model, loss, x, y)
    with torch.autocast("cpu", torch.bfloat16):
        plain = undivided(model, loss, x, y)
        got = state_after(model, lambda m: Engine(m, loss, micro_batch=4).backward(x, y))
    assert all(t.dtype == torch.float32 for name, t in got.items() if name.endswith("grad"))

    def distance(a: dict[str, Tensor]) -> float:
        return sum(float((a[n] - exact[n]).square().sum()) for n in exact) ** 0.5

    assert 0 < distance(got) <= 2 * distance(plain)


def test_an_ordinary_step_enters_no_mode_around_the_model() -> None:
    stacks: list[tuple[int, int]] = []

    class StackProbe(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            modes = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
            stacks.append((len(modes[0]), len(modes[1])))
            return super().forward(x)

    model, (x, y) = StackProbe(5, 3).double(), batch()
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    engine.backward(x, y)
    stacks.clear()
    engine.backward(x, y)
    assert stacks == [(0, 0)] * 3


def test_checkpointing_inside_the_model_stays_exact() -> None:
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self, *, reentrant: bool) -> None:
            super().__init__()
            self.body, self.head, self.reentrant = mlp(), nn.Linear(3, 3).double(), reentrant

        def forward(self, x: Tensor) -> Tensor:
            first = self.body[0](x)
            return self.head(checkpoint(self.body[1:], first, use_reentrant=self.reentrant))

    x, y = batch()
    for reentrant in (True, False):
        model = Recomputed(reentrant=reentrant)
        got = state_after(model, lambda m: Engine(m, F.cross_entropy, micro_batch=4).backward(x, y))
        assert_exact(got, undivided(model, F.cross_entropy, x, y))


def test_a_loss_with_parameters_trains_them_too() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(out * self.log_scale.exp(), target) + self.log_scale**2

    model, (x, y), loss = mlp(), batch(), Learned()
    want = undivided(model, loss, x, y)
    truth = loss.log_scale.grad.clone()
    loss.zero_grad()
    got = state_after(model, lambda m: Engine(m, loss, micro_batch=4).backward(x, y))
    assert_exact(got, want)
    assert torch.allclose(loss.log_scale.grad, truth, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"memory": "6 apples"}, ValueError, "memory must be a number of bytes.*'6 apples'"),
        ({"rng": "dice"}, ValueError, 'rng must be "micro_batch" or "batch", and it is \'dice\''),
        ({"memory": 0}, ValueError, "of at least 1, or a text such as.*and it is 0"),
        ({"micro_batch": 0}, ValueError, "micro_batch must be a whole number >= 1, and it is 0"),
        ({"micro_batch": True}, ValueError, "whole number >= 1, and it is True"),
        ({"micro_batch": 2.5}, ValueError, "whole number >= 1, and it is 2.5"),
        ({"batchnorm": "none"}, ValueError, 'must be "exact", "local", "adaptive" or an any'),
        ({"loss_fn": 3}, TypeError, "loss_fn must be a function.*and it is int"),
        ({"model": len}, TypeError, "model must be a torch.nn.Module, and it is builtin"),
    ],
)
def test_what_cannot_be_is_said_at_once(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    options: dict[str, Any] = {
        "model": mlp(),
        "loss_fn": F.cross_entropy,
        "micro_batch": 4,
    } | change
    with pytest.raises(error, match=message):
        Engine(options.pop("model"), options.pop("loss_fn"), **options)


def test_a_loss_that_trains_nothing_is_refused_and_leaves_no_trace() -> None:
    model, (x, y) = mlp().requires_grad_(False), batch()
    for micro_batch in (4, 10):
        for loss in (F.cross_entropy, lambda o, t: F.cross_entropy(o - o.mean(0), t)):
            before = snapshot(model)
            with pytest.raises(anybatch.errors.LossError, match="must depend on a parameter"):
                Engine(model, loss, micro_batch=micro_batch).backward(x, y)
            assert same(before, snapshot(model))


def test_an_optimizer_that_steps_inside_backward_is_refused_and_nothing_moved() -> None:
    model, (x, y) = mlp(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = snapshot(model)
    with pytest.raises(anybatch.errors.NotExactError, match=r"SGD.step\(\) was called inside"):
        Engine(model, F.cross_entropy, optimizer=optimizer, micro_batch=4).backward(x, y)
    assert same(before, snapshot(model))
    optimizer.step()  # outside it is free again


def test_the_returned_loss_has_no_graph() -> None:
    model, (x, y) = mlp(), batch()
    loss = Engine(model, F.cross_entropy, micro_batch=4).backward(x, y)
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


def test_targets_next_to_a_lazy_batch_are_refused() -> None:
    x, y = batch()
    lazy = anybatch.LazyBatch(torch.utils.data.TensorDataset(x, y))
    with pytest.raises(anybatch.errors.AnybatchError, match="must come from its items"):
        Engine(mlp(), F.cross_entropy, micro_batch=4).backward(lazy, y)


def test_processes_that_do_not_know_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    x, y = batch()
    with pytest.raises(anybatch.errors.RankError, match="the 2 processes .* call torch.distrib"):
        Engine(mlp(), F.cross_entropy, micro_batch=4).backward(x, y)


def test_a_loss_passed_as_declaration_is_used_as_it_is() -> None:
    model, (x, y) = mlp(), batch()
    declared = Loss.ratio(lambda o, t: F.cross_entropy(o, t, reduction="sum"), len)
    got = state_after(model, lambda m: Engine(m, declared, micro_batch=4).backward(x, y))
    assert_exact(got, undivided(model, F.cross_entropy, x, y))


def test_a_hook_that_writes_to_parameters_is_found_out() -> None:
    model, (x, y) = mlp(), batch()

    def sgd(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)

    model[0].weight.register_post_accumulate_grad_hook(sgd)
    with pytest.raises(
        anybatch.errors.NotExactError, match=r"1 of them were written to.*shape \(6, 5\)"
    ):
        Engine(model, F.cross_entropy, micro_batch=4).backward(x, y)
    assert all(p.grad is None for p in model.parameters())


def test_a_step_inside_a_step_is_refused_and_the_next_one_is_free() -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    with pytest.raises(anybatch.errors.AnybatchError, match="must end before another one begins"):
        engine.backward(x, y, observe=lambda *_: engine.backward(x, y))
    engine.backward(x, y, observe=lambda *_: engine.evaluate(x, y))
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_that_only_the_loss_closes_over_are_trained_and_undone() -> None:
    model, (x, y) = mlp().bfloat16(), batch()
    x = x.bfloat16()
    scale = nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out * scale, target)

    want = undivided(model, loss, x, y)["loss"]
    truth = scale.grad.clone()
    scale.grad = None
    engine = Engine(model, loss, micro_batch=3)
    got = engine.backward(x, y)
    assert torch.allclose(got, want, rtol=2e-2)
    assert torch.allclose(scale.grad, truth, rtol=2e-2)
    scale.grad = retained = torch.ones_like(scale)

    def fail(*_: Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.backward(x, y, observe=fail)
    assert scale.grad is retained
    assert float(retained) == 1.0


def test_an_observer_may_draw_and_write_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    x, y = batch()

    def coupled(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out - out.mean(0), target)

    def disturb(out: Tensor, _: Tensor) -> None:
        torch.rand(3)
        out.zero_()

    results = []
    for observe in (None, disturb):
        torch.manual_seed(3)
        results.append(
            state_after(
                model,
                lambda m, o=observe: Engine(m, coupled, micro_batch=4).backward(x, y, observe=o),
            )
        )
    assert_exact(results[1], results[0])


class WithLoss(nn.Module):
    """Returns its loss beside its outputs."""

    def __init__(self, *, named: bool) -> None:
        super().__init__()
        self.linear, self.named = nn.Linear(5, 3).double(), named

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.linear(x)
        loss = F.cross_entropy(out, y)
        return {"logits": out, "loss": loss} if self.named else (out, loss)


@pytest.mark.parametrize(("named", "key"), [(True, "loss"), (False, 1)])
def test_a_loss_among_the_outputs_is_refused_with_what_to_write(named: bool, key: Any) -> None:
    model, (x, y) = WithLoss(named=named), batch()
    with pytest.raises(anybatch.errors.BatchError, match="and give no loss_fn"):
        Engine(model, lambda out: out[key], micro_batch=4).backward((x, y))
    if named:
        got = state_after(model, lambda m: Engine(m, micro_batch=4).backward((x, y)))
        assert_exact(got, undivided(model, lambda out: out["loss"], (x, y), None))


@pytest.mark.parametrize("micro_batch", [1, 4, 13])
def test_a_loss_that_squeezes_warns_of_no_rows_that_do_not_exist(micro_batch: int) -> None:
    """A single row squeezes to another shape, and torch would warn of it."""
    model, x = nn.Linear(5, 1).double(), batch(14)[0]

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out.squeeze(), target)

    got = state_after(
        model, lambda m: Engine(m, loss, micro_batch=micro_batch).backward(x, x[:, 0])
    )
    assert_exact(got, undivided(model, loss, x, x[:, 0]))


def test_a_loss_that_uses_a_batchnorm_of_the_model_normalises_all_outputs() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double(), batch()

    def loss_of(model: nn.Module) -> Any:
        return lambda out, target: F.cross_entropy(model[1](out), target)

    def undivided_step(model: nn.Module) -> Tensor:
        loss: Tensor = loss_of(model)(model(x), y)
        loss.backward()
        return loss

    got = state_after(model, lambda m: Engine(m, loss_of(m), micro_batch=4).backward(x, y))
    assert_exact(got, state_after(model, undivided_step))


def scripted(x: Tensor) -> Tensor:
    return x * x.sigmoid()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_code_of_torch_script_is_named_where_it_is_not_followed() -> None:
    class Swish(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return swish(x)

    swish = torch.jit.script(scripted)
    engine = Engine(nn.Sequential(mlp(), Swish()), F.cross_entropy, micro_batch=4)
    for _ in range(3):
        engine.backward(*batch())
    assert engine.plan is not None
    assert "or torch.jit.script computes with it" in engine.plan.exact.by


def coupled_spread(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), target)


@pytest.mark.product(pairs=True)
@pytest.mark.parametrize("loss", [F.cross_entropy, coupled_spread])
@pytest.mark.parametrize("micro_batch", [4, 10])
@pytest.mark.parametrize(
    "moves",
    [
        lambda model: model.zero_grad(),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: model[0].zero_grad(),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: sum(p.sum() for p in model.parameters()).backward(),
    ],
)
def test_an_observer_that_changes_gradients_is_refused(
    moves: Any, micro_batch: int, loss: Any
) -> None:
    model, (x, y) = mlp(), batch()
    engine = Engine(model, loss, micro_batch=micro_batch)
    with pytest.raises(anybatch.errors.NotExactError, match="observe= changes .grad"):
        engine.backward(x, y, observe=lambda *_: moves(model))


def test_state_in_the_loss_moves_once_a_step() -> None:
    class Tracked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("observed", torch.zeros((), dtype=torch.long))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            self.observed += 1
            return F.cross_entropy(out, target)

    model, (x, y) = mlp(), batch()
    for micro_batch in (4, 10):
        loss = Tracked()
        engine = Engine(model, loss, micro_batch=micro_batch)
        for _ in range(3):
            engine.backward(x, y)
        assert int(loss.observed) == 3


def test_float16_losses_do_not_overflow() -> None:
    model = nn.Linear(4, 3).half()
    x, y = torch.randn(3000, 4).half() * 40, torch.randint(0, 3, (3000,))
    loss = Engine(model, F.cross_entropy, micro_batch=2500).backward(x, y)
    want = F.cross_entropy(model(x).float(), y)
    assert torch.allclose(loss.float(), want, rtol=1e-2)


def test_a_loss_that_fails_on_a_single_sample_is_computed_on_the_full_batch() -> None:
    model, (x, y) = nn.Linear(5, 1).double(), batch()
    target = (y > 0).double()

    def squeezed(out: Tensor, t: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out.squeeze(), t)

    observed: list[int] = []
    engine = Engine(model, squeezed, micro_batch=3)
    engine.backward(x, target, observe=lambda o, _: observed.append(len(o)))
    assert observed == [3, 3, 3, 1], "each micro-batch once, though the step began twice"
    model.zero_grad()
    got = state_after(model, lambda m: Engine(m, squeezed, micro_batch=3).backward(x, target))
    assert_exact(got, undivided(model, squeezed, x, target))


@pytest.mark.parametrize("inputs", [{"micro_batch": 4}, {"memory": "1MiB"}, {}], ids=str)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_engine_can_be_copied_and_pickled_after_a_step(inputs: Any, copied: Any) -> None:
    """Forecasts hold fakes, which cannot be."""
    torch.manual_seed(0)
    x, y = torch.randn(11, 4).double(), torch.randint(0, 3, (11,))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    engine = Engine(model, nn.CrossEntropyLoss(), **inputs)
    engine.backward(x, y)
    model.zero_grad()
    again = copied(engine)
    assert again.plan == engine.plan
    twin = again.model
    loss = again.backward(x, y)
    assert_exact(state_of(twin, loss), undivided(model, nn.CrossEntropyLoss(), x, y))
    assert again.plan.micro_batch == engine.plan.micro_batch


def test_engines_go_with_their_models() -> None:
    alive = []
    for _ in range(3):  # each is planned while the one before it is still there
        model = nn.Linear(8, 3)
        engine = Engine(model, F.cross_entropy, memory="1MiB")
        engine.backward(torch.randn(16, 8), torch.randint(3, (16,)))
        alive.append(weakref.ref(model))
        gc.collect()
    assert [one() is not None for one in alive] == [False, False, True]


@pytest.mark.parametrize("norms", [[], [nn.BatchNorm1d(5)]], ids=["streaming", "lockstep"])
def test_a_plan_says_in_one_line_whose_draws_a_micro_batch_makes(norms: list[nn.Module]) -> None:
    said = "each micro-batch makes random draws of its own"
    for drop, options, lines in (
        (0.5, {"micro_batch": 4}, 1),
        (0.5, {"micro_batch": 4, "rng": "batch"}, 0),
        (0.5, {"micro_batch": 10}, 0),
        (0.0, {"micro_batch": 4}, 0),
    ):
        layers = copy.deepcopy(norms)
        model = nn.Sequential(*layers, nn.Linear(5, 6), nn.Dropout(drop), nn.Linear(6, 3)).double()
        engine = Engine(model, nn.CrossEntropyLoss(), **options)
        for _ in range(2):
            engine.backward(*batch())
            assert str(engine.plan).count(said) == lines, (drop, options)
