"""Heads and their losses in chunks, as tables in markdown."""

from benchmarks.mbs.rows import Results, markdown

MIB = 1 << 20


def heads(results: Results) -> str:
    """A line for each head: seconds and peaks, relative to all logits at once."""
    every = results["heads"]
    names = {name for row in every for name in row["seconds"] if name.isdigit()}
    sizes = sorted(names, key=int)
    head = ["vocabulary x features, rows", "at once, s", "MiB", "chosen", "MiB"]
    head += [f"{n} rows" for n in sizes] + ["torch's own", "MiB"]
    lines = []
    for row in every:
        seconds, peaks = row["seconds"], row["peaks"]
        vocabulary, features, rows = row["shape"]
        ratio = {name: f"{value / seconds['at once']:.2f}" for name, value in seconds.items()}
        mib = {name: f"{value / MIB:.0f}" for name, value in peaks.items()}
        lines.append(
            [f"{vocabulary:,} x {features}, {rows:,}", f"{seconds['at once']:.3f}"]
            + [mib["at once"], ratio["chosen"], mib["chosen"]]
            + [ratio.get(n, "-") for n in sizes]
            + [ratio.get("torch", "-"), mib.get("torch", "-")]
        )
    return markdown(head, lines)


def heads_cuda(results: Results) -> str:
    """The device, and a line for each head and precision: seconds, peaks and errors by way."""
    where, every = results["environment"], results["heads"]
    names = {name for row in every for name in row["seconds"] if name.isdigit()}
    sizes, others = sorted(names, key=int), ("chosen", "Liger", "cut")
    head = ["vocabulary x features, rows", "precision", "at once, ms", "MiB", "error"]
    head += [word for name in others for word in (name, "MiB", "error")]
    lines = []
    for row in every:
        seconds, peaks, errors = row["seconds"], row["peaks"], row["errors"]
        vocabulary, features, rows = row["shape"]
        line = [f"{vocabulary:,} x {features}, {rows:,}", row["precision"]]
        line += [f"{1e3 * seconds['at once']:.0f}", f"{peaks['at once'] / MIB:.0f}"]
        line.append(f"{errors['at once']:.1e}")
        for name in others:
            there = name in seconds
            line.append(f"{seconds[name] / seconds['at once']:.2f}" if there else "-")
            line += [f"{peaks[name] / MIB:.0f}", f"{errors[name]:.1e}"] if there else ["-", "-"]
        line += [f"{seconds[n] / seconds['at once']:.2f}" if n in seconds else "-" for n in sizes]
        lines.append(line)
    device = f"{where['gpu']}, torch {where['torch']}, CUDA {where['cuda']}."
    return "\n".join([device, "", markdown([*head, *(f"{n} rows" for n in sizes)], lines)])


def heads_divided(results: Results) -> str:
    """A line for each block and budget: how two engines run it, one of them in chunks."""
    if "divided" not in results:
        return "Budgets at which a batch must be divided have not been measured yet."
    head = ["tokens, features", "budget, MiB", "at once: micro-batch", "s", "first step, s"]
    head += ["chunks: micro-batch", "s", "first step, s", "chunks / at once"]
    lines = []
    for row in results["divided"]:
        line = [f"{row['tokens']:,}, {row['features']}", f"{row['at once']['budget'] / MIB:.0f}"]
        for way in ("at once", "chunks"):
            one = row[way]
            size = f"{one['micro_batch']}" + (", offloaded" if one["offloads"] else "")
            size += f", {one['chunk'] / MIB:.0f} MiB" if one["chunk"] else ""
            line += [size, f"{one['seconds']:.2f}", f"{one['first']:.1f}"]
        lines.append([*line, f"{row['ratio']:.2f}"])
    return markdown(head, lines)


def heads_floors(results: Results) -> str:
    """A line for each block: the least budget, with all logits at once and in chunks."""
    head = ["tokens, features", "", "least budget, MiB", "most held, MiB", "micro-batch"]
    head += ["seconds a step"]
    lines = []
    for row in results["floors"]:
        for way in ("at once", "chunks"):
            one = row[way]
            size = f", {one['chunk'] / MIB:.0f} MiB" if one["chunk"] else ""
            size += ", offloaded" if one["offloads"] else ""
            mib = [f"{one[name] / MIB:.1f}" for name in ("budget", "peak")]
            block = f"{row['tokens']:,}, {row['features']}"
            lines.append(
                [block, way + size, *mib, f"{one['micro_batch']}", f"{one['seconds']:.2f}"]
            )
    return markdown(head, lines)
