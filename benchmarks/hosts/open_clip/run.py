"""open_clip's own training loop with `accum_freq`, and an engine, beside the undivided batch.

`open_clip_train.train.train_one_epoch` computes features without a graph, then each part again with
one, and the loss of all in each. So the features have the gradient of the undivided batch. But each
of these losses also holds the scale and the bias, whose gradients are added once for each part.
Here the loop itself runs, on a batch in equal parts and in others; its last gradients are read from
the model. Everything is in float64, with the script's default options; the bound is Law 1's
(docs/why.md).

    make hosts    the package, in an environment of its own; then this
"""

import copy
import warnings
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typer
from torch import Tensor, nn

from anybatch import Engine
from anybatch.tools.exactness import error_of, tolerance
from benchmarks.environment import environment
from benchmarks.results import console, write

HERE = Path(__file__).parent
SEED, ROWS = 0, 8
PARTS = {"4 and 4": (4, 4), "3, 3 and 2": (3, 3, 2), "8 times 1": (1,) * 8}
"""Samples of the parts of a batch; the engine's micro-batches have as many as the first."""

MODELS = ("CLIP", "CustomTextCLIP")
LOSSES = ("ClipLoss", "SigLipLoss")
OWN = ("logit_scale", "logit_bias")
"""Parameters that each loss of a part holds."""

Gradients = dict[str, Tensor]


def clip(name: str, *, biased: bool, dropped: float = 0.0) -> nn.Module:
    """A small model, with a bias as in SigLIP if asked; a share of its patches may be dropped."""
    import open_clip  # type: ignore[import-not-found]

    blocks = {"layers": 2, "width": 32}
    vision = blocks | {"image_size": 32, "head_width": 16, "patch_size": 16}
    text = blocks | {"context_length": 8, "vocab_size": 50, "heads": 2}
    options: dict[str, Any] = {
        "vision_cfg": {"patch_dropout": dropped} | vision, "text_cfg": text, "output_dict": True,
    }  # fmt: skip
    options |= {"init_logit_scale": 2.3, "init_logit_bias": -10.0} if biased else {}
    torch.manual_seed(SEED)
    made: nn.Module = getattr(open_clip, name)(16, **options)
    return made.double()


def loss_of(name: str) -> nn.Module:
    """A loss of open_clip's."""
    from open_clip import loss

    made: nn.Module = getattr(loss, name)()
    return made


def batch() -> tuple[Tensor, Tensor]:
    """Images and tokens."""
    torch.manual_seed(SEED + 1)
    return torch.randn(ROWS, 3, 32, 32, dtype=torch.float64), torch.randint(1, 50, (ROWS, 8))


def gradients(model: nn.Module) -> Gradients:
    """Copies of the gradients that are there."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def undivided(model: nn.Module, loss: nn.Module, order: Tensor | None = None) -> Gradients:
    """The gradients of the batch as it is, or with its rows in another order."""
    images, texts = batch()
    if order is not None:
        images, texts = images[order], texts[order]
    model = copy.deepcopy(model)
    loss(**model(images, texts)).backward()
    return gradients(model)


def with_engine(model: nn.Module, loss: nn.Module, size: int) -> tuple[Gradients, Engine]:
    """An engine's gradients; its loss takes the mapping that the model returns."""
    model = copy.deepcopy(model)
    engine = Engine(model, lambda found: loss(**found), micro_batch=size)
    engine.backward(batch())
    return gradients(model), engine


class Parts:
    """A batch as the script reads it: so many batches of a loader."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        self.parts = parts
        self.num_batches, self.num_samples = len(parts), sum(parts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*(torch.split(rows, list(self.parts)) for rows in batch()), strict=True)


def with_script(model: nn.Module, loss: nn.Module, parts: tuple[int, ...]) -> Gradients:
    """The gradients of `train_one_epoch`, which accumulates over all parts, at a rate of 0."""
    from open_clip_train.train import train_one_epoch  # type: ignore[import-not-found]

    model = copy.deepcopy(model)
    args = Namespace(
        device="cpu", precision="fp32", distill=False, accum_freq=len(parts), skip_scheduler=True,
        horovod=False, grad_clip_norm=None, rank=0, local_rank=0, log_local=False, wandb=False,
        log_every_n_steps=1, world_size=1, batch_size=parts[0],
    )  # fmt: skip
    train = SimpleNamespace(dataloader=Parts(parts), set_epoch=lambda _: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train_one_epoch(model, {"train": train}, loss, 0, optimizer, None, None, None, args)
    return gradients(model)


def errors(got: Gradients, want: Gradients) -> dict[str, float]:
    """The errors of the scale and of the bias, and the worst of all others."""
    found = error_of(got, want)
    rest = {"encoders": max(error for name, error in found.items() if name not in OWN)}
    return {name: float(f"{found[name]:.2e}") for name in OWN if name in found} | rest


def row_of(name: str, loss_name: str) -> dict[str, Any]:
    """One model and one loss, in all parts."""
    model, loss = clip(name, biased=loss_name == "SigLipLoss"), loss_of(loss_name)
    want = undivided(model, loss)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(SEED))
    bound = tolerance(error_of(undivided(model, loss, order), want))
    row: dict[str, Any] = {"bound": bound, "parts": {}}
    for split, parts in PARTS.items():
        got, engine = with_engine(model, loss, parts[0])
        script = with_script(model, loss, parts)
        assert engine.plan is not None
        row["parts"][split] = {
            "engine": errors(got, want),
            "script": errors(script, want),
            "factor": {n: round(float(script[n] / want[n]), 6) for n in OWN if n in want},
            "mechanism": str(engine.plan.mechanism),
            "exact": str(engine.plan.exact),
        }
    return row


def main(*, quick: bool = False, out: Path = HERE) -> None:
    """Run every model with every loss, and write results.json."""
    if find_spec("open_clip") is None:
        raise SystemExit("install open_clip_torch beside this torch: make hosts")
    torch.set_num_threads(1)
    table: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODELS[:1] if quick else MODELS:
            for loss_name in LOSSES:
                table[f"{name}, {loss_name}"] = row_of(name, loss_name)
                console.print(name, loss_name, table[f"{name}, {loss_name}"], highlight=False)
    results = {"seed": SEED, "environment": environment(), "rows": ROWS, "models": table}
    write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
