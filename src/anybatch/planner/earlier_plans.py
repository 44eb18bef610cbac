"""Plans of earlier starts of a program in a file: the next start follows them.

The first steps of a training find the fastest size by a clock. Two starts may find another one, and
then differ in their last bits. So the plans of all steps until then are kept, in order, for each
signature. A start of the same program on the same machine follows them: it makes no dry run, looks
at no clock, and splits every batch as the first start did.

    first start    16  16  32  8  24  16 | 24  24 ...     kept:  16 16 32 8 24 16 24
    next start     16  16  32  8  24  16 | 24  24 ...

A file that is damaged or cannot be written is left alone; one line says so. No plan makes a
gradient wrong, since every split has the same one, and the first step that follows is metered.

Source: u-cuDNN, section III-D, which keeps its benchmarks so.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from anybatch.conv.convolutions import plan_file
from anybatch.conv.measure import machine
from anybatch.core.modules import Modules
from anybatch.core.plan import Plan
from anybatch.core.plan_sections import FORESEEN
from anybatch.core.status import say
from anybatch.execution.signature import RunPlan, Signature

TABLE = """
create table if not exists plans (
    program text, batch text, step integer, plan text, primary key (program, batch, step)
)
"""

LAST = -1
"""The step of the plan that all later steps have; there is none where the search had not ended."""

ERRORS = (OSError, sqlite3.Error, ValueError)
"""What a file does that is damaged, or cannot be read or written."""


class PlanFile:
    """The file of plans; it is made with the first of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ignored = False

    def plans(self, program: str, batch: str) -> dict[int, RunPlan]:
        """Return step -> plan of a program and a signature; empty where there are none."""
        if self._ignored or not self._path.exists() or not self._path.stat().st_size:
            return {}
        try:
            with closing(self._open()) as file:
                rows = file.execute(
                    "select step, plan from plans where program = ? and batch = ?", (program, batch)
                ).fetchall()
            return {step: run_plan_of(Plan.from_json(text)) for step, text in rows}
        except ERRORS as error:
            self._ignore(error)
            return {}

    def keep(self, program: str, batch: str, plans: Mapping[int, RunPlan]) -> None:
        """Keep step -> plan, for all that were there from these steps on."""
        if self._ignored:
            return
        rows = [(program, batch, step, plan_of(one).to_json()) for step, one in plans.items()]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as file, file:
                file.execute(TABLE)
                file.execute(
                    "delete from plans where program = ? and batch = ? and (step >= ? or step = ?)",
                    (program, batch, min(step for step in plans if step != LAST), LAST),
                )
                file.executemany("insert or replace into plans values (?, ?, ?, ?)", rows)
        except ERRORS as error:
            self._ignore(error)

    def _ignore(self, error: Exception) -> None:
        """Go on without the file, and say so once."""
        self._ignored = True
        say(
            f"plans of earlier starts in {self._path} are not followed, and those of this one "
            f"not kept ({error}): remove that file, or name another one (cache=)"
        )

    def forget(self) -> int:
        """Forget every plan; return how many programs had some.

        Raises:
            OSError: the file cannot be removed.
        """
        if not self._path.exists():
            return 0
        try:
            with closing(self._open()) as file:
                found = file.execute("select count(distinct program) from plans").fetchone()
        except sqlite3.Error:  # a damaged file is removed all the same
            found = (0,)
        self._path.unlink()
        return int(found[0])

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=10.0)


@dataclass
class Followed:
    """The plans of one signature: those of an earlier start, and those of this one.

    Attributes:
        earlier: step -> plan of an earlier start.
        recorded: plans of this start, in order, until they are in the file.
        steps: steps that were complete.
        closed: the plans of this start are in the file.
    """

    earlier: dict[int, RunPlan]
    recorded: list[RunPlan] = field(default_factory=list)
    steps: int = 0
    closed: bool = False

    def next(self) -> RunPlan | None:
        """Return the plan that an earlier start had for the next step; None where it had none."""
        return self.earlier.get(self.steps, self.earlier.get(LAST))

    def most(self) -> int:
        """Return the most bytes of any plan of an earlier start; 0 where it had none."""
        return max((plan.memory.predicted for plan in self.earlier.values()), default=0)

    def give_up(self) -> None:
        """Follow the earlier start no more: this one decides, and its plans replace those."""
        self.earlier.clear()


