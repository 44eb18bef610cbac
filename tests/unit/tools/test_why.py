"""The bytes of each way are those at which an engine refuses a budget, or holds in a real step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch
from anybatch import Engine
from anybatch.errors import BudgetError
from anybatch.tools.why import (
    AGAIN,
    CHUNKS,
    CHUNKS_AGAIN,
    CHUNKS_TILED,
    OFFLOAD,
    SPLIT,
    STATES,
    TILED,
    UNDIVIDED,
    Alternatives,
    Way,
    checkpointed,
    why,
)
from anybatch.units import show_bytes

KIB = 1 << 10
SLACK = 4 * KIB
"""Bytes of scalars that a real step may hold and a dry run not."""
VOCABULARY, D, LENGTH, SAMPLES = 4096, 16, 256, 3


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(D, 64, bias=False) for _ in range(2))
        self.down = nn.Linear(64, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block as Llama's: RMSNorm, causal attention, a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.first(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        meets = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(meets.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A model of blocks that are computed again or not."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)
        self.blocks, self.again = nn.ModuleList(Block() for _ in range(2)), again

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.other(self.two(torch.relu(self.norm(self.one(x))))) + x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def llama(**more: bool) -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1))
    return Llama(**more), loss_of, (ids[:, :-1], ids[:, 1:])


def resnet() -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
    blocks = nn.Sequential(Residual(8), Residual(8))
    model = nn.Sequential(*stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return model, F.cross_entropy, (torch.randn(6, 3, 32, 32), torch.randint(10, (6,)))


@pytest.fixture(scope="module")
def of_llama() -> Alternatives:
    return why(*llama(), memory="14MiB", micro_batch=2)


@pytest.fixture(scope="module")
def of_resnet() -> Alternatives:
    return why(*resnet(), memory="1MiB")


RUNGS: dict[str, tuple[str, ...]] = {
    SPLIT: (),
    AGAIN: (),
    CHUNKS: ("chunks",),
    OFFLOAD: ("offload",),
    TILED: ("tiles",),
    CHUNKS_TILED: ("chunks", "tiles"),
    CHUNKS_AGAIN: ("chunks",),
}


def engine_of(model: nn.Module, loss: Any, name: str, budget: int, **more: Any) -> Engine:
    return Engine(model, loss, memory=budget, rungs=RUNGS[name], cache=None, tune="off", **more)


def assert_edge(
    engine_of: Callable[[int], Engine], batch: Any, held: int | None, *, bound: bool = False
) -> None:
    """Assert that so many bytes are what a step holds, or a `bound`, and that fewer are refused."""
    assert held is not None
    with pytest.raises(BudgetError):
        engine_of(held - SLACK).backward(*batch)
    engine = engine_of(held + SLACK)
    engine.backward(*batch)
    assert engine.last is not None
    assert engine.last.peak_bytes is not None
    assert held * (not bound) - SLACK <= engine.last.peak_bytes <= held + SLACK


@pytest.mark.large(few=3)
@pytest.mark.parametrize("name", RUNGS)
def test_the_least_bytes_of_a_way_are_those_of_a_step_and_fewer_are_refused(
    of_llama: Alternatives, name: str
) -> None:
    model, loss, batch = llama(again=name in (AGAIN, CHUNKS_AGAIN))
    make = partial(engine_of, model, loss, name)
    assert_edge(make, batch, of_llama.way(name).least)


@pytest.mark.parametrize("name", [SPLIT, AGAIN])
def test_the_other_columns_are_those_of_steps_in_such_micro_batches(
    of_llama: Alternatives, name: str
) -> None:
    model, loss, batch = llama(again=name == AGAIN)
    make, way = partial(engine_of, model, loss, name), of_llama.way(name)
    assert way.least is not None
    assert way.divided is not None
    assert way.least < way.divided
    assert_edge(partial(make, micro_batch=2), batch, way.divided)
    model.zero_grad()
    engine = make(1 << 30)
    engine.backward(*batch)
    assert engine.last is not None
    assert engine.last.micro_batch == SAMPLES
    assert abs((engine.last.peak_bytes or 0) - (way.undivided or 0)) <= SLACK


@pytest.mark.parametrize("name", [SPLIT, OFFLOAD])
def test_the_bytes_with_batchnorm_are_those_of_lanes(of_resnet: Alternatives, name: str) -> None:
    model, loss, batch = resnet()
    make, paged = partial(engine_of, model, loss, name), name == OFFLOAD
    assert_edge(make, batch, of_resnet.way(name).least, bound=paged)
    assert of_resnet.way(SPLIT).elsewhere.endswith("with another BatchNorm")


def test_a_sentence_names_the_way_of_the_plan_and_those_that_hold_more(
    of_llama: Alternatives, of_resnet: Alternatives
) -> None:
    assert (of_llama.chosen, of_resnet.chosen) == (CHUNKS, SPLIT)
    undivided, split = (of_llama.way(name) for name in (UNDIVIDED, SPLIT))
    assert of_llama.sentence == (
        f"The plan for 14.0 MiB is head and loss in chunks, 2 samples at once: more would be the "
        f"batch undivided {show_bytes(undivided.undivided or 0)}, micro-batches "
        f"{show_bytes(split.least or 0)}."
    )
    lines = str(of_llama).splitlines()
    assert lines[0].split("  ")[0] == "way"
    assert [line.split("  ")[0] for line in lines if " <" in line[:30]][:1] == [f"{CHUNKS} <"]
    assert lines[3].startswith(f"{AGAIN} *")
    assert of_resnet.way(CHUNKS).again == "no linear map is wide"
    assert of_resnet.way(AGAIN).again.startswith("forward of 2 blocks, 1.")


def test_without_a_plan_the_least_way_is_named() -> None:
    rows = (Way(UNDIVIDED, "", None, None, 40), Way(SPLIT, "", 20, 30, 40), Way(AGAIN, "", 5, 5, 5))
    found = Alternatives(rows, 4, 2, 10, None)
    assert found.sentence == "No plan fits in 10 B: the least is 20 B, by micro-batches."
    assert [row.fits(30, 2) for row in rows] == ["no", "2", "all"]
    assert "2 at once" in str(found)
    assert found.chosen == ""


def test_offloaded_states_are_one_more_way_whose_plan_fits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 128), torch.randn(4, 128)
    found = why(model, F.mse_loss, batch, memory="400KiB", optimizer=optimizer, states="auto")
    assert found.chosen == STATES
    least = found.way(STATES).least
    assert least is not None
    options: Any = {"optimizer": optimizer, "states": "auto", "timed": False}
    with pytest.raises(BudgetError):
        anybatch.plan(model, F.mse_loss, batch, memory=least - SLACK, **options)
    plan = anybatch.plan(model, F.mse_loss, batch, memory=least + SLACK, **options)
    assert plan.states is not None


def test_blocks_are_checkpointed_in_the_body_only_and_read_as_before() -> None:
    model, _, (ids, _) = llama()
    blocks, want = list(model.blocks), model(ids)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError), checkpointed(model) as count:
        assert count == 2
        assert model.blocks[0] is not blocks[0]  # type: ignore[index]
        assert model.blocks[0].mlp is blocks[0].mlp  # type: ignore[index]
        assert torch.equal(model(ids), want)
        raise RuntimeError
    assert list(model.blocks) == blocks  # type: ignore[arg-type]
    with checkpointed(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) as count:
        assert count == 0
