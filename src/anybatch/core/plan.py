"""Plan of a step as data, with its reasons: decided by a pure function, printed, saved, loaded.

The executor obeys it and decides nothing. Facts go in, a frozen `Plan` comes out; neither needs
torch, so a decision can be tested, stored with a run, and explained like a database's query plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import Any

from anybatch.core.absent import AbsentDevice
from anybatch.core.plan_sections import (
    FORESEEN,
    UNDIVIDED,
    Candidate,
    Divisions,
    Evidence,
    Memory,
    Pace,
    Scale,
    check_count,
    explain,
    memory_of,
    show_floor,
    verdicts,
)
from anybatch.core.units import show_bytes

TRIED = "the budget was shared with convolutions in some ways"
"""How the reason begins that a plan has which was found so."""


@dataclass(frozen=True)
class States:
    """Where an optimizer's state waits between its steps.

    Attributes:
        store: "host" or "file".
        folder: of the file; None is the system's folder for temporary files.
        resident_bytes: bytes of it that are in memory at a time while the optimizer steps; with
            `model` of parameters, gradients and state together, all the time.
        model: parameters and gradients are offloaded, too, when no kernel reads them.
    """

    store: str
    folder: str | None
    resident_bytes: int
    model: bool = False

    def __str__(self) -> str:
        where = "memory of the host" if self.store == "host" else "a file"
        where += f" in {self.folder}" if self.folder else ""
        resident_bytes = show_bytes(self.resident_bytes)
        if self.model:
            where += ", with parameters and gradients"
            return f"in {where}; at most {resident_bytes} of all in memory"
        return f"in {where}; at most {resident_bytes} in memory during a step"


@dataclass(frozen=True)
class OffloadPlan:
    """Offload section of a plan: the saved tensors to offload; in bytes but for the seconds.

    Attributes:
        store: "host" or "file".
        folder: of the file; None is the system's folder for temporary files.
        capacity: new tensors that fit in the first micro-batch of a step, and in any other.
        saved: saved tensors of a micro-batch that could be offloaded.
        sent: tensors that are offloaded in a step, and return.
        most: capacity that the store needs: all saved tensors of a micro-batch.
        stall: seconds in which a step is predicted to wait for copies; None where not predicted.
        remade: saved tensors that a step recomputes instead of offloading them.
        segment_extra: bytes beyond the limit that lanes may hold in each segment, since later
            gradients are not there yet, or its kernels make less; empty where not recorded.
        segment_kernel: the largest output of a kernel of a lane in each segment; empty if unknown.
    """

    store: str
    folder: str | None
    capacity: tuple[int, int]
    saved: int
    sent: int
    most: int
    stall: float | None = None
    remade: int = 0
    segment_extra: tuple[int, ...] = ()
    segment_kernel: tuple[int, ...] = ()

    @property
    def where(self) -> str:
        """Return the store, or the folder of its file."""
        return self.folder or self.store

    def explain(self) -> list[str]:
        """Return the plan's lines on offloading."""
        place = {"host": "page-locked memory of the host", "file": "a file without a name"}
        inside = f" in {self.folder or 'the system folder'}" if self.store == "file" else ""
        wait = "not known" if self.stall is None else f"{self.stall:.3g} s a step, predicted"
        again = f"    instead          {show_bytes(self.remade)} are recomputed in a step"
        return [
            f"  offload      {show_bytes(self.sent)} are offloaded in a step and return; a "
            f"micro-batch saves {show_bytes(self.saved)}",
            f"    to               {place[self.store]}{inside}",
            *([again] if self.remade else []),
            f"    stall            {wait}",
        ]


@dataclass
class Facts:
    """Facts on which a plan is decided.

    Attributes:
        micro_batch: samples in a micro-batch.
        divided: the batch is larger than a micro-batch.
        loss: the loss in words.
        coupled: the loss needs all outputs at once.
        late: a denominator is known only at the end of the batch.
        half: names of dtypes of half-precision parameters.
        before: gradients were there when the step began.
        local: BatchNorm layers that normalise each micro-batch by itself.
        separate_sums: every sum of gradients is separate from ``.grad``.
        failed: samples in a micro-batch for which memory ran out; 0 where it never did.
        lanes: micro-batches wait for each other in BatchNorm.
        segments: how the device's memory is segmented, in words; nothing where it does not apply.
        looked: the step in which samples were traced through the model; 0 where none was run.
        doubts: why it is not shown that samples do not meet; nothing where it is.
        trying: the search that the step is a part of, in words; nothing where it has ended.
        draws: micro-batches have made random draws of their own.
    """

    micro_batch: int
    divided: bool
    loss: str
    coupled: bool
    late: bool
    half: tuple[str, ...]
    before: bool
    local: int
    separate_sums: bool = False
    failed: int = 0
    lanes: bool = False
    segments: str = ""
    looked: int = 0
    doubts: tuple[str, ...] = ()
    trying: str = ""
    draws: bool = False


