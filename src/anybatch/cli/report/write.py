"""Where a page goes: `anybatch report RUN_FOLDER`, and the file that `plan --html` names.

A plan takes seconds to minutes, so a wrong file name is refused before it is made. The file takes
its name in one step, as the others of a run folder do, so a reader never sees half a page.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import typer
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from anybatch.cli.faults import SettingsError
from anybatch.cli.outcome import ending
from anybatch.cli.report import planning, scaling, training
from anybatch.cli.report.drawing import HATCHES
from anybatch.cli.report.parts import Page, Tone
from anybatch.cli.report.record import RunRecord, record_of

NAME = "report.html"
"""The page of a run, in its folder."""


def refuse_page(path: Path) -> None:
    """Refuse a file that could not be written.

    Raises:
        SettingsError: saying so.
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise SettingsError(
            f"the report must be a file whose name ends in .html; got {str(path)!r}. Call it "
            f"{path.name}.html."
        )
    if not path.parent.is_dir():
        raise SettingsError(
            f"the report must go to a folder that is there; {str(path.parent)!r} is none. Make it, "
            "or name another."
        )
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise SettingsError(
            f"the report must be a file that can be written; {str(path)!r} cannot. Name another."
        )


def write_page(text: str, path: Path) -> None:
    """Write a page to a file that gets its name when it is complete.

    Raises:
        SettingsError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise SettingsError(
            f"the report cannot be written to {path}: {error.strerror}. Make room, or name another "
            "file with --out."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def report(run_folder: Path, out: Path | None) -> None:
    """Write the page about the run in a folder, to `out` or into the folder."""
    with ending():
        target = out or run_folder / NAME
        if out is not None:
            refuse_page(target)
        record = record_of(run_folder)
        refuse_page(target)
        write_page(page_of(record), target)
        typer.echo(f"The report is in {target}.")


# Page about a run, made from its record by a pure function from data to HTML.
#
# A page that is put together from strings is injected into by the first folder named
# `<script>alert(1)</script>`. Here jinja2 escapes everything, except two texts that are made here:
# the style sheet and the drawings, which are serialised from a tree. As a second barrier, the first
# line of the page forbids scripts, and everything that is not in it.
#
#     RunRecord ──sections──> Page ──page.html.j2, page.css──> one text, no other file, no network


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
