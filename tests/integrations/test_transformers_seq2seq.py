"""`Trainer` beside `Seq2SeqTrainer`: a class of both trains as one and generates as the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

transformers = pytest.importorskip(
    "transformers", reason="pip install 'anybatch[transformers]' is needed for these tests"
)

from anybatch.integrations.transformers import Trainer  # noqa: E402

WORDS = 50


class Both(Trainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """Nothing of its own."""


def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    found: nn.Module = transformers.T5ForConditionalGeneration(config).double()
    return found


def rows(count: int) -> list[dict[str, Tensor]]:
    """Labels of uneven length, so that no mean of means is the mean."""
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(1, WORDS, (7,), generator=draw),
            "labels": torch.randint(1, WORDS, (1 + i % 5,), generator=draw),
        }
        for i in range(count)
    ]


def collate(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    labels = pad_sequence([row["labels"] for row in batch], True, -100)
    return {"input_ids": torch.stack([row["input_ids"] for row in batch]), "labels": labels}


def trained(trainer_class: Any, folder: Path, **options: Any) -> Any:
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        max_steps=2,
        optim="sgd",
        learning_rate=0.1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        predict_with_generate=True,
    )
    options |= {"train_dataset": rows(16), "eval_dataset": rows(4), "data_collator": collate}
    trainer = trainer_class(model=model(), args=arguments, **options)
    trainer.train()
    return trainer


def test_a_class_of_both_trains_on_the_full_batch_and_generates(tmp_path: Path) -> None:
    full = trained(transformers.Seq2SeqTrainer, tmp_path / "whole")
    both = trained(Both, tmp_path / "both", micro_batch=3)
    assert both.engine.last.micro_batches == 3
    found, wanted = (
        {name: p.detach() for name, p in one.model.named_parameters()} for one in (both, full)
    )
    assert_exact(found, wanted)
    predicted, same = (one.predict(rows(4), max_new_tokens=5).predictions for one in (both, full))
    assert predicted.shape == same.shape
    assert predicted.shape[0] == 4
    assert (predicted == same).all()
