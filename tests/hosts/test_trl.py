"""TRL's trainers with an engine: the gradient, the loss and the metrics of the undivided batch.

The truth is TRL's own trainer with the whole batch at once. TRL's head computes in float32; tests
in float64 put torch's operations in its place, for both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs trl: make hosts")

import trl
from benchmarks.hosts.trl.runs import (
    BY_NAME,
    PARTS,
    Case,
    Found,
    in_float64,
    model,
    reward,
    rows_of,
    tokenizer,
    train,
)
from datasets import Dataset
from tests.hosts import trl_on_ranks
from tests.oracle import tolerance
from torch.nn import functional as F

from anybatch.errors import NotExactError, NotYetError
from anybatch.integrations import trl as ours
from anybatch.integrations.trl_documents import separates

pytestmark = pytest.mark.filterwarnings("ignore")

DIVIDED_WRONGLY = {
    "DPO sigmoid",
    "DPO sigmoid, LoRA",
    "DPO sigmoid, reference precomputed",
    "DPO ipo",
    "DPO hinge",
    "DPO aot",
    "DPO sigmoid + sft",
    "GRPO bnpo",
    "GRPO dapo, tokens of high entropy",
    "GRPO bnpo, entropy bonus",
}
"""Where TRL's own accumulation has another gradient: a ragged tail, or samples that meet."""

TWO_PASSES = {"DPO aot", "DPO sigmoid + sft", *(n for n in BY_NAME if "entropy" in n)}
EVERY_SPLIT = {"SFT completions, LoRA", "DPO sigmoid", "DPO aot", "GRPO bnpo"}
NO_METRIC = ("runtime", "second", "time", "total_flos")


@pytest.fixture
def wide() -> Iterator[None]:
    with in_float64():
        yield


def host(case: Case) -> Any:
    return getattr(trl, f"{case.method}Trainer")


def own(case: Case) -> Any:
    return getattr(ours, f"{case.method}Trainer")


TRUTHS: dict[str, Found] = {}


def truth_of(name: str) -> Found:
    if name not in TRUTHS:
        TRUTHS[name] = train(BY_NAME[name], host(BY_NAME[name]))
    return TRUTHS[name]


def assert_metrics(got: Found, want: Found) -> None:
    for mine, other in zip(got.logs, want.logs, strict=True):
        for name, value in other.items():
            if not any(part in name for part in NO_METRIC):
                assert mine[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", BY_NAME)
def test_gradient_and_metrics_are_those_of_the_undivided_batch_in_any_split(name: str) -> None:
    case, want = BY_NAME[name], truth_of(name)
    ways: list[dict[str, Any]] = [{"micro_batch": 3}, {"memory": "500KiB"}]
    ways += [{"micro_batch": n} for n in (1, 2)] if name in EVERY_SPLIT else []
    for way in ways:
        got = train(case, own(case), PARTS, **way)
        assert got.error(want) <= tolerance(), way
        assert_metrics(got, want)
        two_passes = name in TWO_PASSES and got.trainer.engine.last.micro_batches > 1
        expected = "two-pass" if two_passes else "streaming"
        assert got.trainer.engine.plan.mechanism in (expected, "undivided")


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", BY_NAME)
def test_what_trl_itself_divides_wrongly(name: str) -> None:
    """Says which comparisons above a plain accumulation would fail."""
    error = train(BY_NAME[name], host(BY_NAME[name]), PARTS, rate=0.0).error(
        train(BY_NAME[name], host(BY_NAME[name]), rate=0.0)
    )
    assert (error > 1e-3) == (name in DIVIDED_WRONGLY)
    assert error > 1e-3 or error <= tolerance()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["SFT completions", "DPO sigmoid, LoRA", "GRPO bnpo"])
def test_trls_own_head_in_float32(name: str, *, checkpointing: bool) -> None:
    case, config = BY_NAME[name], {"activation_checkpointing": checkpointing}
    options: dict[str, Any] = {"dtype": torch.float32, "config": config}
    want = train(case, host(case), **options)
    with in_float64():
        truth = train(case, host(case))
    for way in ({"micro_batch": 3}, {"memory": "8MiB"}):
        got = train(case, own(case), PARTS, **options, **way)
        assert got.error(truth, 0) <= 10 * max(want.error(truth, 0), torch.finfo().eps)
        assert got.trainer.engine.last.micro_batches > 1


def test_a_model_in_float64_is_refused_for_trls_head_is_in_float32() -> None:
    case = BY_NAME["SFT completions"]
    with pytest.raises(NotExactError, match="the gradient of a row must not depend on the other"):
        train(case, ours.SFTTrainer, PARTS, micro_batch=3)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", ["SFT completions", "DPO sigmoid, LoRA", "GRPO dapo"])
