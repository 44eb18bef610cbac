"""Small runs of TRL's trainers, which return the gradient of each step.

Models are random and have no dropout. TRL's head computes in float32 whatever the model is, so for
measurements in float64 `in_float64` puts torch's own operations in its place.
"""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import peft
import torch
import transformers
import trl
import trl.trainer.utils
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F

from anybatch.tools.exactness import error_of

BATCH, ROWS, PARTS = 8, 11, 4
"""Samples in a batch, in the data set (so a batch of 3 ends an epoch), and micro-batches of TRL."""

WORDS = [f"w{i}" for i in range(60)]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} <eos> "
    "{% endgeneration %}{% else %}{{ m.content }} {% endif %}{% endfor %}"
)


class Wide:
    """TRL's fused head in the type of the model, with the logits in memory."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, heat: float, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        """Return log-probs, and the `outputs` (the last argument) that are asked for."""
        logits = F.linear(hidden, weight, bias) / heat
        logs = logits.log_softmax(-1)
        found = {
            "entropy": -(logs.exp() * logs).sum(-1),
            "log_sum_sq_probs": (2 * logs).logsumexp(-1).detach(),
            "mean_logits": logits.mean(-1).detach(),
            "is_top1": logits.argmax(-1) == targets,
        }
        picked = logs.gather(1, targets[:, None])[:, 0]
        return picked, *(value if name in rest[-1] else None for name, value in found.items())


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Compute log-probs in the type of the model in the body."""
    utils: Any = trl.trainer.utils
    kept, utils._ChunkedLogProbFunction = utils._ChunkedLogProbFunction, Wide
    try:
        yield
    finally:
        utils._ChunkedLogProbFunction = kept


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        name: in words.
        method: SFT, DPO or GRPO.
        settings: arguments of its config.
        lora: adapters are trained.
        undivided: settings that differ where the batch is undivided.
    """

    name: str
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    undivided: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case("completions", "SFT"),
    Case("completions, LoRA", "SFT", lora=True),
    Case("assistant's turns only", "SFT", {"assistant_only_loss": True}),
    Case("dft", "SFT", {"loss_type": "dft"}),
    Case("packed, wrapped", "SFT", {"packing": True, "packing_strategy": "wrapped"}),
    Case("packed, bfd", "SFT", {"packing": True, "packing_strategy": "bfd"}),
    Case("padding-free", "SFT", {"padding_free": True, "max_length": None}),
    Case("sigmoid", "DPO"),
    Case("sigmoid, LoRA", "DPO", lora=True),
    Case("sigmoid, reference precomputed", "DPO", {"precompute_ref_log_probs": True}),
    Case("ipo", "DPO", {"loss_type": ["ipo"]}),
    Case("hinge", "DPO", {"loss_type": ["hinge"]}),
    Case("aot", "DPO", {"loss_type": ["aot"]}),
    Case("sigmoid + sft", "DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    Case("dapo", "GRPO", {"loss_type": "dapo"}),
    Case("dapo, LoRA, KL", "GRPO", {"loss_type": "dapo", "beta": 0.1}, lora=True),
    Case("bnpo", "GRPO", {"loss_type": "bnpo"}),
    Case("dr_grpo", "GRPO", {"loss_type": "dr_grpo"}),
    Case("grpo", "GRPO", {"loss_type": "grpo"}),
    Case("cispo", "GRPO", {"loss_type": "cispo"}),
    Case("dapo, each batch twice", "GRPO", {"loss_type": "dapo", "num_iterations": 2}),
    Case(
        "dapo, two steps a generation",
        "GRPO",
        {"loss_type": "dapo", "steps_per_generation": 2 * PARTS},
        undivided={"steps_per_generation": 2},
    ),
    Case("dapo, tokens of high entropy", "GRPO", {"top_entropy_quantile": 0.5}),
    Case("bnpo, entropy bonus", "GRPO", {"loss_type": "bnpo", "entropy_coef": 0.1}),
]
BY_NAME = {f"{case.method} {case.name}": case for case in CASES}


@dataclass
class Found:
    """What a run has left.

    Attributes:
        gradients: of each step.
        logs: of the trainer.
        trainer: the trainer.
        micro_batches: of an engine, in each step.
    """

    gradients: list[dict[str, Tensor]]
    logs: list[dict[str, Any]]
    trainer: Any
    micro_batches: list[int] = field(default_factory=list)

    def error(self, truth: Found, step: int | None = None) -> float:
        """Return the worst error of all steps, or of one, against another run."""
        pairs = [*zip(self.gradients, truth.gradients, strict=True)]
        pairs = pairs if step is None else [pairs[step]]
        return max(max(error_of(got, want).values()) for got, want in pairs)


class Keep(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps the gradient of each step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.micro_batches: list[int] = []
        self.trainer: Any = None

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_named: Any
    ) -> None:
        """Take a copy."""
        del args, state, control
        named = model.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        engine = getattr(self.trainer, "engine", None)
        if engine is not None:
            self.micro_batches.append(engine.last.micro_batches)


def tokenizer() -> Any:
    """Return a tokenizer of words, made in memory."""
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=TEMPLATE,
    )


def model(seed: int, dtype: torch.dtype) -> Any:
    """Return a Llama of two layers."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS) + 3,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.5,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def rows_of(case: Case, seed: int) -> list[dict[str, Any]]:
    """Return random rows of unequal length."""
    draw = random.Random(seed)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    if case.method == "DPO":
        return [
            {"prompt": text(1, 5), "chosen": f" {text(1, 9)}", "rejected": f" {text(1, 6)}"}
            for _ in range(ROWS)
        ]
    if case.method == "GRPO":
        return [{"prompt": text(1, 5)} for _ in range(12)]
    if case.settings.get("assistant_only_loss"):
        roles = ("user", "assistant", "user", "assistant")
        return [
            {"messages": [{"role": role, "content": text(1, 6)} for role in roles]}
            for _ in range(ROWS)
        ]
    if case.settings.get("packing"):
        return [{"text": text(2, 9)} for _ in range(4 * ROWS)]
    return [{"prompt": text(1, 5), "completion": f" {text(1, 9)}"} for _ in range(ROWS)]


