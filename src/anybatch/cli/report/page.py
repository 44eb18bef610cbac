"""Page about a run, made from its record by a pure function from data to HTML.

A page that is put together from strings is injected into by the first folder named
`<script>alert(1)</script>`. Here jinja2 escapes everything, except two texts that are made here:
the style sheet and the drawings, which are serialised from a tree. As a second barrier, the first
line of the page forbids scripts, and everything that is not in it.

    RunRecord ──sections──> Page ──page.html.j2, page.css──> one text, no other file, no network
"""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from anybatch.cli.report import planning, scaling, training
from anybatch.cli.report.parts import Page, Tone
from anybatch.cli.report.record import RunRecord
from anybatch.cli.report.svg import HATCHES


def page_of(record: RunRecord) -> str:
    """Return the page about a run or a plan, as HTML."""
    page = parts_of(record)
    text = _template().render(page=page, hatches=HATCHES)
    return text.encode("utf-8", "replace").decode()  # a name of a file need not be text


def parts_of(record: RunRecord) -> Page:
    """Return the same as data."""
    tone, ending = _ending(record)
    sections = [
        *training.outcome(record),
        *training.what_was_run(record),
        *training.curves(record),
        *training.throughput(record),
        *planning.memory(record),
        *planning.explained(record),
        *planning.convolutions(record),
        *scaling.scale_out(record),
    ]
    notes = list(record.notes)
    if record.history.broken:
        count = record.history.broken
        notes.append(
            f"{count} {'line' if count == 1 else 'lines'} of metrics.jsonl could not be read, and "
            "nothing of them is here."
        )
    return Page(
        f"anybatch {record.command}", _title(record), tone, ending, tuple(notes), tuple(sections)
    )


def _title(record: RunRecord) -> str:
    model, data = record.part("recipe").get("model"), record.part("settings").get("data")
    return f"{model or 'A model'} on {data or 'data'}"


def _ending(record: RunRecord) -> tuple[Tone, str]:
    """Return how a run ended, as a tone and in words."""
    end = record.summary
    if record.command == "plan":
        return "plain", "Planned. Nothing was trained."
    if end is None:
        return "stopped", "The run has not ended: it goes on, or it was killed."
    steps, epochs = end.get("steps", 0), end.get("epochs", 0)
    far = f"after step {steps}, {epochs} whole epochs"
    if end.get("stopped"):
        return "bad", f"Failed {far}: {end['stopped']}"
    if end.get("interrupted"):
        where = end.get("run_folder") or "the run folder"
        return "stopped", f"Interrupted {far}. Go on with: anybatch train --resume {where}"
    return "good", f"Finished: {steps} steps, {epochs} epochs."


@cache
def _template() -> Template:
    loader = PackageLoader("anybatch.cli", "report")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")
