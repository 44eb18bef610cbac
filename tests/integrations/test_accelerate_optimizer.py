"""An optimizer that accelerate has prepared: looked through, scaled by its scaler, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of
from torch import Tensor, nn

pytest.importorskip(
    "accelerate", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from accelerate.optimizer import AcceleratedOptimizer
from tests.integrations.loops import accelerated

import anybatch
from anybatch import Engine
from anybatch.core.optimizers import bare
from anybatch.errors import NotExactError, NotYetError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).double()


def rows() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(22, 40, generator=draw, dtype=torch.float64), torch.randint(
        3, (22,), generator=draw
    )


class Slow(torch.optim.SGD):
    """Holds another optimizer, and updates in its own way."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups[0]["params"], lr=0.1)
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def test_only_what_passes_everything_on_is_looked_through() -> None:
    own = torch.optim.AdamW(net().parameters())
    with accelerated():
        wrapped = AcceleratedOptimizer(own)
        assert bare(wrapped) is bare(AcceleratedOptimizer(wrapped)) is bare(own) is own
    slow = Slow(own)
    assert bare(slow) is slow
    assert bare(None) is None


def test_the_plan_counts_what_it_counts_without_accelerate() -> None:
    """Its update was not rehearsed: the floor left out what the update itself holds."""
    found = []
    with accelerated() as accelerator:
        for prepare in (accelerator.prepare, lambda *arguments: arguments):
            model = net()
            model, adam = prepare(model, torch.optim.AdamW(model.parameters()))
            found.append(
                anybatch.plan(
                    *(model, nn.CrossEntropyLoss(), rows()),
                    optimizer=adam,
                    memory="200KiB",
                    timed=False,
                )
            )
    memory, want = (plan.memory for plan in found)
    assert memory is not None
    assert want is not None
    assert (memory.floor, memory.predicted) == (want.floor, want.predicted)
    assert memory.owners == want.owners


def scaled(model: nn.Module) -> tuple[AcceleratedOptimizer, Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler), scaler


@pytest.mark.parametrize("passed", [False, True])
def test_the_scaler_of_the_optimizer_is_that_of_the_step(passed: bool) -> None:
    """Its step divides by the scale; gradients without it would be 1024 times too small."""
    model, single, (x, y) = net(), net(), rows()
    with accelerated():
        optimizer, scaler = scaled(model)
        engine = Engine(model, nn.CrossEntropyLoss(), optimizer=optimizer, micro_batch=3)
        for _ in range(2):
            optimizer.zero_grad()
            loss = engine.backward(x, y, **({"scaler": scaler} if passed else {}))
            optimizer.step()
            assert not optimizer.step_was_skipped
    own = torch.optim.SGD(single.parameters(), lr=0.1)
    for _ in range(2):
        own.zero_grad()
        want = nn.functional.cross_entropy(single(x), y)
        want.backward()  # type: ignore[no-untyped-call]
        own.step()
    assert_exact(state_of(model, loss), state_of(single, want))
    assert_exact(model.state_dict(), single.state_dict())


def test_a_step_that_overflows_is_skipped() -> None:
    model, (x, y) = net(), rows()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with accelerated():
        optimizer, scaler = scaled(model)
        x[0, 0] = torch.inf
        Engine(model, nn.CrossEntropyLoss(), optimizer=optimizer, micro_batch=3).backward(x, y)
        optimizer.step()
        assert optimizer.step_was_skipped
        assert scaler.get_scale() == 512.0
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_state_leaves_through_what_accelerate_has_put_around_it() -> None:
    model, single, (x, y) = net(), net(), rows()
    with accelerated() as accelerator:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        engine = Engine(model, nn.CrossEntropyLoss(), optimizer=optimizer, micro_batch=3)
        with anybatch.offload_states(optimizer, memory="19KiB") as states:
            for _ in range(2):
                optimizer.zero_grad()
                engine.backward(x, y)
                optimizer.step()
            assert states.last is not None
            assert any(value.is_meta for value in optimizer.state[model[0].weight].values())
            states.back()
    own = torch.optim.AdamW(single.parameters())
    for _ in range(2):
        own.zero_grad()
        nn.functional.cross_entropy(single(x), y).backward()  # type: ignore[no-untyped-call]
        own.step()
    assert_exact(model.state_dict(), single.state_dict())


def test_state_that_would_be_offloaded_behind_a_scaler_is_refused() -> None:
    with accelerated():
        optimizer, _ = scaled(net())
        with pytest.raises(NotExactError, match=r"on the optimizer, and then accelerator.prepare"):
            anybatch.offload_states(optimizer)


def test_a_loop_is_profiled() -> None:
    model, (x, y) = net(), rows()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=11)
    with accelerated() as accelerator:
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters()), loader
        )
        engine = Engine(model, nn.CrossEntropyLoss(), optimizer=optimizer, micro_batch=3)
        profile = anybatch.profile(loader, engine, optimizer, steps=2)
        assert profile.samples == 11
        assert not optimizer.state


@pytest.mark.parametrize("library", ["deepspeed.runtime.engine", "megatron.core.optimizer"])
@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_what_runs_backward_itself_is_refused(library: str, what: str) -> None:
    """Neither installs without a GPU: classes that say they are theirs stand for them."""
    kinds: tuple[Any, Any] = (nn.Linear, torch.optim.SGD)
    theirs = [type("Own", (base,), {"__module__": library}) for base in kinds]
    model = (theirs if what == "model" else kinds)[0](2, 2)
    optimizer = (theirs if what == "optimizer" else kinds)[1](model.parameters())
    with accelerated(), pytest.raises(NotYetError, match="Own of (DeepSpeed|Megatron-LM) does"):
        Engine(model, nn.MSELoss(), optimizer=AcceleratedOptimizer(optimizer))
