"""The loops that are predicted and run: what one GPU takes for each part."""

from dataclasses import dataclass
from typing import Any

from anybatch.tools import gpus as lemma
from anybatch.tools.gpus import Affine, GradientSum, Loop, NetworkLink, Work
from benchmarks.guide.gpus.ranks import Job

GPUS = (1, 2, 4, 8)
SAMPLES = 256
COMPUTE = Affine(0.008, 0.0015)
"""Seconds of the emulated accelerator: some are fixed, so a small share is computed less well."""
UPDATE = 0.004
SMALL, LARGE = 512 << 10, 16 << 20
"""Bytes of gradients."""
CALIBRATED = (2 << 20, 8 << 20, 32 << 20)
"""Bytes whose sums are timed before."""


@dataclass(frozen=True)
class Case:
    """A loop."""

    name: str
    serial: float = 0.0
    sharded: float = 0.0
    hidden: float = 0.0
    gradients: int = SMALL

    def job(self, gpus: int) -> Job:
        """What a rank does."""
        compute = COMPUTE.seconds(-(-SAMPLES // gpus))
        sharded = self.sharded / gpus
        parts = (compute, self.serial, sharded, self.hidden, UPDATE, self.gradients)
        return Job(self.name, *parts)

    def loop(self, link: NetworkLink) -> Loop:
        """What the refined model is given."""
        work, hidden = Work(self.serial, self.sharded), Work(self.hidden)
        return Loop(SAMPLES, COMPUTE, work, hidden, UPDATE, GradientSum(self.gradients, link))


CASES = (
    Case("serial loading, small gradients", serial=0.04),
    Case("serial loading, large gradients", serial=0.04, gradients=LARGE),
    Case("sharded loading, small gradients", sharded=0.08),
    Case("sharded loading, large gradients", sharded=0.08, gradients=LARGE),
    Case("hidden serial loading, small gradients", hidden=0.15),
)


def predicted(case: Case, links: dict[int, NetworkLink]) -> dict[str, Any]:
    """Seconds of a step by GPUs, by the lemma and by the refined model.

    Args:
        case: of the loop.
        links: GPUs -> what each of so many sends over; one GPU sends nothing.
    """
    loop = case.loop(links[GPUS[-1]])
    one = loop.seconds(1)
    return {
        "overhead": loop.overhead,
        "lemma": {str(g): one / lemma.speedup(loop.overhead, g) for g in GPUS},
        "refined": {str(g): case.loop(links.get(g, links[GPUS[-1]])).seconds(g) for g in GPUS},
    }