def test_a_budget_holds(name: str) -> None:
    got = train(BY_NAME[name], own(BY_NAME[name]), PARTS, memory="500KiB", steps=1)
    last = got.trainer.engine.last
    assert last.micro_batches > 1
    assert last.peak_bytes <= last.predicted_bytes <= 500 << 10


def test_a_share_of_the_free_memory_is_a_budget() -> None:
    case = BY_NAME["SFT completions"]
    engine = train(case, own(case), PARTS, memory="80%", steps=1).trainer.engine
    assert engine.plan.memory.source.endswith("80 % of it")


RANKED = [
    "SFT completions, LoRA",
    "SFT padding-free",
    "SFT packed, bfd",
    "DPO sigmoid",
    "DPO sigmoid, LoRA",
    "GRPO dapo, LoRA, KL",
    "GRPO bnpo",
    "GRPO dr_grpo",
    "GRPO dapo, each batch twice",
    "GRPO dapo, two steps a generation",
]


@pytest.mark.large(few=3)
@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", RANKED)
def test_two_ranks_have_the_gradient_and_the_metrics_of_the_batch_of_both(
    name: str, tmp_path: Path
) -> None:
    """Real processes on gloo, with other micro-batches than one process with both batches."""
    words = ["tests.integrations.forked", "tests.hosts.trl_on_ranks", str(tmp_path), name]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    case = BY_NAME[name]
    options: dict[str, Any] = {"train_dataset": trl_on_ranks.rows_of(case), "steps": 2}
    want = train(case, host(case), **options, runs=case.method != "GRPO")
    if case.method == "GRPO":  # ranks draw completions of their own
        want.gradients = [of_both(want.trainer, ranks, step) for step in range(2)]
    for rank in ranks:
        assert rank["samples"] == 2 * trl_on_ranks.BATCH
        assert rank["micro_batches"] == [2, 2]
        got = Found(rank["gradients"], rank["logs"], None)
        assert got.error(want) <= tolerance()
    if case.method != "GRPO":
        assert_metrics(Found([], ranks[0]["logs"], None), want)


def of_both(trainer: Any, ranks: list[Any], step: int) -> dict[str, torch.Tensor]:
    """The gradient of TRL's own loss of the completions of all ranks, in one process."""
    trainer.model.load_state_dict(ranks[0]["before"][step])
    trainer.model.train().zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    rows = [rank["inputs"][step] for rank in ranks]
    wide = max(len(one["completion_mask"][0]) for one in rows)

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        if parts[0].dim() == 0:
            return parts[0]
        prompts = parts[0].dim() == 2 and parts[0].shape[1] == rows[0]["prompt_ids"].shape[1]
        fill = [0 if prompts or part.dim() == 1 else wide - part.shape[1] for part in parts]
        return torch.cat([F.pad(p, (0, n)) if n else p for p, n in zip(parts, fill, strict=True)])

    both = {name: joined([one[name] for one in rows]) for name in rows[0]}
    trainer.compute_loss(trainer.model, both).backward()
    named = trainer.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def made(method: str, settings: dict[str, Any] | None = None, **named: Any) -> Any:
    case = Case("", method, settings or {})
    config = getattr(trl, f"{method}Config")
    per = {"per_device_train_batch_size": 4, "report_to": [], "bf16": False, "use_cpu": True}
    if method == "GRPO":
        per |= {"num_generations": 4}
        named = {"reward_funcs": reward} | named
    if method == "DPO":
        named = {"ref_model": model(1, torch.float32)} | named
    return own(case)(
        model(0, torch.float32),
        args=config(tempfile.mkdtemp(), **(per | case.settings)),
        train_dataset=Dataset.from_list(rows_of(Case("", method), 0)),
        processing_class=tokenizer(),
        **named,
    )


