"""The same promises on a CUDA device. `make gpu-check` runs these; elsewhere they say why not."""

from __future__ import annotations

import pytest
import torch
from benchmarks.mbs.cases import CASES, Case, splits
from benchmarks.mbs.problem import rows
from tests.oracle import assert_exact, error_of, same, snapshot, state_after, undivided
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from anybatch import Engine, LazyBatch
from anybatch.core.accelerator import of
from anybatch.core.batch import TensorBatch
from anybatch.execution.prefetch import StreamLink, feed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double().cuda()


def batch(n: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5, dtype=torch.float64), torch.randint(0, 3, (n,))


def coupled(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out - out.mean(0), y)


@pytest.mark.parametrize("loss", [F.cross_entropy, coupled])
@pytest.mark.parametrize("where", ["host", "pinned", "device"])
def test_a_batch_on_the_host_is_streamed_exactly(loss: object, where: str) -> None:
    net, (x, y) = model(), batch()
    want = undivided(net, loss, x.cuda(), y.cuda())
    place = {"host": lambda t: t, "pinned": Tensor.pin_memory, "device": Tensor.cuda}[where]
    x, y = place(x), place(y)
    got = state_after(net, lambda m: Engine(m, loss, micro_batch=4).backward(x, y))
    assert_exact(got, want)


def test_many_micro_batches_through_two_pinned_buffers_remain_in_order() -> None:
    x = torch.arange(1000 * 257, dtype=torch.float32).view(1000, 257)
    link = StreamLink(torch.device("cuda"), of("cuda"))
    parts = []
    for part in feed(TensorBatch.of(x, None).micro_batches(7), link):
        torch.cuda._sleep(100_000)  # the copies run ahead of the computation
        parts.append(part.inputs * 1)
    assert torch.equal(torch.cat(parts).cpu(), x)


def test_pinned_inputs_may_be_overwritten_after_the_step() -> None:
    net, (x, y) = model(), batch(64)
    want = undivided(net, F.cross_entropy, x.cuda(), y.cuda())
    pinned = x.pin_memory()

    def run(m: nn.Module) -> Tensor:
        loss = Engine(m, F.cross_entropy, micro_batch=8).backward(pinned, y)
        pinned.zero_()
        return loss

    assert_exact(state_after(net, run), want)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.make(0).declared is None][::4], ids=lambda case: case.name
)
def test_cases_of_the_catalogue(case: Case) -> None:
    problem = case.make(0)
    net, loss = problem.model.cuda(), problem.loss_fn
    if isinstance(loss, nn.Module):
        loss.cuda()
    x, y = (tree_map_only(Tensor, Tensor.cuda, t) for t in (problem.inputs, problem.targets))
    order = torch.randperm(problem.batch)
    want = undivided(net, loss, x, y)
    permuted = undivided(net, loss, rows(x, order), rows(y, order))
    n = splits(problem.batch)["ragged"]
    got = state_after(net, lambda m: Engine(m, loss, micro_batch=n).backward(x, y))
    assert_exact(got, want, error_of(permuted, want))


def test_dropout_draws_and_failures_have_no_trace_on_the_device() -> None:
    net = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double().cuda()
    x, y = batch()
    torch.manual_seed(3)
    engine = Engine(net, coupled, micro_batch=4)
    engine.backward(x, y)
    before, rng_state = snapshot(net), torch.cuda.get_rng_state()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.backward(x, y, observe=fail)
    assert same(before, snapshot(net))
    assert torch.equal(rng_state, torch.cuda.get_rng_state())


def test_autocast_with_a_scaler_trains() -> None:
    net = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3)).cuda()
    x, y = torch.randn(64, 5), torch.randint(0, 3, (64,))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda")
    engine = Engine(net, F.cross_entropy, optimizer=optimizer, micro_batch=24)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.float16):
            losses.append(float(engine.backward(x, y, scaler=scaler)))
        scaler.step(optimizer)
        scaler.update()
    assert losses[-1] < losses[0]
    assert engine.last is not None
    assert engine.last.peak_bytes is not None


def test_a_lazy_batch_with_a_late_denominator() -> None:
    net, (x, y) = model(), batch()
    y[:4] = -100
    want = undivided(net, F.cross_entropy, x.cuda(), y.cuda())
    lazy = LazyBatch(torch.utils.data.TensorDataset(x, y))
    got = state_after(net, lambda m: Engine(m, F.cross_entropy, micro_batch=4).backward(lazy))
    assert_exact(got, want)