@dataclass(frozen=True)
class Plan:
    """Decisions for the training of a mini-batch, with their reasons.

    Attributes:
        micro_batch: samples in a micro-batch; the last one of a batch may be smaller.
        mechanism: "streaming" (one pass), "two-pass", "lockstep" (micro-batches wait for
            each other at barriers), or "undivided".
        accumulate: "in place" in ``.grad``, or "accumulator" (one more set of gradients).
        loss: the loss in words.
        exact: whether the gradient is that of the undivided batch, and the evidence; true if shown.
        reasons: reasons of the plan, a sentence each.
        memory: the budget and the forecast; None where no budget was requested.
        states: store of the optimizer's state between steps; None where it is resident.
        offload: which saved tensors are offloaded; None where all are resident.
        convolutions: how they are computed; None where all are torch's own.
        pace: seconds of the training; None where no steps of a loop were measured.
        scale: the effect of more GPUs; None where that was not requested.
        device: the device of the plan if it was absent; None where it was there.
    """

    micro_batch: int
    mechanism: str
    accumulate: str
    loss: str
    exact: Evidence
    reasons: tuple[str, ...]
    memory: Memory | None = None
    states: States | None = None
    offload: OffloadPlan | None = None
    convolutions: Divisions | None = None
    pace: Pace | None = None
    scale: Scale | None = None
    device: AbsentDevice | None = None

    def __post_init__(self) -> None:
        # Any other word would run as streaming (test_a_plan_of_another_mechanism_is_refused).
        if self.mechanism not in _WHY:
            raise ValueError(f"mechanism must be one of {[*_WHY]}, and it is {self.mechanism!r}")

    def _rows(self) -> dict[str, str]:
        rows = {
            "micro-batch": f"{self.micro_batch} samples",
            "mechanism": self.mechanism,
            "gradients": self.accumulate,
            "loss": self.loss,
            "exact": str(self.exact),
        }
        if self.memory is not None and self.memory.chunked:
            size = show_bytes(self.memory.chunked)
            rows["chunks"] = f"wide linear maps and their losses, {size} of results at a time"
        if self.memory is not None and self.memory.tile:
            rows["tiles"] = f"modules of single tokens, {self.memory.tile} tokens at a time"
        rows |= {} if self.states is None else {"states": str(self.states)}
        return rows | (
            {} if self.convolutions is None else {"convolutions": str(self.convolutions)}
        )

    def __str__(self) -> str:
        lines = [] if self.device is None else self.device.lines()
        lines += [f"  {name:<12} {value}" for name, value in self._rows().items()]
        if self.memory is not None:
            lines += explain(self.memory, self.micro_batch, offloaded=self.offload is not None)
        if self.offload is not None:
            lines += self.offload.explain()
        if self.pace is not None:
            lines.append(f"  {'time':<12} {self.pace}")
        if self.scale is not None:
            lines += self.scale.explain()
        return "\n".join(["plan", *lines, *(f"  because      {r}" for r in self.reasons)])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the HTML card for a notebook: the memory bar, the decisions, and the reasons."""
        rows, memory, offloaded = self._rows(), self.memory, self.offload is not None
        if self.pace is not None:
            rows["time"] = str(self.pace)
        if memory is not None:
            rows["memory"] = f"budget {memory.source}; predicted by {memory.how}"
            rows |= {"floor": floor} if (floor := show_floor(memory)) else {}
        more = [] if self.device is None else self.device.lines()
        more += [] if self.offload is None else self.offload.explain()
        more += [] if self.scale is None else self.scale.explain()
        return card(
            "plan",
            "" if memory is None else memory_bar(memory),
            table(rows),
            "" if memory is None else considered(memory, self.micro_batch, offloaded=offloaded),
            because([*(" ".join(line.split()) for line in more), *self.reasons]),
        )

    def verdicts(self) -> list[tuple[Candidate, str]]:
        """Return every micro-batch that was considered, and why it was chosen or lost, in words.

        Returns:
            Pairs, by samples; none where nothing was foreseen.
        """
        if self.memory is None:
            return []
        offloaded = self.offload is not None
        return verdicts(self.memory, self.micro_batch, offloaded=offloaded)

    def with_trials_of(self, before: Plan) -> Plan:
        """Return this plan with the reason of an earlier one that lists its trials.

        A budget is shared with convolutions by running steps; a plan made anew runs none of them.

        Args:
            before: an earlier plan of the same training.
        """
        tried = tuple(reason for reason in before.reasons if reason.startswith(TRIED))
        return replace(self, reasons=(*self.reasons, *tried))

    def to_json(self) -> str:
        """Return the plan as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            ValueError: `text` is not a plan; the message lists the names that must be in it.
        """
        fields = tuple(cls.__dataclass_fields__)
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a plan must be JSON, and it is not: {error}") from error
        without = {
            "memory",
            "states",
            "offload",
            "convolutions",
            "pace",
            "device",
        }  # plans of before there were any
        if not isinstance(found, dict) or set(found) | without != set(fields):
            came = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise ValueError(f"a plan must hold {sorted(fields)}, and it holds {came}")
        try:
            check_count("micro_batch", found["micro_batch"])
            section = found.get("memory")
            states, left = found.get("states"), found.get("offload")
            divided, pace = found.get("convolutions"), found.get("pace")
            scale, device = found.get("scale"), found.get("device")
            memory = None if section is None else memory_of(section, offloaded=left is not None)
            more = {
                "exact": Evidence.from_json(found["exact"]),
                "reasons": tuple(found["reasons"]),
                "memory": memory,
                "states": None if states is None else States(**states),
                "offload": None if left is None else _offload_plan(left),
                "convolutions": None if divided is None else Divisions.from_json(divided),
                "scale": None if scale is None else Scale.from_json(scale),
                "device": None if device is None else AbsentDevice.from_json(device),
                "pace": None
                if pace is None
                else Pace(**{**pace, "interval": tuple(pace["interval"])}),
            }
            return cls(**{**found, **more})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"a plan must hold what to_json writes, and {error}") from error


def _offload_plan(found: Mapping[str, Any]) -> OffloadPlan:
    by_segment = {
        name: tuple(map(int, found.get(name, ()))) for name in ("segment_extra", "segment_kernel")
    }
    return OffloadPlan(**{**found, "capacity": _pair(found["capacity"]), **by_segment})


def _pair(found: Any) -> tuple[int, int]:
    first, other = found
    return int(first), int(other)


OWN_DRAWS = (
    "each micro-batch makes random draws of its own, in order, which are not those of the "
    'undivided batch: rng="batch" makes those'
)


def decide(facts: Facts, memory: Memory | None = None, offload: OffloadPlan | None = None) -> Plan:
    """Return the plan for `facts`, a memory section and an offload section."""
    mechanism = "lockstep" if facts.lanes else "two-pass" if facts.coupled else "streaming"
    mechanism = mechanism if facts.divided else "undivided"
    waits = mechanism == "lockstep"
    draws = [OWN_DRAWS] * facts.draws
    reasons = [_WHY[mechanism], *_of_offload(memory, offload, lanes=waits), *draws]
    if facts.trying:
        reasons.append(facts.trying)
    if facts.late:
        reasons.append("samples are loaded on the way: the denominator is made good at the end")
    if facts.half and facts.divided:
        reasons.append(f"{', '.join(facts.half)} gradients are summed in float32 and cast once")
    if facts.separate_sums:
        reasons.append("out of memory costs one micro-batch, not the step")
    if memory is not None and facts.segments:
        reasons.append(facts.segments)
    if facts.failed:
        reasons.append(
            f"out of memory at {facts.failed} samples in a micro-batch: {facts.micro_batch} from "
            "here on"
        )
    if facts.before:
        reasons.append("gradients were there before: they are set aside and added to at the end")
    if facts.local:
        reasons.append(
            f"{facts.local} BatchNorm layers normalise each micro-batch by itself, as requested by "
            'batchnorm="local": the gradient is not that of the undivided batch'
        )
    literal = facts.loss.startswith("MBS Algorithm 1")
    if literal:
        reasons.append("Algorithm 1 to the letter: exact only where all micro-batches are equal")
    separate_sums = facts.separate_sums or (facts.half and facts.divided) or facts.before
    return Plan(
        micro_batch=facts.micro_batch,
        mechanism=mechanism,
        accumulate="accumulator" if separate_sums else "in place",
        loss=facts.loss,
        exact=_evidence(facts, literal=literal),
        reasons=tuple(reasons),
        memory=memory,
        offload=offload,
    )


def _evidence(facts: Facts, *, literal: bool) -> Evidence:
    """Return the evidence on whether the gradient is that of the undivided batch."""
    if facts.local:
        return Evidence("inexact", 'batchnorm="local" was requested')
    if literal:
        return Evidence("inexact", "Loss.algorithm1 was requested")
    if not facts.divided:
        return UNDIVIDED
    if not facts.looked:
        return FORESEEN
    if facts.doubts:
        return Evidence("not shown", "; ".join(facts.doubts), facts.looked)
    return Evidence("shown", "each sample was followed to its own row alone", facts.looked)


def _of_offload(memory: Memory | None, offload: OffloadPlan | None, *, lanes: bool) -> list[str]:
    """Return the reasons on offloading, and the faster choice where steps were timed."""
    reasons = []
    if offload is not None and lanes:
        reasons.append(
            "tensors of the running micro-batch that its next kernel does not need may be "
            "offloaded, too: the one that was used longest ago first"
        )
    elif offload is not None:
        reasons.append(
            "saved tensors of a micro-batch are offloaded as far as they do not fit: the one that "
            "is used last leaves first, and each returns before its use"
        )
    every = () if memory is None else memory.candidates
    timed = [(c.seconds, c.micro_batch, c.offloaded) for c in every if c.seconds is not None]
    offloaded = min((one for one in timed if one[2]), default=None)
    here = min((one for one in timed if not one[2]), default=None)
    if offloaded is not None and here is not None:
        reasons.append(
            f"a step takes {offloaded[0]:.3g} s in micro-batches of "
            f"{offloaded[1]} with saved tensors offloaded, and {here[0]:.3g} s in micro-batches of "
            f"{here[1]} without"
        )
    return reasons


_WHY = {
    "undivided": "the batch is no larger than a micro-batch: torch's own step",
    "lockstep": (
        "samples meet in BatchNorm: micro-batches wait for each other there, and the tensors of "
        "waiting ones are offloaded as far as they do not fit"
    ),
    "two-pass": (
        "the loss is not known to be a sum over samples: it is computed once on all outputs, "
        "and a second forward pass delivers its gradient. Loss.per_sample or Loss.ratio "
        "would save that pass"
    ),
    "streaming": "the loss is a sum over samples: one pass",
}
"""Why a mechanism was taken."""


# HTML cards of a plan, an engine and a step for notebooks, without external resources.
#
#     ┌ title ────────────────────────────────────┐
#     │ ▇▇▇▇▇▇▒▒▒▒▒░░░░         │ 5.1 MiB of 6 MiB│   bytes by owner, against the budget
#     │ name          value                       │
#     │ ▸ why                                     │   opens on a click
#     └───────────────────────────────────────────┘
#
# Inline styles only, in the colours of the page around it, so it is the same in every notebook,
# light or dark, trusted or not: there is no script, no style sheet and nothing to fetch. Every text
# is escaped, since names of models and losses are the user's.

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Of owners, the largest first; a colour-blind person can tell them apart (Okabe and Ito)."""