REFUSED = [
    ("SFT", {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 is not supported in SFT"),
    ("SFT", {"activation_offloading": True}, "activation_offloading=True is not supported in SFT"),
    ("SFT", {"use_liger_kernel": True}, "a loss inside a fused kernel is not supported"),
    ("SFT", {"torch_compile": True}, "a compiled model that computes its own loss is not supp"),
    ("GRPO", {"use_vllm": True}, "use_vllm=True is not supported in GRPOTrainer today"),
    (
        "GRPO",
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "num_generations": 2},
        "steps_per_generation=3 with gradient_accumulation_steps=2 is not supported in GRPO",
    ),
]


@pytest.mark.parametrize(("method", "settings", "words"), REFUSED)
def test_settings_that_were_not_shown_to_be_exact_are_refused_by_name(
    method: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(NotYetError, match=words):
        made(method, settings)


def test_two_processes_are_refused_where_samples_meet_in_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trl.DPOConfig, "world_size", 1)
    trainer = made("DPO", {"loss_type": ["aot"]})
    monkeypatch.setattr(trl.DPOConfig, "world_size", 2)
    with pytest.raises(NotYetError, match="in which samples meet, with 2 processes, is not supp"):
        trainer._refuse_untried(trainer._in_model())


def test_a_loss_function_of_ones_own_is_refused_by_name() -> None:
    with pytest.raises(NotYetError, match="compute_loss_func is not supported in SFTTrainer today"):
        made("SFT", compute_loss_func=lambda outputs, labels, num_items_in_batch=None: 0)


def test_an_override_of_the_loss_is_refused_with_the_name_of_its_class() -> None:
    class Scaled(ours.SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    case = BY_NAME["SFT completions"]
    with pytest.raises(NotExactError, match="must be TRL's, .* and Scaled overrides compute_loss"):
        train(case, Scaled)
    trainer = made("SFT")
    trainer.compute_loss = lambda *args, **kwargs: 0
    with pytest.raises(NotExactError, match="the object overrides compute_loss"):
        trainer.train()


def test_a_count_that_is_not_trls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later TRL might divide: the derivative of its loss is compared at the first step."""
    words = "the parts of a batch must have the derivative of TRL's loss"
    monkeypatch.setattr(
        ours.DPOTrainer, "_sum", lambda _: ("tokens", lambda rows: rows["completion_mask"].sum())
    )
    with pytest.raises(NotExactError, match=words):
        train(BY_NAME["DPO sigmoid"], ours.DPOTrainer, PARTS, dtype=torch.float32, micro_batch=3)


@pytest.mark.usefixtures("wide")
def test_positional_arguments_keep_their_places(tmp_path: Path) -> None:
    reference = model(1, torch.float64)
    args = trl.DPOConfig(str(tmp_path), report_to=[], bf16=False, use_cpu=True)
    trainer = ours.DPOTrainer(
        model(0, torch.float64),
        reference,
        args,
        train_dataset=Dataset.from_list(rows_of(BY_NAME["DPO sigmoid"], 0)),
        processing_class=tokenizer(),
        micro_batch=2,
    )
    assert trainer.ref_model is reference
    assert trainer.args is args


@pytest.mark.usefixtures("wide")
def test_an_evaluation_in_between_is_trls_own_and_moves_nothing() -> None:
    case = BY_NAME["SFT packed, bfd"]
    rows = Dataset.from_list(rows_of(case, 5))
    config = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    want = train(case, trl.SFTTrainer, config=config, eval_dataset=rows)
    got = train(case, ours.SFTTrainer, PARTS, config=config, eval_dataset=rows, micro_batch=1)
    assert got.error(want) <= tolerance()
    assert_metrics(got, want)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("name", ["SFT completions", "DPO sigmoid"])
def test_a_resumed_run_ends_as_an_unbroken_one(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    config = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    whole = train(case, own(case), PARTS, config=config, memory="500KiB", steps=4)
    again = made_again(case, tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name_, p), (_, q) in zip(
        whole.trainer.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert torch.equal(p, q), name_


def made_again(case: Case, folder: Path) -> Any:
    config = {"save_strategy": "no", "output_dir": str(folder)}
    return train(
        case, own(case), PARTS, config=config, memory="500KiB", steps=4, runs=False
    ).trainer


class Blind(torch.nn.Module):
    """A model whose tokens see all tokens before them in their row, whatever their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(63, dtype=torch.float64))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        seen = self.weight[input_ids].cumsum(1)[:, :-1]
        return trl.trainer.utils.FusedCausalLMOutput(log_probs=seen)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_of_a_coarse_model_are_told_apart(attention: str) -> None:
    coarse = made("SFT", {"packing": True, "max_length": 16}).model.to(torch.bfloat16)
    coarse.set_attn_implementation(attention)
    ids = torch.randint(3, 10, (1, 24), generator=torch.Generator().manual_seed(0))
    places = torch.cat([torch.arange(9), torch.arange(15)])[None]
    assert separates(coarse, {"input_ids": ids, "position_ids": places})


def test_a_coarse_model_that_mixes_packed_documents_is_refused() -> None:
    blind = Blind()
    blind.weight.data.mul_(0.02)
    ids = torch.arange(3, 15).reshape(1, 12)
    places = torch.cat([torch.arange(6), torch.arange(6)])[None]
    with pytest.raises(NotExactError, match="must tell documents in one row apart"):
        separates(blind.to(torch.bfloat16), {"input_ids": ids, "position_ids": places})


def test_a_model_that_mixes_packed_documents_is_refused() -> None:
    ids = torch.arange(3, 15).reshape(2, 6)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]])
    with pytest.raises(NotExactError, match="must tell documents in one row apart"):
        separates(Blind(), {"input_ids": ids, "position_ids": positions})
    with in_float64():
        trainer = made("SFT", {"packing": True, "max_length": 16})
        assert separates(trainer.model, {"input_ids": ids, "position_ids": positions})
        assert not separates(trainer.model, {"input_ids": ids[:1], "position_ids": positions[:1]})