class EarlierPlans:
    """Plans of earlier starts that one training follows, and its own for later ones.

    `program` returns what they belong to besides the signature of a batch.
    """

    def __init__(self, file: PlanFile, program: Callable[[], str]) -> None:
        self._file, self._make = file, program
        self._program = ""
        self._followed: dict[Signature, Followed] = {}

    def done(self, signature: Signature, run_plan: RunPlan, *, settled: bool) -> None:
        """Record the plan of a complete step; where it is `settled`, later ones are run so."""
        followed = self.of(signature)
        follows = followed.next() is not None
        followed.steps += 1
        if follows or followed.closed:
            return
        followed.recorded.append(run_plan)
        if settled:
            for one, other in self._followed.items():
                if other.recorded:
                    self._keep(one, other, ended=one == signature)

    def _keep(self, signature: Signature, followed: Followed, *, ended: bool) -> None:
        begin = followed.steps - len(followed.recorded)
        plans = dict(enumerate(followed.recorded, begin))
        if ended:
            plans[LAST] = followed.recorded[-1]
            followed.closed = True
        followed.recorded.clear()
        self._file.keep(self._program, _batch(signature), plans)

    def of(self, signature: Signature) -> Followed:
        """Return the plans of a signature; those of an earlier start are read at the first call."""
        if signature not in self._followed:
            self._program = self._program or self._make()
            earlier = self._file.plans(self._program, _batch(signature))
            self._followed[signature] = Followed(earlier)
        return self._followed[signature]


def plan_of(run_plan: RunPlan) -> Plan:
    """Return the plan of a run, without its reasons."""
    mechanism = "lockstep" if run_plan.lanes else "two-pass" if run_plan.coupled else "streaming"
    return Plan(
        micro_batch=run_plan.micro_batch,
        mechanism=mechanism,
        accumulate="accumulator" if run_plan.accumulator else "in place",
        loss=run_plan.loss,
        exact=FORESEEN,
        reasons=(),
        memory=run_plan.memory,
        offload=run_plan.offload,
    )


def run_plan_of(plan: Plan) -> RunPlan:
    """Return how a step is run by a plan with a budget."""
    assert plan.memory is not None
    return RunPlan(
        plan.micro_batch,
        plan.accumulate == "accumulator",
        plan.memory,
        coupled=plan.mechanism == "two-pass",
        loss=plan.loss,
        lanes=plan.mechanism == "lockstep",
        offload=plan.offload,
    )


def _batch(signature: Signature) -> str:
    return hashlib.sha256(repr(signature).encode()).hexdigest()


# What plans belong to: the code and the shapes of a program, and where it runs.

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Where an object lies, which differs from start to start."""


def program(
    modules: Modules,
    functions: Iterable[Any],
    optimizer: torch.optim.Optimizer | None,
    settings: Iterable[Any],
) -> str:
    """Return a short text that is the same in every start of a program, and only there.

    `functions` are of the loss; of an optimizer its class and options count; `settings` are what
    else the plans depend on, as values that print alike in every start.
    """
    lines: list[Any] = [[ADDRESS.sub("", repr(one)) for one in settings]]
    for path, module in modules:
        held = [(name, *_tensor(t)) for name, t in module._parameters.items()]
        held += [(name, *_tensor(t)) for name, t in module._buffers.items()]
        words = ADDRESS.sub("", module.extra_repr())
        lines.append((path, _name(type(module)), code_of(module.forward), words, held))
    lines += [(_name(type(one)), code_of(one)) for one in functions]
    if optimizer is not None:
        options = [
            sorted((k, v) for k, v in group.items() if isinstance(v, bool) or v is None)
            for group in optimizer.param_groups
        ]
        lines.append((_name(type(optimizer)), options, len(optimizer.state) > 0))
    return hashlib.sha256(json.dumps(lines, default=str).encode()).hexdigest()


def surroundings(device: str) -> tuple[Any, ...]:
    """Return the settings, versions and machine on which plans for a type of device depend."""
    try:
        version = metadata.version("anybatch")
    except metadata.PackageNotFoundError:  # it is not installed, but imported from its folder
        version = ""
    return (
        machine(device),
        platform.python_version(),
        version,
        torch.get_default_dtype(),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.are_deterministic_algorithms_enabled(),
        sorted((k, v) for k, v in os.environ.items() if k.startswith("MALLOC_")),
    )


def _tensor(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    if tensor is None:
        return (None,)
    lazy = torch.nn.parameter.is_lazy(tensor)
    shape = None if lazy else list(tensor.shape)
    return shape, str(tensor.dtype), tensor.device.type, tensor.requires_grad


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def code_of(function: Any) -> str:
    """Return a text of a function's code; of one without, its name."""
    while isinstance(function, functools.partial):
        function = function.func
    cls = type(function)
    called = getattr(function, "forward", None) or getattr(cls, "__call__", None)  # noqa: B004
    found = getattr(function, "__code__", None) or getattr(called, "__code__", None)
    if not isinstance(found, CodeType):
        return str(getattr(function, "__qualname__", type(function).__qualname__))
    return hashlib.sha256(repr(_code(found)).encode()).hexdigest()


def _code(code: CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_names, tuple(map(_constant, code.co_consts))


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, frozenset):  # its order is another one in every start
        return sorted(map(repr, value))
    return ADDRESS.sub("", repr(value))


def forget_plans() -> int:
    """Forget the plans of earlier starts; the next start of a program plans anew.

    Returns:
        How many programs had some in your file.

    Raises:
        OSError: the file cannot be removed.

    Example:
        >>> anybatch.planning.forget_plans()
        0
    """
    path = plan_file()
    return 0 if path is None else PlanFile(path).forget()
