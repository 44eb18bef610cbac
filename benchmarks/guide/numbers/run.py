"""The guide's own numbers, compared with the results of its lemmas and equations.

AlexNet is that of Table 2: 224x224 pixels, convolutions that are not grouped, dense layers of 4096,
4096 and 1000. Equation 4 is evaluated as printed, then with outputs of all samples and a bias for
each of them.

Table 2 is printed without a formula. Formulas of one form are tried: spectra of inputs, outputs and
filters, over the bytes of GEMM. Spectra are as large as the input, padded, or a power of two; they
are half spectra (the rest mirrors them), real planes or full. Nothing is measured here.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from anybatch.tools.gpus import efficiency, speedup, speedup_limit
from benchmarks.environment import environment
from benchmarks.guide.alexnet import ALEXNET, SAMPLES, TABLE_2
from benchmarks.guide.numbers.table2 import OURS, formulas
from benchmarks.results import write
from benchmarks.simulators.class_counts import samples_for
from benchmarks.simulators.lemma import gpus_for, overhead_limit
from benchmarks.simulators.parameter_servers import Cluster, servers_for

HERE = Path(__file__).parent
DEVICE = 12 << 30
"""Bytes of one of the guide's GPUs."""
GIGABIT = 125_000_000
"""Bytes a second."""
CLASSES = 1000
NEAR = 0.05


def lemmas() -> dict[str, float | int | None]:
    """What Lemma 3.1 says of the guide's examples."""
    return {
        "overhead at 80 %, 4 GPUs": overhead_limit(0.8, 4),
        "efficiency at 9 %, 4 GPUs": efficiency(0.09, 4),
        "GPUs for 3x at 10 %": gpus_for(3, 0.1).gpus,
        "speedup of 3 at 10 %": speedup(0.1, 3),
        "speedup of 4 at 10 %": speedup(0.1, 4),
        "limit at 50 % not parallel": speedup_limit(1.0),
    }


def traffic() -> dict[str, dict[str, float | int]]:
    """AlexNet's updates on 1 Gbit/s, as printed and with all of its parameters."""
    found = {}
    for name, size in (("printed", 180_000_000), ("ours", 4 * ALEXNET.parameters)):
        shortest = Cluster(1, 1.0, size, GIGABIT, worker=GIGABIT).own_seconds
        count = servers_for(8, 1.0, size, 10 * GIGABIT)
        found[name] = {
            "bytes": size,
            "push": size / GIGABIT,
            "shortest round": shortest,
            "servers, 8 workers, 1 s, 10 Gbit/s": count,
        }
    return found


def memory() -> dict[str, dict[str, int]]:
    """Equations 2 to 5 at the guide's mini-batch, in bytes."""
    found = {}
    for name, printed in (("printed", True), ("mended", False)):
        one = ALEXNET.memory(SAMPLES, printed=printed)
        bound = ALEXNET.bound(DEVICE, SAMPLES, printed=printed)
        found[name] = {**vars(one), "total": one.total, "bound": bound}
    return found


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
) -> None:
    """Compute them, and write results.json."""
    del quick  # it is quick
    tried = formulas()
    ours = next(one for one in tried if tuple(one["names"]) == OURS)
    near = [one for one in tried if one["worst"] <= NEAR]
    results: dict[str, Any] = {
        "environment": environment(),
        "lemmas": lemmas(),
        "traffic": traffic(),
        "memory": memory(),
        "table 2": {"printed": TABLE_2, "ours": ours, "near": near, "tried": len(tried)},
        "classes": {str(p): samples_for([1 / CLASSES] * CLASSES, p) for p in (0.5, 0.95)},
    }
    write(out / "results.json", results)


if __name__ == "__main__":
    typer.run(main)
