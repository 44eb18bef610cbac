"""Convolutions of an engine's steps: the chooser that computes them, and when it chooses.

Within a budget nothing is measured inside a step. Kernels are chosen before it, for the sizes that
its micro-batches will have; and those that only the step itself has shown, before the next one.

    foresee ── recorded on fakes ──> chosen ──> step (what is new is torch's, and noted) ──> chosen
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, astuple

from anybatch.conv.chooser import Chooser, Chosen, Convolutions
from anybatch.conv.intercept import inside, intercepted, retain
from anybatch.conv.network import Key, keys_of
from anybatch.core.divisions import Division, Divisions


class Engaged:
    """Convolutions of an engine, with its own chooser or one that the user has entered.

    Args:
        device: type of device.
        own: the engine's own; None (default) is the one that the user has entered, if any.
    """

    def __init__(self, device: str, own: Chooser | None = None) -> None:
        self._device, self._own = device, own
        if own is not None:
            retain(device)

    @property
    def chooser(self) -> Chooser | None:
        """Return the active chooser; None where torch computes convolutions."""
        found = self._own or inside(self._device)
        return found if isinstance(found, Chooser) else None

    @property
    def yields(self) -> Chooser | None:
        """Return the engine's own chooser if its workspace may be reduced; else None."""
        own = self._own
        return own if own is not None and not own.found.shared and own.measures else None

    @contextmanager
    def step(self, *, waits: bool) -> Iterator[None]:
        """Compute the convolutions of a step in the body.

        Args:
            waits: it has a budget, so nothing is measured inside.
        """
        chooser = self.chooser
        if chooser is None:
            yield
            return
        chooser.choose()
        own = nullcontext() if self._own is None else intercepted(self._device, self._own)
        with own, chooser.waiting() if waits else nullcontext():
            yield

    @property
    def count(self) -> int:
        """How many kernels have been chosen so far."""
        return 0 if self.chooser is None else len(self.chooser.found.chosen)

    def record(self, keys: Iterable[Key] | None = None) -> Divisions | None:
        """Return how kernels are divided; None where convolutions are torch's.

        Args:
            keys: which. Default None, or none: all that were chosen.
        """
        chooser = self.chooser
        if chooser is None or chooser.found.shared:
            return None
        every = chooser.found.chosen
        wanted = set(keys or ())
        chosen = {key: one for key, one in every.items() if not wanted or key in wanted}
        kernels = tuple(_division(key, one) for key, one in chosen.items())
        space = chooser.found.workspace
        requested = chooser.requested if chooser.requested > space else 0
        return Divisions(space, chooser.found.policy, chooser.used(chosen), kernels, requested)


def obeying(divisions: Divisions) -> Chooser:
    """Return a chooser that computes kernels as a plan specifies, and the others with torch."""
    found = Convolutions(divisions.workspace, divisions.policy)
    for key, one in zip(keys_of(divisions), divisions.kernels, strict=True):
        found.chosen[key] = Chosen((one.configuration,), one.seconds)
    return Chooser(found, None, 0.0)


def _division(key: Key, chosen: Chosen) -> Division:
    problem, size = key
    (configuration,) = chosen.configurations
    parts = tuple(astuple(part) for part in configuration.parts)
    return Division(tuple(asdict(problem).items()), size, parts, chosen.seconds)