OVER = "#a00000"
"""Of the budget's mark."""

CELL = "padding:1px 10px 1px 0;text-align:left;vertical-align:top"
PLAIN = "border:0;color:inherit;font-size:inherit"
NAME = f"{CELL};font-weight:normal;white-space:nowrap;opacity:.75"
NUMBER = "padding:1px 10px 1px 0;text-align:right;font-variant-numeric:tabular-nums"


def card(title: str, *parts: str) -> str:
    """Return a card: a title, and parts that are HTML already."""
    box = (
        "border:1px solid rgba(128,128,128,.5);border-radius:6px;padding:8px 12px;"
        "max-width:46em;font-size:90%;line-height:1.4"
    )
    return f'<div style="{box}"><b>{escape(title)}</b>{"".join(parts)}</div>'


class Printed:
    """Base of results that a shell and a notebook show as `print` does."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook."""
        text = f'<pre style="margin:6px 0;overflow-x:auto">{escape(str(self))}</pre>'
        return card(type(self).__name__, text)


def table(named: Mapping[str, str]) -> str:
    """Return a table of names and values."""
    lines = "".join(
        f'<tr><th style="{NAME}" scope="row">{escape(name)}</th>'
        f'<td style="{CELL}">{escape(value)}</td></tr>'
        for name, value in named.items()
    )
    return f'<table style="{PLAIN};margin:6px 0">{lines}</table>'


