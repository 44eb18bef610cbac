"""Options `plan --gpus | --speedup | --deadline`: seconds of steps, and gain from more GPUs.

A few steps of the real loop are measured and undone. The line to run is the command that was given,
under torchrun.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import typer

from anybatch import Plan
from anybatch.cli.build import RunParts
from anybatch.cli.faults import SettingsError, as_setting
from anybatch.cli.profiled import loader_of, moving, split_of
from anybatch.cli.settings import AUTO, Settings
from anybatch.planning import Question, goal_of
from anybatch.units import parse_bandwidth, parse_seconds

ONLY_HERE = {
    *("gpus", "speedup", "deadline", "network", "servers", "measure", "timeline"),
    *("convolutions", "workspace_total", "cache", "json", "html"),
}
"""Options of `plan` that `train` does not have."""

STEPS = 20
"""Steps of a loop that are measured at most."""


@dataclass(frozen=True)
class Wanted:
    """Request about more GPUs: its deadline in seconds, the rest as in the options."""

    gpus: int | None
    speedup: float | None
    deadline: float | None
    network: str | None
    servers: int | str | None

    @classmethod
    def of(cls, options: SimpleNamespace) -> Wanted:
        """Return the request in the options of the command.

        Raises:
            SettingsError: they say nothing, or too much.
        """
        gpus, speedup, deadline = options.gpus, options.speedup, options.deadline
        network, servers = options.network, options.servers
        with as_setting():
            seconds = None if deadline is None else parse_seconds(deadline)
            if network is not None:
                parse_bandwidth(network)
            count = int(servers) if servers is not None and servers.isdecimal() else servers
            found = cls(gpus, speedup, seconds, network, count)
            goal_of(gpus, speedup, seconds, loader=[None], network=network, servers=count)
        return found

    @property
    def anything(self) -> bool:
        """Whether anything was requested."""
        requested = self.gpus, self.speedup, self.deadline, self.network, self.servers
        return any(one is not None for one in requested)

    def refuse(self, states: str | None) -> None:
        """Refuse a goal that cannot be answered.

        Raises:
            SettingsError: the optimizer's state is to wait elsewhere in any case.
        """
        if self.anything and states not in (None, AUTO):
            raise SettingsError(
                "the gain by more GPUs follows from full steps, and they are not measured today "
                f"with offloaded optimizer state; got states {states}. Leave it out."
            )

    def measured(
        self,
        question: Question,
        found: Plan,
        settings: Settings,
        parts: RunParts,
        optimizer: torch.optim.Optimizer,
    ) -> Plan:
        """Return the plan with its pace and the forecast for more GPUs; the steps are undone."""
        loader, split = loader_of(settings, parts), split_of(skip=settings.skip_corrupt)
        with moving("profiling", STEPS) as move:
            steps = question.steps_of(
                *(found, optimizer, loader), split=split, progress=lambda done, _all: move(done)
            )
        if not self.anything:
            return question.with_steps(found, steps, loader)
        goal = goal_of(
            *(self.gpus, self.speedup, self.deadline),
            epochs=parts.recipe.epochs,
            loader=loader,
            network=self.network,
            servers=self.servers,
        )
        with as_setting():
            return question.with_steps(found, steps, loader, goal, self.network)

    def lines(self, found: Plan, parts: RunParts, context: typer.Context) -> list[str]:
        """Return the duration of all epochs, and the command that runs them on several GPUs."""
        lines, pace, epochs = list[str](), found.pace, parts.recipe.epochs
        if pace is not None and pace.epoch is not None:
            words = f"{pace.in_words(epochs * pace.epoch)}; tests between them are not counted"
            lines.append(f"  {f'{epochs} epochs':<12} {words}")
        gpus = None if found.scale is None else found.scale.gpus
        if gpus is not None and gpus > 1:
            lines.append(f"  run          {torchrun(gpus, context)}")
        return lines


def torchrun(gpus: int, context: typer.Context) -> str:
    """Return the line that trains with the options of a `plan` on several GPUs of one machine."""
    words = ["torchrun", f"--nproc-per-node={gpus}", "-m", "anybatch", "train"]
    for option in context.command.params:
        name, value = option.name or "", context.params.get(option.name or "")
        source = getattr(context.get_parameter_source(name), "name", "")
        if source != "COMMANDLINE" or name in ONLY_HERE:
            continue
        if isinstance(value, bool):
            words += [option.opts[0] if value else option.secondary_opts[0]]
        else:
            words += [option.opts[0], str(value)]
    return shlex.join(words)