def reward(completions: list[str], **_named: Any) -> list[float]:
    """Score completions by their length and their letters."""
    return [len(c.split()) % 5 + 0.1 * sum(map(ord, c)) % 3 for c in completions]


def train(
    case: Case,
    trainer: Any,
    parts: int = 1,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    steps: int = 3,
    rate: float = 0.01,
    config: dict[str, Any] | None = None,
    runs: bool = True,
    **more: Any,
) -> Found:
    """Train for a few steps.

    Args:
        case: what is trained.
        trainer: a class, of TRL's or of ours.
        parts: ``gradient_accumulation_steps``, by which the batch is divided.
        seed: of model and data.
        dtype: of the model.
        steps: of the optimizer.
        rate: learning rate.
        config: further arguments of the config.
        runs: whether `train` is called; else the trainer is made alone.
        more: further arguments of the trainer, such as those of the engine.
    """
    disable_progress_bars()
    transformers.logging.set_verbosity_error()
    args = _config(case, parts, steps, rate, config or {})
    keep = Keep()
    named: dict[str, Any] = {
        "args": args,
        "train_dataset": Dataset.from_list(rows_of(case, seed)),
        "processing_class": tokenizer(),
        "callbacks": [keep],
        **more,
    }
    if case.lora:
        named["peft_config"] = peft.LoraConfig(
            r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
    if case.method == "DPO" and not case.lora:
        named["ref_model"] = model(seed + 1, dtype)
    if case.method == "GRPO":
        named["reward_funcs"] = reward
    made = trainer(model(seed, dtype), **named)
    made.model.to(dtype)
    keep.trainer = made
    if not runs:
        return Found([], [], made)
    with contextlib.redirect_stdout(io.StringIO()):
        made.train()
    return Found(keep.gradients, made.state.log_history, made, keep.micro_batches)


def _config(case: Case, parts: int, steps: int, rate: float, more: dict[str, Any]) -> Any:
    settings = dict(case.settings) | (case.undivided if parts == 1 else {}) | more
    if case.method == "GRPO":
        settings = {"num_generations": 4, "max_completion_length": 7} | settings
    elif settings.get("packing"):
        settings = {"max_length": 16} | settings
    return getattr(trl, f"{case.method}Config")(
        per_device_train_batch_size=BATCH // parts,
        gradient_accumulation_steps=parts,
        max_steps=steps,
        learning_rate=rate,
        **{
            "optim": "sgd",
            "report_to": [],
            "bf16": False,
            "logging_steps": 1,
            "use_cpu": True,
            "activation_checkpointing": False,
            "max_grad_norm": 0.0,
            "disable_tqdm": True,
            "save_strategy": "no",
            "output_dir": tempfile.mkdtemp(),
            **settings,
        },
    )
