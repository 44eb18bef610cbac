"""From results files to prose: the README beside each results file, and the regions of the pages.

Nothing is typed twice: README, docs and the pages of the benchmarks are filled from `TABLES`,
and a table whose command has not been run says so instead of showing old figures.
"""

import re

from benchmarks.mbs.rows import Results
from benchmarks.results import HERE, console, read
from benchmarks.tables import MORE, TABLES, TITLES, WRITERS, command, pictures, table

PAGE = HERE.parent / "docs" / "five_lies.md"


def fill(text: str) -> str:
    """Replace what stands between `<!-- generated: NAME -->` and `<!-- end -->`."""

    def region(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- generated: {name} -->\n{TABLES[name]() if name in TABLES else found[2]}\n"

    pattern = r"<!-- generated: (\S+) -->\n(.*?)\n?(?=<!-- end -->)"
    return re.sub(pattern, region, text, flags=re.DOTALL)


def environment(results: Results) -> str:
    """The environment of a results file as a list, then its seeds and sizes.

    The malloc modes of one file share everything else, and are said in the table's head.
    """
    modes = list(results.get("modes", {}).values())
    found = dict(modes[0]["environment"] if modes else results["environment"])
    if modes:
        del found["malloc"]
    found |= {key: results[key] for key in ("seed", "seeds", "pairs", "rounds") if key in results}
    lines = [f"- {key}: {value}" for key, value in found.items()]
    for key, value in results.get("sizes", {}).items():
        sizes = value.items() if isinstance(value, dict) else [("", value)]
        lines.append(f"- {key}: {', '.join(f'{name} {size}'.strip() for name, size in sizes)}")
    return "\n".join(lines)


def readme(name: str) -> str:
    """The page beside a results file: Result, Environment, Reproduce."""
    folder, _ = WRITERS[name]
    results = read(HERE / folder / "results.json")
    parts = [f"# {TITLES[name]}", "Written by `python -m benchmarks.report`; do not edit."]
    run = (HERE / folder / "run.py").read_text().split('"""')[1].strip()
    summary = f"{name}_summary"
    parts += [run, "## Result", *([table(summary)] if summary in WRITERS else []), table(name)]
    parts += map(table, MORE.get(name, ()))
    parts += pictures(name)
    if results is not None:
        parts += ["## Environment", environment(results)]
    return "\n\n".join([*parts, "## Reproduce", f"```bash\n{command(folder)}\n```"]) + "\n"


def main() -> None:
    """Write the page of every table and the page of the five lies."""
    for name in TITLES:
        path = HERE / WRITERS[name][0] / "README.md"
        path.write_text(readme(name))
    PAGE.write_text(fill(PAGE.read_text()))
    console.print(f"wrote {len(TITLES)} pages and {PAGE.name}")


if __name__ == "__main__":
    main()
