"""Heads in chunks of rows inside the trainers: the parameters of a training without a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_exact
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from anybatch import Plan

transformers = pytest.importorskip(
    "transformers", reason="pip install 'anybatch[transformers]' is needed for these tests"
)
pl = pytest.importorskip(
    "lightning.pytorch", reason="pip install 'anybatch[lightning]' is needed for these tests"
)
peft = pytest.importorskip("peft", reason="pip install peft is needed for these tests")

from tests.integrations.fits import fit  # noqa: E402
from tests.integrations.trainings import train  # noqa: E402

from anybatch.integrations.lightning import FullBatch  # noqa: E402
from anybatch.integrations.transformers import Trainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

V, D, L, N = 6000, 32, 24, 16
BUDGET = "24MiB"


def rows() -> list[dict[str, Tensor]]:
    """Tokens, of which some have no label."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(V, (N, L), generator=draw)
    labels = torch.where(torch.rand(N, L, generator=draw) < 0.3, -100, tokens)
    return [{"input_ids": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]


def gpt() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "n_embd": D, "n_layer": 1, "n_head": 2, "n_positions": L}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(**sizes, **drops, **ends)
    found: nn.Module = transformers.GPT2LMHeadModel(config).double()
    return found


def adapted() -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.0)
    found: nn.Module = peft.get_peft_model(gpt(), config)
    return found


def person_s(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    z = outputs["logits"][:, :-1].reshape(-1, V)
    return F.cross_entropy(z, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch


@pytest.fixture(autouse=True)
def _no_clock() -> Iterator[None]:
    """Chunks are taken at once where no step is timed."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


def trained(
    make: Callable[[], nn.Module],
    folder: Path,
    memory: str,
    loss: Any = None,
    rungs: Any = ("chunks", "offload"),
    **options: Any,
) -> tuple[nn.Module, Plan]:
    """Return a model after two steps of a Trainer, and the last plan."""
    model = make()
    trainer, _ = train(
        Trainer,
        model,
        rows(),
        folder,
        {"memory": memory, "compute_loss_func": loss, "rungs": rungs},
        per_device_train_batch_size=N,
        optim="sgd",
        **options,
    )
    return model, trainer.engine.plan


@pytest.mark.large(few=1)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (gpt, {}),
        (adapted, {}),
        (gpt, {"loss": person_s}),
        (gpt, {"activation_checkpointing": True}),
        (gpt, {"max_grad_norm": 0.01}),
    ],
)
def test_a_trainer_of_transformers(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    own, at_once = trained(make, tmp_path / "a", "4GiB", **options)
    ours, plan = trained(make, tmp_path / "b", BUDGET, **options)
    assert at_once.memory is not None
    assert plan.memory is not None
    assert at_once.memory.chunked == 0 < plan.memory.chunked
    assert plan.memory.predicted <= 24 << 20
    assert_exact(ours.state_dict(), own.state_dict())


class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
    """A module of a person, with its loss in training_step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.layers = nn.Sequential(nn.Embedding(V, D), body, nn.Linear(D, V)).double()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        z = self.layers(batch["input_ids"])
        return F.cross_entropy(z.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_may_be_forbidden_chunks(tmp_path: Path) -> None:
    _, plan = trained(gpt, tmp_path, BUDGET, rungs=["offload"])
    assert plan.memory is not None
    assert plan.memory.chunked == 0


def test_a_trainer_of_lightning() -> None:
    own, ours, full = Module(), Module(), FullBatch(memory=BUDGET)
    for model, callbacks in ((own, []), (ours, [full])):
        fit(model, *callbacks, loader=DataLoader(rows(), batch_size=N))  # type: ignore[arg-type]
    assert full.engine is not None
    assert full.engine.plan is not None
    assert full.engine.plan.memory is not None
    assert full.engine.plan.memory.chunked > 0
    assert_exact(ours.state_dict(), own.state_dict())
