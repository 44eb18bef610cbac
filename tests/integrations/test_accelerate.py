"""accelerate's documented loop, with ``engine.backward`` where ``accelerator.backward`` stood.

A real Accelerator, alone and on two processes; the truth is the rows of all ranks in one forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact, state_of
from tests.pool import Pool, ranks
from torch import nn

pytest.importorskip(
    "accelerate", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from tests.integrations.loops import (
    PROBLEMS,
    accelerated,
    as_launched,
    assert_full_batch,
    everyones,
    made,
    on_rank,
    plain_training,
    train,
)

from anybatch import Engine
from anybatch.errors import NotExactError, NotYetError


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with ranks(2) as found:
        yield found


@pytest.mark.product
@pytest.mark.parametrize("micro_batch", [1, 3, 22])
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_those_of_the_undivided_batch(name: str, micro_batch: int) -> None:
    assert_full_batch(name, train(name, {"micro_batch": micro_batch}, batch=8), 3)


def test_in_memory_that_is_less_than_the_batch_needs() -> None:
    observed = train("batchnorm", {"memory": "25KiB"}, batch=22)
    assert_full_batch("batchnorm", observed, 1)
    assert observed.plan is not None
    assert observed.plan.micro_batch < 22


@pytest.mark.product
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_ranks_share_the_batch(pair: Pool, name: str, sharded: bool) -> None:
    for observed in pair.run(on_rank, name, {"micro_batch": 3}, {"sharded": sharded}):
        assert_full_batch(name, observed, 2)


LOADERS = {
    "split": ({"split_batches": True}, 14, 2),
    "dispatched": ({"dispatch_batches": True, "even_batches": True}, 7, 2),
    "uneven": ({"even_batches": False}, 4, 3),
}


@pytest.mark.parametrize("variant", LOADERS)
def test_any_division_of_batches_over_ranks_is_exact(pair: Pool, variant: str) -> None:
    loaders, batch, steps = LOADERS[variant]
    options = {"loaders": loaders, "batch": batch}
    for observed in pair.run(on_rank, "tokens", {"micro_batch": 3}, options):
        assert_full_batch("tokens", observed, steps)


def test_a_training_is_that_of_plain_torch(pair: Pool) -> None:
    """20 steps, clipped and scheduled; the schedule goes on by one step for each process."""
    options = {"clip": 0.1, "epochs": 10}
    for observed in pair.run(on_rank, "tokens", {"micro_batch": 3}, options):
        assert len(observed.norms) == 20
        assert max(observed.norms) > 0.1
        want = plain_training("tokens", observed, each=2, clip=0.1)
        assert all(float((want[n] - p).abs().max()) <= 1e-9 for n, p in observed.end.items())


HOW = [{"micro_batch": 3}, {"memory": "25KiB"}]


@pytest.mark.parametrize("how", HOW)
def test_a_run_that_is_resumed_is_the_same_bit_for_bit(tmp_path: Path, how: dict[str, Any]) -> None:
    through = train("batchnorm", how, batch=14, epochs=2, keep=tmp_path / "at")
    again = train("batchnorm", how, batch=14, epochs=2, start=tmp_path / "at")
    assert again.rates == through.rates[2:]
    assert all(torch.equal(again.end[n], p) for n, p in through.end.items())


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_resume_bit_for_bit(pair: Pool, tmp_path: Path, sharded: bool) -> None:
    how: dict[str, Any] = {"micro_batch": 3}
    options: dict[str, Any] = {"epochs": 2, "sharded": sharded}
    through = pair.run(on_rank, "batchnorm", how, {**options, "keep": tmp_path / "at"})
    again = pair.run(on_rank, "batchnorm", how, {**options, "start": tmp_path / "at"})
    for one, other in zip(through, again, strict=True):
        assert all(torch.equal(other.end[n], p) for n, p in one.end.items())


MIXED = [("tokens", 3), ("batchnorm", 3), ("dice", 3), ("tokens", None)]


@pytest.mark.parametrize(("name", "micro_batch"), MIXED)
def test_mixed_precision_is_that_of_accelerate(name: str, micro_batch: int | None) -> None:
    """bfloat16 rounds apart in parts: no further from float32 than the undivided batch."""
    how: dict[str, Any] = {"micro_batch": 3} if micro_batch else {"memory": "16KiB"}
    observed = train(name, how, batch=22, mixed="bf16")
    assert observed.plan is not None
    assert observed.plan.micro_batch < 22
    assert micro_batch or "on fake tensors" in str(
        observed.plan
    )  # what is around forward is rehearsed
    for before, (x, y), got in zip(observed.before, observed.batches, observed.after, strict=True):
        mixed, exact = (undivided(name, before, x, y, on) for on in (True, False))
        for one in exact:
            if one.endswith("grad"):
                bound = max(4 * float((mixed[one] - exact[one]).abs().max()), 1e-3)
                assert float((got[one] - exact[one]).abs().max()) <= bound, one
                assert got[one].dtype == torch.float32


def undivided(name: str, before: Any, x: torch.Tensor, y: torch.Tensor, mixed: bool) -> Any:
    model = made(name).float()
    model.load_state_dict(before)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        out = model(x)
    loss = PROBLEMS[name].loss(out.float(), y)
    loss.backward()  # type: ignore[no-untyped-call]
    return state_of(model, loss)


def evaluated(rank: int, size: int) -> tuple[Any, Any, Any]:
    """Evaluate in micro-batches, and gather what was observed as accelerate does."""
    as_launched(rank, size)
    with accelerated() as accelerator:
        rows = torch.utils.data.TensorDataset(*PROBLEMS["batchnorm"].rows())
        loader = torch.utils.data.DataLoader(rows, batch_size=7)
        model, loader = accelerator.prepare(made("batchnorm").eval(), loader)
        engine = Engine(model, PROBLEMS["batchnorm"].loss, micro_batch=3)
        found, losses, every = [], [], []
        for x, y in loader:
            observed: list[torch.Tensor] = []
            losses.append(
                engine.evaluate(
                    x, y, observe=lambda out, _, observed=observed: observed.append(out)
                )
            )
            found.append(accelerator.gather_for_metrics(torch.cat(observed)))
            every.append(everyones(accelerator, x, y))
        return torch.cat(found), losses, every


def test_what_is_observed_is_gathered_for_metrics_once_for_each_row(pair: Pool) -> None:
    problem, model = PROBLEMS["batchnorm"], made("batchnorm").eval()
    x, y = problem.rows()
    with torch.no_grad():
        want = model(x)
    for outputs, losses, batches in pair.run(evaluated):
        assert outputs.shape == want.shape  # accelerate has repeated six rows, and drops them
        assert_exact({"outputs": outputs}, {"outputs": want})
        for loss, (x, y) in zip(losses, batches, strict=True):
            assert_exact({"loss": loss}, {"loss": problem.loss(model(x), y).detach()})


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("optimizer", [False, True])
def test_accumulation_is_refused(later: bool, optimizer: bool) -> None:
    """Its steps would be left out, and full batches add up."""
    match = r"gradient_accumulation_steps=4\) skips optimizer.step\(\) in all but one of 4"
    with accelerated(gradient_accumulation_steps=1 if later else 4) as accelerator:
        net = nn.Linear(2, 2)
        model, adam = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
        options = {"optimizer": adam} if optimizer else {}
        if not later:
            with pytest.raises(ValueError, match=match):
                Engine(model, nn.MSELoss(), **options)
            return
        engine = Engine(model, nn.MSELoss(), micro_batch=1, **options)
        accelerator.gradient_accumulation_steps = 4
        with pytest.raises(ValueError, match=match):
            engine.backward(torch.ones(2, 2), torch.ones(2, 2))
    assert all(p.grad is None for p in net.parameters())


def test_an_engine_next_to_accelerate_is_not_its_business() -> None:
    with accelerated(gradient_accumulation_steps=4):
        net = nn.Linear(2, 2)
        Engine(net, nn.MSELoss(), optimizer=torch.optim.SGD(net.parameters()), micro_batch=1)


def in_a_join(rank: int, size: int) -> str:
    as_launched(rank, size)
    with accelerated() as accelerator:
        model = accelerator.prepare(nn.Linear(2, 2))
        engine = Engine(model, nn.MSELoss(), micro_batch=1)
        try:
            with model.join():  # on a GPU it is what join_uneven_inputs does
                engine.backward(torch.ones(2, 2), torch.ones(2, 2))
        except NotYetError as error:
            return str(error)
    return "nothing was said"


def test_a_join_of_uneven_inputs_is_refused(pair: Pool) -> None:
    assert all("in join_uneven_inputs" in said for said in pair.run(in_a_join))


def inside_of_a_model(rank: int, size: int) -> str:
    as_launched(rank, size)
    with accelerated() as accelerator:
        model = nn.Sequential(accelerator.prepare(nn.Linear(2, 2)), nn.Linear(2, 2))
        try:
            Engine(model, nn.MSELoss(), micro_batch=1)
        except NotExactError as error:
            return str(error)
    return "nothing was said"


def test_a_part_of_a_model_that_was_prepared_separately_is_refused(pair: Pool) -> None:
    for said in pair.run(inside_of_a_model):
        assert "and it wraps 0 inside of the model: pass the unwrapped module" in said
