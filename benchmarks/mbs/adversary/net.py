"""A network with one place where samples couple, the ways to hide it, and its loss."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.mbs.adversary.cases import Case
from benchmarks.mbs.adversary.forms import FORMS, GLOBAL, Place, drawn
from benchmarks.mbs.adversary.states import fill_cache

WIDTH, FEATURES, CLASSES, CODES = 8, 6, 3, 5
CHANNELS, SIDE = 3, 2
MARK = 1.5
"""Rows whose last feature is more than this are the later ones."""

TINY = {"float64": 1e-7, "float32": 1e-3, "bfloat16": 0.03}
"""Factor of a tiny residual: far more than the dtype rounds."""

STEPS = 3


class Hidden(nn.Module):
    """Rows and what a place makes of them, mixed so that the coupling is hard to see."""

    def __init__(self, case: Case, width: int) -> None:
        super().__init__()
        self.hiding, self.dtype, self.branches = case.hiding, case.dtype, not case.honest
        self.branches &= case.seed % 2 == 0  # a branch on values is itself no honest thing
        self.place = Place(case.coupling, width, honest=case.honest)
        self.in_loss = FORMS[case.coupling].in_loss
        self.gate: Any = None
        if case.hiding.startswith("gate"):
            start = 0.0 if case.hiding == "gate of 0" else 1e-9
            self.gate = start if self.in_loss else nn.Parameter(torch.tensor(start))
        if case.hiding == "integers":
            self.table = nn.Parameter(
                torch.rand(CODES, width) - 0.5, requires_grad=not self.in_loss
            )

    def forward(self, rows: Tensor, later: Tensor) -> Any:
        """[n, d], [n, 1] -> [n, d]."""
        hiding = self.hiding
        if hiding == "gate of 0" or hiding == "gate of 1e-9":
            return rows + self.gate * self.place(rows)
        if hiding == "tiny residual":
            return rows + TINY[self.dtype] * self.place(rows)
        if hiding == "draws of factor 0":
            rows = rows + 0 * drawn(rows)
        if hiding == "later rows":
            if self.branches and not bool(later.any()):
                return rows
            return rows + later * self.place(rows * later)
        if hiding == "later steps" and self.place.phase < 1:
            return rows
        if hiding == "integers":
            codes = (self.place(rows).detach() * 8).round().long() % CODES
            return rows + self.table[codes, torch.arange(rows.shape[1], device=rows.device)]
        if hiding == "no_grad":
            with torch.no_grad():
                found = self.place(rows)
            return rows + found
        return 0.5 * rows + self.place(rows)


class Net(nn.Module):
    """Stem, perhaps a BatchNorm, the place (or an honest stash for the loss), head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        images = case.layout == "channels_last"
        self.stem = nn.Conv2d(CHANNELS, 2, 3, padding=1) if images else nn.Linear(FEATURES, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if case.mechanism == "lockstep" else nn.Identity()
        in_loss = FORMS[case.coupling].in_loss
        self.middle = None if in_loss else Hidden(case, WIDTH)
        self.stash = Place(case.coupling, WIDTH, honest=True) if in_loss else None
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        """[n, ...] -> [n, classes], or a nest of two of them."""
        if self.case.hiding == "writes to the input":
            x.mul_(1.0)
        later = (x.flatten(1)[:, -1:] > MARK).to(x.dtype)
        rows = self.norm(self.stem(x).flatten(1).tanh())
        plain = self.head(rows) if self.case.hiding == "nested output" else None
        if self.middle is not None:
            rows = self.middle(rows, later)
        if self.stash is not None and FORMS[self.case.coupling].group == "left for the loss":
            fill_cache(self.stash, rows)
        out = self.head(rows)
        return out if plain is None else {"plain": plain, "deep": [{"more": (out, 1.0)}]}


class Objective:
    """The loss: cross-entropy of the outputs, of what a place in the loss makes of them."""

    def __init__(self, case: Case, net: Net, dtype: torch.dtype) -> None:
        self.case = case
        self.middle: Hidden | None = None
        if FORMS[case.coupling].in_loss:
            assert net.stash is not None
            self.middle = Hidden(case, CLASSES).to(case.device, dtype)
            self.middle.place.link.append(net.stash)

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        """[n, classes], [n] -> the mean."""
        nested = isinstance(outputs, dict)
        out = outputs["deep"][0]["more"][0] if nested else outputs
        if self.middle is not None:
            later = (targets == CLASSES - 1).to(out.dtype)[:, None]
            out = self.middle(out, later)
        if self.case.mechanism == "two-pass":
            out = out - 0.5 * out.mean(0)
        loss = F.cross_entropy(out, targets)
        return loss + F.cross_entropy(outputs["plain"], targets) if nested else loss


@dataclass
class Problem:
    """A network, its loss, and the batch of every step."""

    net: Net
    objective: Objective
    batches: list[tuple[Tensor, Tensor]]

    def begin(self, step: int) -> None:
        """What the training loop sets before a step."""
        middle = self.net.middle or self.objective.middle
        assert middle is not None
        middle.place.phase = step
        if isinstance(middle.gate, float) and step:
            middle.gate = 0.5


def build(case: Case, *, wide: bool = False) -> Problem:
    """The same problem at any time, in float64 where it is to be wide; the generator is seeded."""
    GLOBAL.clear()
    torch.manual_seed(case.seed)
    net = Net(case)
    with torch.no_grad():  # a stem of some size, so that places have something to do
        net.stem.weight.mul_(2)
    dtype = torch.float64 if wide else getattr(torch, case.dtype)
    net.to(case.device, dtype)
    objective = Objective(case, net, dtype)
    return Problem(net, objective, [_batch(case, step, dtype) for step in range(STEPS)])


def _batch(case: Case, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of eighths: they are the same in every dtype. The later third is marked."""
    rng, n = random.Random(f"{case.seed} {step}"), case.samples
    shape = (CHANNELS, SIDE, SIDE) if case.layout == "channels_last" else (FEATURES,)
    count = n * int(torch.tensor(shape).prod())
    x = torch.tensor([rng.randint(-8, 8) / 8 for _ in range(count)], dtype=dtype).view(n, *shape)
    y = torch.tensor([rng.randrange(CLASSES) for _ in range(n)])
    if case.hiding == "later rows":
        late = torch.arange(n) >= n - n // 3
        x[late, ..., -1] = 2.0
        y = torch.where(late, CLASSES - 1, y.clamp(max=CLASSES - 2))
    if case.layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif case.layout == "transposed":
        x = x.T.contiguous().T
    return x.to(case.device), y.to(case.device)
