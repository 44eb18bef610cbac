"""A mask of tokens squared is foreseen where a step of a transformer makes it, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.peaks import metered
from torch import Tensor, nn

import anybatch

transformers = pytest.importorskip(
    "transformers", reason="pip install transformers is needed for these tests"
)

T = 512
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": T,
}
FAMILIES = {
    "Llama": SMALL | {"use_cache": False},
    "Bert": SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def network(family: str) -> nn.Module:
    """A model of one layer, with its loss inside."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    head = "ForCausalLM" if family == "Llama" else "ForMaskedLM"
    model: nn.Module = getattr(transformers, family + head)(config)
    return model.train()


def batch(how: str) -> dict[str, Tensor]:
    """Three rows of tokens with a mask or positions; "padded" and "packed" is the last of them."""
    ids, ones = torch.randint(50, (3, T)), torch.ones(3, T, dtype=torch.int64)
    places, there = torch.arange(T).expand(3, T).clone(), {"input_ids": ids, "labels": ids}
    if how == "padded":
        ones[2, T // 2 :] = 0
    if how == "packed":
        places[2] %= T // 2
    more = {"bare": {}, "ones": {"attention_mask": ones}, "padded": {"attention_mask": ones}}
    return there | more.get(how, {"position_ids": places})


def needed(model: nn.Module, rows: dict[str, Tensor]) -> int:
    """The bytes of a step of one sample that a refusal names."""
    with pytest.raises(anybatch.errors.BudgetError) as refused:
        anybatch.plan(
            model, None, (rows, None), memory="1KiB", timed=False, offload="off", rungs=()
        )
    return refused.value.needed


def peak(model: nn.Module, rows: dict[str, Tensor]) -> int:
    """The most bytes of a step of the last row by hand."""
    with metered({"parameters": model.parameters(), "buffers": model.buffers()}) as meter:
        model(**{name: rows[name][2:] for name in rows}).loss.backward()
    model.zero_grad()
    return meter.peak


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["bare", "ones"])
def test_a_mask_that_no_step_makes_is_not_foreseen(family: str, how: str) -> None:
    model, rows = network(family), batch(how)
    aside = sum(p.nbytes for p in model.parameters())
    assert peak(model, rows) <= needed(model, rows) < peak(model, rows) + aside + T * T


@pytest.mark.parametrize("how", ["padded", "packed"])
def test_one_padded_row_has_its_mask_foreseen(how: str) -> None:
    model, rows = network("Llama"), batch(how)
    assert peak(model, rows) > peak(model, batch("bare")) + T * T
    assert needed(model, rows) >= peak(model, rows)


def test_a_step_on_padded_rows_stays_within_its_forecast() -> None:
    model, rows = network("Llama"), batch("padded")
    engine = anybatch.Engine(model, None, memory=needed(model, rows) + 4096, rungs=())
    metered_steps = 0
    for _ in range(3):
        model.zero_grad()
        engine.backward(rows)
        assert engine.last is not None
        if engine.last.peak_bytes is not None:  # of steps that are metered
            metered_steps += 1
            assert engine.last.predicted_bytes is not None
            assert engine.last.peak_bytes <= engine.last.predicted_bytes
    assert metered_steps
