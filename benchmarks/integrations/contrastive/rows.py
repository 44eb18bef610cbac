"""The tables of contrastive training: errors, bytes and seconds, the largest batch, a training."""

from statistics import fmean
from typing import Any

from benchmarks.integrations.contrastive.orders import ORDERS
from benchmarks.mbs.rows import figure, markdown

Results = dict[str, Any]
RUN = "python -m benchmarks.integrations.contrastive.run --only"
WAYS = (
    *("naive", "gradcache", "sentence-transformers"),
    *("anybatch, matrix", "anybatch, joint", "anybatch"),
)
MIB = 2**20


def contrastive(results: Results) -> str:
    """A line for each pair of encoders: the worst error of a step's gradient, by way."""
    if "errors" not in results:
        return f"*No results yet: run `{RUN} errors`.*"
    ways = [*WAYS, "anybatch, rng batch"]
    rows = [
        [name, *(figure(found[way]) if way in found else "" for way in ways)]
        for name, found in results["errors"].items()
    ]
    return markdown(["encoders", *ways], rows)


def contrastive_summary(results: Results) -> str:
    """The last look of each arm of the training, over the seeds."""
    if "learns" not in results:
        return f"*No results yet: run `{RUN} learns`.*"
    rows = []
    for arm in ("undivided", "anybatch", "accumulated"):
        runs = [run for run in results["learns"] if run["arm"] == arm]
        found = [100 * run["found"][-1] for run in runs]
        loss = [run["loss"][-1] for run in runs]
        share = f"{fmean(found):.1f} ({min(found):.1f} to {max(found):.1f})"
        rows.append([arm, share, f"{fmean(loss):.3f} ({min(loss):.3f} to {max(loss):.3f})"])
    return markdown(["training", "images that find their number, %", "test loss"], rows)


def contrastive_steps(results: Results) -> str:
    """A line for each way: bytes, and seconds of a step of `anybatch.contrastive` beside it."""
    if "speed" not in results:
        return f"*No results yet: run `{RUN} speed`.*"
    rows = []
    for name, found in results["peaks"].items():
        speed = results["speed"][name]
        for way, peak in found.items():
            one = speed.get(way)
            ratio = f"{one['ratio']:.3f} ({one['low']:.3f} to {one['high']:.3f})" if one else "1"
            seconds = f"{one['seconds']:.3f}" if one else ""
            processor = f"{one['processor']:.3f}" if one else "1"
            rows.append([name, way, f"{peak / MIB:.1f}", seconds, ratio, processor])
    head = ["encoders", "way", "peak, MiB", "seconds", "ours / this: wall (lowest to highest)"]
    return markdown([*head, "processor"], rows)


def contrastive_orders(results: Results) -> str:
    """A line for each order of encoders: seconds of a loop by hand, as a share of the first's."""
    if "orders" not in results:
        return f"*No results yet: run `{RUN} orders`.*"
    found = results["orders"]
    rows = [[order, *(f"{one[order]:.3f}" for one in found.values())] for order in ORDERS]
    return markdown(["a loop by hand: its encoders", *found], rows)


def contrastive_rest(results: Results) -> str:
    """A line for each way: milliseconds of a step's forwards, backwards, and of all else."""
    if "rest" not in results:
        return f"*No results yet: run `{RUN} rest`.*"
    rows = [
        [name, way, *(f"{one[part]:.1f}" for part in ("forward", "backward", "rest"))]
        for name, found in results["rest"].items()
        for way, one in found.items()
    ]
    return markdown(["encoders", "way", "forward, ms", "backward", "rest"], rows)


def contrastive_large(results: Results) -> str:
    """A line for each batch: what a step holds, foresees, and would need with the matrix."""
    if "large" not in results:
        return f"*No results yet: run `{RUN} large`.*"
    found = results["large"]
    rows = [
        [
            f"{one['batch']:,}",
            str(one["micro_batch"]),
            f"{one['peak'] / MIB:.1f}",
            f"{one['predicted'] / MIB:.1f}",
            f"{found['budget'] / MIB:.1f}",
            f"{one['embeddings'] / MIB:.1f}",
            f"{one['matrix_needs'] / MIB:,.1f}",
        ]
        for one in found["rows"]
    ]
    head = ["batch", "micro-batch", "peak, MiB", "foreseen", f"torch alone, {found['small']}"]
    return markdown([*head, "of it embeddings and gradients", "with the matrix"], rows)
