"""`anybatch plan --timeline`: the planned step in letters and colours, and as a picture in a file.

A file is checked before anything is planned: a plan takes seconds to minutes, and a wrong folder
should not cost them.
"""

from __future__ import annotations

import os
from pathlib import Path

from rich.text import Text

from anybatch.cli.faults import SettingsError
from anybatch.cli.picture import draw_step, refuse_without_matplotlib, style_of
from anybatch.reports import StepTimeline
from anybatch.units import show_bytes

NONE = "There is no timeline: nothing was foreseen for this plan."


def refuse_picture(
    path: Path | None, *, timeline: bool, json: bool, convolutions: bool = False
) -> None:
    """Refuse a file that could not be written, or that no option requests.

    Raises:
        SettingsError: saying so.
        MissingExtraError: matplotlib is missing.
    """
    shown = "--timeline" if timeline else "--convolutions"
    if timeline and convolutions:
        raise SettingsError(
            "a plan is explained in one way at a time; --timeline and --convolutions were given. "
            "Leave one of them out."
        )
    if path is None:
        if (timeline or convolutions) and json:
            raise SettingsError(
                f"json prints the plan and nothing else; {shown} was given too, and prints a "
                "chart. Name a file for a picture, or leave one of them out."
            )
        return
    if not timeline and not convolutions:
        raise SettingsError(
            f"a file is for the picture of --timeline or --convolutions; {str(path)!r} was given "
            "alone. Add one of them, or leave it out."
        )
    if path.suffix.lower() != ".png":
        raise SettingsError(
            f"the picture must be a file whose name ends in .png; got {str(path)!r}. Call it "
            f"{path.name}.png."
        )
    folder = path.parent
    if not folder.is_dir():
        raise SettingsError(
            f"the picture must go to a folder that is there; {str(folder)!r} is none. Make it, or "
            "name another."
        )
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise SettingsError(
            f"the picture must be a file that can be written; {str(path)!r} cannot. Name another."
        )
    refuse_without_matplotlib()


def write_picture(step: StepTimeline, path: Path) -> str:
    """Draw a step to a file, and say where it is.

    Raises:
        SettingsError: it cannot be written.
    """
    write(draw_step(step), path)
    return f"The step is drawn in {path}."


def write(picture: bytes, path: Path) -> None:
    """Write a picture to a file.

    Raises:
        SettingsError: it cannot be written.
    """
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise SettingsError(
            f"the picture cannot be written to {path}: {error.strerror}. Name another file."
        ) from error


def colored(step: StepTimeline) -> Text:
    """Return a chart of a step, each owner in its colour, with a legend."""
    shown = Text()
    for line in step.chart():
        for text, owner in line:
            shown.append(text, "bold" if owner == "budget" else style_of(owner))
        shown.append("\n")
    shown.append("at the peak")
    for owner, size in sorted(step.ledger.at_peak().items(), key=lambda pair: -pair[1]):
        shown.append("  ").append("█", style_of(owner)).append(f" {owner} {show_bytes(size)}")
    return shown
