"""Tiles of tokens, as a table in markdown."""

from benchmarks.mbs.rows import Results, markdown

MIB = 1 << 20


def tiles(results: Results) -> str:
    """A line for each model: least peaks, and the processor's seconds relative to enough memory."""
    head = ["tokens, features, MLP, vocabulary", "in memory, MiB", "s"]
    every = [way for way in results["models"][0]["ways"] if way != "memory"]
    for way in every:
        head += [f"{way}: MiB", "time"]
    lines = []
    for row in results["models"]:
        ways = row["ways"]
        line = [", ".join(f"{n:,}" for n in row["shape"])]
        line += [f"{ways['memory']['peak'] / MIB:.0f}", f"{ways['memory']['processor']:.2f}"]
        for way in every:
            ratio = ways[way]["processor"] / ways["memory"]["processor"]
            line += [f"{ways[way]['peak'] / MIB:.1f}", f"{ratio:.2f}"]
        lines.append(line)
    return markdown(head, lines)
