"""Adapters: what is trained is small, what is frozen is the model, and the batch is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import error_of
from torch import nn

for name in ("transformers", "peft"):
    pytest.importorskip(name, reason=f"pip install {name} is needed for these tests")

import peft  # noqa: E402
from tests.integrations.trainings import train  # noqa: E402
from tests.integrations.truth import BY_NAME, N, assert_full_batch  # noqa: E402

from anybatch.integrations.transformers import Trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")


def adapted(name: str, targets: list[str], task: str) -> nn.Module:
    """A model in float64 whose weights are frozen, with adapters that are not zero."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=3, target_modules=targets, task_type=task, init_lora_weights=False, lora_dropout=0.0
    )
    model: nn.Module = peft.get_peft_model(BY_NAME[name].model(), config)
    return model.double()


def trained(model: nn.Module) -> dict[str, Any]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


LLAMA = ("Llama", ["q_proj", "v_proj"], "CAUSAL_LM")


@pytest.mark.large(few=2)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("of", [LLAMA, ("T5", ["q", "v"], "SEQ_2_SEQ_LM")], ids=["Llama", "T5"])
def test_adapters_get_the_gradient_of_the_undivided_batch(
    tmp_path: Path, of: Any, checkpointing: bool
) -> None:
    model = adapted(*of)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    _, observed = train(
        Trainer,
        model,
        BY_NAME[of[0]].rows(N, 0),
        tmp_path,
        {"micro_batch": 3},
        per_device_train_batch_size=8,
        activation_checkpointing=checkpointing,
    )
    assert_full_batch(observed)
    assert {name for one in observed.after for name in one if name.endswith(".grad")} == {
        f"{name}.grad" for name in trained(model)
    }
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


@pytest.fixture
def untimed() -> Iterator[None]:
    """No size is tried: a run that is interrupted meanwhile goes on in the fastest so far."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_plan_for_adapters_holds_and_a_run_with_them_goes_on(
    tmp_path: Path, untimed: None
) -> None:
    rows = BY_NAME["Llama"].rows(N, 0)
    options = {"per_device_train_batch_size": 8, "max_steps": 4, "save_steps": 2}
    options |= {"save_strategy": "steps"}
    plan: dict[str, Any] = {"memory": "1GiB", "rungs": ()}
    roomy, _ = train(Trainer, adapted(*LLAMA), rows, tmp_path / "a", plan, **options)
    memory = roomy.engine.plan.memory
    gradients = 8 * sum(p.numel() for p in trained(roomy.model).values())
    owners = dict(memory.owners)
    states = owners["parameters"] + owners.get("optimizer", 0) + 2 * gradients
    budget = (states + memory.predicted) // 2
    small = plan | {"memory": f"{budget // 1024}KiB"}
    ours, _ = train(Trainer, adapted(*LLAMA), rows, tmp_path / "b", small, **options)
    engine = ours.engine
    assert engine.plan.micro_batch < 8
    assert engine.last.predicted_bytes <= budget
    assert dict(engine.plan.memory.owners)["gradients"] <= 2 * gradients
    tolerances = max(error_of(trained(ours.model), trained(roomy.model)).values())
    assert tolerances < 1e-12
    again, _ = train(
        Trainer,
        adapted(*LLAMA),
        rows,
        tmp_path / "b",
        small,
        resume=str(tmp_path / "b" / "checkpoint-2"),
        **options,
    )
    assert (tmp_path / "b" / "checkpoint-2" / "adapter_model.safetensors").exists()
    got, want = trained(again.model), trained(ours.model)
    assert all(torch.equal(got[name], want[name]) for name in want)
