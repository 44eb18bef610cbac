"""Seconds of a step of both Trainers at equal micro-batch, run in turn: the whole loop counts."""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import nn

from anybatch.integrations.transformers import Trainer
from benchmarks.integrations.transformers.errors import QUIET
from benchmarks.integrations.transformers.families import Row, collate, made

WORDS, LENGTH, STEPS, SETTLED = 2000, 64, 8, 2


@dataclass(frozen=True)
class Subject:
    """What is trained: a model, rows of even or uneven length, micro-batch and batch."""

    model: Callable[[], nn.Module]
    uneven: bool = False
    micro_batch: int = 4
    batch: int = 32


def gpt2() -> nn.Module:
    size = {"n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    config = transformers.GPT2Config(vocab_size=WORDS, bos_token_id=1, eos_token_id=2, **size)
    return made(transformers.GPT2LMHeadModel, config)


def llama() -> nn.Module:
    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(vocab_size=WORDS, num_attention_heads=4, **size)
    return made(transformers.LlamaForCausalLM, config)


def bert() -> nn.Module:
    size = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    config = transformers.BertConfig(vocab_size=WORDS, num_attention_heads=4, **size)
    return made(transformers.BertForMaskedLM, config)


SUBJECTS = {
    "GPT-2": Subject(gpt2),
    "Llama": Subject(llama),
    "BERT, masked tokens": Subject(bert),
    "GPT-2, uneven lengths": Subject(gpt2, uneven=True),
    "BERT, uneven lengths": Subject(bert, uneven=True),
}


def rows(count: int, *, uneven: bool) -> list[Row]:
    """Random tokens, all of which are to be predicted."""
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(LENGTH // 8, LENGTH + 1, (count,), generator=rng).tolist()
    texts = [torch.randint(3, WORDS, (n if uneven else LENGTH,), generator=rng) for n in lengths]
    return [
        {"input_ids": text, "attention_mask": torch.ones_like(text), "labels": text}
        for text in texts
    ]


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """The seconds between the ends of steps, on the wall and of the processor."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def seconds(self) -> tuple[float, float]:
        """Medians, without the first steps."""
        ends = self.ends[SETTLED:]
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ends)]
        wall = statistics.median(wall for wall, _ in steps)
        return wall, statistics.median(processor for _, processor in steps)


def seconds(trainer: Any, subject: Subject) -> tuple[float, float]:
    """Seconds of a step of a training."""
    clock, ours = Clock(), trainer is Trainer
    args = {"per_device_train_batch_size": subject.micro_batch, "max_steps": STEPS}
    args["gradient_accumulation_steps"] = subject.batch // subject.micro_batch
    with tempfile.TemporaryDirectory() as folder:
        trainer(
            subject.model(),
            transformers.TrainingArguments(folder, **QUIET, **args),
            train_dataset=rows(4 * subject.batch, uneven=subject.uneven),
            data_collator=collate,
            callbacks=[clock],
            **({"micro_batch": subject.micro_batch} if ours else {}),
        ).train()
    return clock.seconds()


def pairs(subject: Subject, count: int) -> dict[str, float]:
    """Median ratios of ours to theirs, both ways in turn."""
    found = []
    for index in range(count):
        order = [transformers.Trainer, Trainer] if index % 2 else [Trainer, transformers.Trainer]
        one = {trainer: seconds(trainer, subject) for trainer in order}
        found.append((one[Trainer], one[transformers.Trainer]))
    walls = [ours[0] / theirs[0] for ours, theirs in found]
    return {
        "ratio": round(statistics.median(walls), 4),
        "low": round(min(walls), 4),
        "high": round(max(walls), 4),
        "processor": round(statistics.median(o[1] / t[1] for o, t in found), 4),
        "seconds": round(statistics.median(theirs[0] for _, theirs in found), 4),
    }
