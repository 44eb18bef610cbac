"""The sections of a page that explain a plan: memory, why this one, convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anybatch import Plan
from anybatch.cli.report.drawing import Titled, draw_envelope, is_near
from anybatch.cli.report.history import Envelope
from anybatch.cli.report.parts import (
    Fact,
    Figure,
    Key,
    Section,
    Table,
    drawn,
    figure_of,
    percent,
    seconds,
)
from anybatch.cli.report.record import RunRecord
from anybatch.units import show_bytes

if TYPE_CHECKING:
    from anybatch.reports import Division, Divisions, Memory, Pace

STRETCHES = 48
"""Rows of the table of a step."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def memory(record: RunRecord) -> list[Section]:
    """Return the section on memory against the budget: predicted, by owner, measured, over time."""
    found = record.plan.memory if record.plan is not None else None
    measured = record.history.measured
    facts, lead = list[Fact](), list[str]()
    if found is not None:
        facts = _against_budget(found)
        if measured is not None and measured > found.budget:
            more = show_bytes(measured - found.budget)
            lead = [f"A step was measured to hold {more} more than the budget."]
    if measured is not None:
        of = "" if found is None else f"; {percent(measured / found.predicted)} of the prediction"
        more = f"most of the measured steps, in any size{of}"
        facts.append(Fact("Measured peak", show_bytes(measured), more))
    step = record.step
    figures = (_timeline(step),) if step is not None and step.live else ()
    tables = () if found is None else (_owners(found),)
    if not facts and not figures:
        return []
    points = () if step is None or not step.live or step.timed else (_EVENTS,)
    parts = (tuple(lead), tuple(facts), False, points)
    return [Section("memory", "Memory", *parts, figures=figures, tables=tables)]


def _against_budget(found: Memory) -> list[Fact]:
    least = () if found.floor is None else (show_bytes(found.floor),)
    return [
        Fact("Budget", show_bytes(found.budget), found.source),
        Fact("Predicted peak", show_bytes(found.predicted), f"by {found.how}"),
        *(Fact("Floor", one, "at one sample a micro-batch") for one in least),
        Fact("Undivided", show_bytes(found.undivided), "what the whole mini-batch would hold"),
    ]


def _owners(found: Memory) -> Table:
    rows = [(name, count) for name, count in found.owners if count]
    rows += [("together", found.predicted), ("budget", found.budget)]
    return Table(
        "owners",
        "Owners of the predicted peak",
        ("Owner", "Memory", "Of the budget"),
        tuple((name, show_bytes(count), percent(count / found.budget)) for name, count in rows),
        marked=frozenset({len(rows) - 2}),
        shares=tuple(min(1.0, count / found.budget) for _, count in rows),
    )


