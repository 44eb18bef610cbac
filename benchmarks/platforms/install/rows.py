"""Table of the installed package."""

from typing import Any

from benchmarks.mbs.rows import markdown
from benchmarks.platforms.install.run import COMMANDS, OURS, TORCH


def install(results: dict[str, Any]) -> str:
    """Sizes, and medians of seconds."""
    rows = [
        ["wheel", f"{results['wheel_bytes'] / 1e3:.0f} kB, {results['wheel_files']} files"],
        ["source distribution", f"{results['source_bytes'] / 1e6:.1f} MB"],
    ]
    for extra in sorted(results["installed"], key=lambda name: name != "plain"):
        found = results["installed"][extra]
        name = "installed with torch and numpy" if extra == "plain" else f"with `{extra}`"
        rows.append([name, f"{found['everything'] / 1e6:.0f} MB"])
        if extra == "plain":
            rows.append(["of that, anybatch", f"{found['anybatch'] / 1e6:.1f} MB"])
    seconds = results["seconds"]
    rows.append([f"`{TORCH}`", f"{seconds[TORCH]:.2f} s"])
    rows.append([f"`{OURS}`", f"{seconds[OURS]:.2f} s, {results['added']:.2f} s of it ours"])
    rows.append(["modules of ours in an import", str(results["modules"])])
    rows += [[f"`anybatch {name}`", f"{seconds[name]:.2f} s"] for name in COMMANDS]
    return markdown(["", "median"], rows)