def bar(owners: Sequence[tuple[str, int]], budget: int) -> str:
    """Return a bar of bytes by owner against a budget, with a legend of its colours.

    Args:
        owners: ``(name, bytes)``, drawn from the left.
        budget: bytes; the mark on the bar.
    """
    held = sum(count for _, count in owners)
    full = max(held, budget, 1)
    colors = [COLORS[min(i, len(COLORS) - 1)] for i in range(len(owners))]
    pieces = "".join(
        f'<span title="{escape(name)}: {show_bytes(count)}" style="display:inline-block;'
        f'height:100%;width:{100 * count / full:.2f}%;background:{color}"></span>'
        for (name, count), color in zip(owners, colors, strict=True)
    )
    mark = (
        f'<span title="budget: {show_bytes(budget)}" style="position:absolute;top:-2px;bottom:-2px;'
        f'left:{100 * budget / full:.2f}%;border-left:2px solid {OVER}"></span>'
    )
    what = f"{show_bytes(held)} of {show_bytes(budget)}"
    legend = "".join(
        f'<span style="white-space:nowrap;margin-right:1em"><span style="color:{color}">&#9632;'
        f"</span> {escape(name)} {show_bytes(count)}</span> "
        for (name, count), color in zip(owners, colors, strict=True)
    )
    return (
        f'<div role="img" aria-label="memory: {what}" style="position:relative;height:14px;'
        f"margin:8px 2px 4px 0;background:rgba(128,128,128,.2);white-space:nowrap;font-size:0;"
        f'line-height:0">{pieces}{mark}</div>'
        f'<div style="font-size:90%"><b>{what}</b> &nbsp;{legend}</div>'
    )


