"""The finders by name, and the package that each of them needs."""

from importlib.util import find_spec

from benchmarks.mbs.choice.finders import Finder, accelerate_decorator, halving, largest_that_fits
from benchmarks.mbs.choice.lightning_finder import LIGHTNING

FINDERS: dict[str, Finder] = {
    "largest_that_fits": largest_that_fits,
    **LIGHTNING,
    "accelerate_decorator": accelerate_decorator,
    "halving": halving,
}
PEERS = {**dict.fromkeys(LIGHTNING, "lightning"), "accelerate_decorator": "accelerate"}


def missing() -> list[str]:
    """The finders whose package is not installed here."""
    return [name for name, package in PEERS.items() if find_spec(package) is None]
