"""Where a page goes: `anybatch report RUN_FOLDER`, and the file that `plan --html` names.

A plan takes seconds to minutes, and a run is read for its report; a wrong file name is said before.
The file takes its name in one step, as the others of a run folder do, so a reader never sees half a
page.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from anybatch.cli.faults import SettingsError
from anybatch.cli.outcome import ending
from anybatch.cli.report.page import page_of
from anybatch.cli.report.saved import record_of

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


def report(
    run_folder: Annotated[Path, typer.Argument(help="Of a training, ended or going on.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Default: report.html in the run folder."),
    ] = None,
) -> None:
    """Write the page about a training anew: curves, throughput, memory, and the plan explained.

    It is one file that needs no network and no other file.
    """
    with ending():
        target = out or run_folder / NAME
        if out is not None:
            refuse_page(target)
        record = record_of(run_folder)
        refuse_page(target)
        write_page(page_of(record), target)
        typer.echo(f"The report is in {target}.")