def _timeline(step: Envelope) -> Figure:
    """Return the planned step, by owner, against its budget."""
    peak = max(step.live, key=sum)
    power = min(len(UNITS) - 1, (max(1, step.peak).bit_length() - 1) // 10)
    held = sorted(zip(step.owners, peak, strict=True), key=lambda one: -one[1])
    who = ", ".join(f"{name} {show_bytes(count)}" for name, count in held if count)
    far = "" if is_near(step) else ", far above: not drawn"
    title = f"Live memory of the planned step, {UNITS[power]}"
    description = (
        f"{step.title}. Peak {show_bytes(step.peak)} below a budget of {show_bytes(step.budget)}"
        f"{far}. At the peak: {who}."
    )
    titled = Titled("timeline", title, description)
    keys = [
        Key(name, "band", style, f"{show_bytes(held)} at the peak" if held else "")
        for name, style, held in zip(step.owners, step.styles, peak, strict=True)
    ]
    keys = [Key("budget", "limit", 0, f"{show_bytes(step.budget)}{far}"), *reversed(keys)]
    drawing = drawn(lambda: draw_envelope(titled, step, 1 << 10 * power))
    return figure_of(titled, drawing, tuple(keys), _stretches(step))


def _stretches(step: Envelope) -> Table:
    """Return a step as a table: each stretch at its highest moment."""
    few = step.merged(STRETCHES)
    busy = ("Kernels run", "Copies out", "Copies back") if step.timed else ()
    totals = [sum(row) for row in few.live]
    rows = []
    for begin, live, shares in zip(few.edges, few.live, few.busy, strict=False):
        phase = next((name for name, edge in reversed(few.phases) if edge <= begin), "")
        at = f"{begin:.4g} s" if step.timed else f"{begin:.0f}"
        more = [f"{100 * share:.0f} %" for share in shares] if step.timed else []
        cells = [show_bytes(sum(live)), *map(show_bytes, live), *more]
        rows.append((at, phase, *cells))
    return Table(
        "timeline-numbers",
        f"The step in {len(rows)} stretches, each at its highest moment",
        ("From" if step.timed else "From event", "Phase", "Together", *step.owners, *busy),
        tuple(rows),
        words=frozenset({1}),
        marked=frozenset({totals.index(max(totals))}),
    )


def explained(record: RunRecord) -> list[Section]:
    """Return why the plan is as it is, and why the others lost."""
    plan = record.plan
    if plan is None:
        return []
    state, _, by = str((record.summary or {}).get("exact") or plan.exact).partition(": ")
    facts = (
        Fact("Micro-batch", f"{plan.micro_batch} samples"),
        Fact("Mechanism", plan.mechanism, _MECHANISMS.get(plan.mechanism, "")),
        Fact("Gradients", plan.accumulate, _GRADIENTS.get(plan.accumulate, "")),
        Fact("Exact", state, f"{_EXACT.get(state, state)}: {by}"),
        *(() if plan.states is None else (Fact("Optimizer's state", str(plan.states)),)),
        *(() if plan.pace is None else _pace(plan.pace)),
    )
    points = tuple(f"{reason[:1].upper()}{reason[1:]}." for reason in plan.reasons)
    text = {"text": str(plan), "text_name": "The plan in its own words"}
    tables = _candidates(plan)
    return [Section("plan", "The plan, and why", (), facts, False, points, (), tables, **text)]


def _pace(pace: Pace) -> tuple[Fact, ...]:
    def fact(name: str, steps: int) -> Fact:
        found, _, between = pace.in_words(steps).partition(" (")
        return Fact(name, found, between.removesuffix(")"))

    epoch = () if pace.epoch is None else (fact("An epoch", pace.epoch),)
    return fact("A step of the real loop", 1), *epoch


_EVENTS = (
    "Events are in their order, without a scale of time; the first inspection is of a few rows."
)
_MECHANISMS = {
    "undivided": "the mini-batch in one piece",
    "streaming": "one micro-batch after another, one pass",
    "two-pass": "all outputs first, for the loss; then each micro-batch again",
    "lockstep": "micro-batches wait for each other where samples meet",
}
_GRADIENTS = {
    "in place": "summed in .grad",
    "accumulator": "summed beside .grad, in one more set of gradients",
}
_EXACT = {
    "shown": "the gradient is that of the undivided mini-batch, up to rounding",
    "not shown": "nothing speaks against it, and it could not be shown",
    "inexact": "the gradient is not that of the undivided mini-batch",
}


def _candidates(plan: Plan) -> tuple[Table, ...]:
    every = plan.verdicts()
    if not every:
        return ()
    both = len({one.offloaded for one, _ in every}) > 1
    rows = tuple(
        (
            *(str(one.micro_batch), why or "-"),
            "-" if one.seconds is None else seconds(one.seconds),
            show_bytes(one.peak_bytes),
            *(("offloaded" if one.offloaded else "resident",) if both else ()),
        )
        for one, why in every
    )
    chosen = frozenset(i for i, (_, why) in enumerate(every) if why.startswith("chosen"))
    names = ("Micro-batch", "Verdict", "A step", "Memory", *(("Saved tensors",) if both else ()))
    title = "Other plans, and why they lost"
    return (Table("candidates", title, names, rows, frozenset({1, 4}), chosen),)


def convolutions(record: RunRecord) -> list[Section]:
    """Return how the plan divides convolutions."""
    found = record.plan.convolutions if record.plan is not None else None
    if found is None:
        return []
    rows = tuple(_kernel(one) for one in found.kernels)
    names = ("Kernel", "Samples", "Channels", "Window", "Computed by", "Takes", "Torch takes")
    columns = (*names, "Workspace", "Times as fast")
    caption = "Kernels; fft@24 x 2 is two parts of 24 samples, by fft"
    table = Table("kernels", caption, columns, rows, words=frozenset({2, 3, 4}))
    lead, tables = (f"{found}."[:1].upper() + f"{found}."[1:],), (table,) if rows else ()
    return [Section("convolutions", "Convolutions", lead, _workspace(found), tables=tables)]


def _workspace(found: Divisions) -> tuple[Fact, ...]:
    return (
        Fact("Workspace", show_bytes(found.workspace), "for each kernel"),
        Fact("Used", show_bytes(found.used), "by the kernel that takes most"),
        Fact("Micro-batches", found.policy, "of a kernel, as they were measured"),
    )


def _kernel(one: Division) -> tuple[str, ...]:
    kernel: Mapping[str, Any] = dict(one.kernel)
    chosen = one.configuration
    return (
        *(str(kernel.get("kernel", "-")), str(one.samples)),
        f"{kernel.get('channels', '-')} to {kernel.get('filters', '-')}",
        " x ".join(map(str, kernel.get("window", ()))),
        *(str(chosen), _short(chosen.seconds), _short(one.seconds)),
        show_bytes(chosen.workspace),
        f"{one.seconds / chosen.seconds:.1f}" if chosen.seconds else "-",
    )


def _short(count: float) -> str:
    return f"{1000 * count:.3g} ms" if count < 1 else seconds(count)
