"""The results of convolution kernels, as tables in markdown."""

from typing import Any

from benchmarks.mbs.rows import markdown
from benchmarks.ucudnn.kernels.cases import LAYERS

Results = dict[str, Any]
MIB = 1 << 20


def conv_kernels(results: Results) -> str:
    """A line for each layer, kernel and malloc mode."""
    head = ["layer", "kernel", "malloc", "torch's layout", "torch, s", "ours, s", "times as fast"]
    rows = []
    for mode, found in results["modes"].items():
        for name, layer in found["layers"].items():
            for kernel, one in layer.items():
                torchs, ours = (f"{s:.3g}" for s in one["seconds"])
                cells = [one["layout"], torchs, ours, _times(one["times"])]
                chosen = [one["chosen"], f"{one['workspace'] / MIB:.1f} MiB"]
                rows.append([LAYERS[name].title, kernel, mode, *cells, *chosen])
    return markdown([*head, "chosen", "workspace"], rows)


def conv_step(results: Results) -> str:
    """A line for each malloc mode and layout of torch's."""
    head = ["malloc", "torch's layout", "torch, s", "ours, s", "times as fast"]
    rows = []
    for mode, found in results["modes"].items():
        step = found["step"]
        for layout, one in step["against"].items():
            torchs, ours = (f"{s:.3g}" for s in one["seconds"])
            more = f"{step['chosen']} of {step['kernels']}", f"{step['error']:.1e}"
            rows.append([mode, layout, torchs, ours, _times(one["times"]), *more])
    return markdown([*head, "kernels that are not torch's", "gradients differ by"], rows)


def _times(cuts: list[float]) -> str:
    low, middle, high = cuts
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"