def memory_bar(memory: Memory) -> str:
    """Return the predicted peak by owner, against the budget."""
    return bar(memory.owners or (("predicted", memory.predicted),), memory.budget)


def considered(memory: Memory, chosen: int, *, offloaded: bool) -> str:
    """Return the table of the micro-batches that were considered, and why each won or lost.

    Args:
        memory: the memory of a plan.
        chosen: samples in a micro-batch, as was chosen.
        offloaded: its saved tensors are offloaded.
    """
    if not memory.candidates:
        return ""
    head = "".join(
        f'<th style="{NUMBER if i < 3 else CELL};opacity:.75" scope="col">{name}</th>'
        for i, name in enumerate(("micro-batch", "memory", "seconds a step", ""))
    )
    both = len({one.offloaded for one in memory.candidates}) > 1
    lines = []
    for one, why in verdicts(memory, chosen, offloaded=offloaded):
        seconds = "-" if one.seconds is None else f"{one.seconds:.3g}"
        where = "saved tensors offloaded; " if both and one.offloaded else ""
        weight = ";font-weight:bold" if why.startswith("chosen") else ""
        cells = [str(one.micro_batch), show_bytes(one.peak_bytes), seconds]
        numbers = "".join(f'<td style="{NUMBER}{weight}">{cell}</td>' for cell in cells)
        lines.append(f'<tr>{numbers}<td style="{CELL}{weight}">{escape(where + why)}</td></tr>')
    inside = f'<table style="{PLAIN}"><tr>{head}</tr>{"".join(lines)}</table>'
    return folded("micro-batches that were considered", inside)


def folded(title: str, inside: str) -> str:
    """Return HTML that opens on a click, or on Enter."""
    summary = f'<summary style="cursor:pointer">{escape(title)}</summary>'
    return f'<details style="margin:4px 0">{summary}{inside}</details>'


def because(reasons: Iterable[str]) -> str:
    """Return the reasons, a line each."""
    lines = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f'<ul style="margin:4px 0;padding-left:1.4em">{lines}</ul>' if lines else ""
