"""What a case is, and which are drawn: every coupling with every hiding, and honest twins."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.mbs.adversary import backward, forward, states
from benchmarks.mbs.adversary.forms import FORMS

REGISTERED = (forward, backward, states)
HIDINGS = (
    *("none", "gate of 0", "gate of 1e-9", "tiny residual", "draws of factor 0"),
    *("writes to the input", "later rows", "later steps", "integers", "no_grad", "nested output"),
)
DTYPES = ("float64", "float32", "bfloat16")
LAYOUTS = ("contiguous", "channels_last", "transposed")
MECHANISMS = ("streaming", "two-pass", "lockstep", "budget")
SPLITS = {"one": (8, 1), "two": (10, 2), "ragged": (9, 4), "many": (12, 6)}
"""Samples of a batch and of a micro-batch; `ragged` leaves a tail of one."""

CASES, SEED = 1800, 0
TWINS = 3


@dataclass(frozen=True)
class Case:
    """One model, loss and batch, in words: `build` makes the same of it at any time.

    Attributes:
        coupling: a name of `FORMS`.
        hiding: a name of `HIDINGS`.
        dtype: of model and inputs.
        layout: the strides of the inputs.
        mechanism: streaming, a coupled loss, a BatchNorm before the coupling, or a budget.
        split: a name of `SPLITS`.
        honest: the twin that couples nothing.
        seed: of weights and batch.
        device: where it runs, no part of the name.
    """

    coupling: str
    hiding: str
    dtype: str = "float64"
    layout: str = "contiguous"
    mechanism: str = "streaming"
    split: str = "ragged"
    honest: bool = False
    seed: int = 0
    device: str = "cpu"

    @property
    def name(self) -> str:
        """All of it in one line; `parse` reads it."""
        twin = "honest" if self.honest else "coupled"
        parts = self.coupling, self.hiding, self.dtype, self.layout, self.mechanism, self.split
        return "/".join((*parts, twin, str(self.seed)))

    @property
    def samples(self) -> int:
        return SPLITS[self.split][0]

    @property
    def micro_batch(self) -> int:
        return SPLITS[self.split][1]


def parse(name: str) -> Case:
    """The case of a name."""
    coupling, hiding, dtype, layout, mechanism, split, twin, seed = name.split("/")
    words = coupling, hiding, dtype, layout, mechanism, split
    return Case(*words, honest=twin == "honest", seed=int(seed))


def draw(count: int = CASES, seed: int = SEED) -> list[Case]:
    """Every coupling with every hiding, `TWINS` twins of each, and others up to `count`.

    Fewer than there are pairs: every so many of them, so that all couplings and hidings appear.
    """
    rng = random.Random(seed)
    found = [_fitted(rng, name, hiding) for name in FORMS for hiding in HIDINGS]
    found += list(_twins(rng))
    while len(found) < count:
        honest = rng.random() < 0.2
        name = rng.choice([name for name, form in FORMS.items() if form.twin or not honest])
        found.append(_fitted(rng, name, rng.choice(HIDINGS), honest=honest))
    numbered = [replace(case, seed=1000 * seed + i) for i, case in enumerate(found)]
    return numbered if count >= len(numbered) else sorted(
        rng.sample(numbered, count), key=lambda case: case.seed
    )  # fmt: skip


def _twins(rng: random.Random) -> Iterator[Case]:
    for name, form in FORMS.items():
        if form.twin:
            for hiding in rng.sample(HIDINGS, TWINS):
                yield _fitted(rng, name, hiding, honest=True)


def _fitted(rng: random.Random, name: str, hiding: str, *, honest: bool = False) -> Case:
    """A case whose other words are drawn; what rounding decides is not drawn in bfloat16."""
    rough = FORMS[name].rough or hiding == "integers"
    dtypes, weights = (DTYPES[:2], (3, 1)) if rough else (DTYPES, (6, 3, 1))
    return Case(
        name,
        hiding,
        rng.choices(dtypes, weights)[0],
        rng.choices(LAYOUTS, (3, 1, 1))[0],
        rng.choices(MECHANISMS, (10, 4, 6, 1))[0],
        rng.choice(list(SPLITS)),
        honest,
    )
