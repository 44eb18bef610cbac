"""The least memory of one sample, under a real limit, beside what other libraries offer.

A batch is one sample, in float32. The block is one layer of torch's transformer with 64 features,
Llama and GPT-2 have 4 layers of 128 features, all a vocabulary of 32,000; the ViT has 4 layers of
64 features, the U-Net a width of 8. Each has these ways: *plain*; *checkpoint*, transformers'
gradient checkpointing (`torch.utils.checkpoint` for blocks that are not of transformers); *fused
head*, which stands for that of TRL, written anew for the processor; *torch's op*,
`F.linear_cross_entropy` at its default; *tiled MLP*, which stands for the part of Liger's that is
plain torch; *all flags*, checkpoint, a head and perhaps tiles at once. Of several settings (sizes
of chunks and shards, the head of all flags) the one with the least live bytes is taken. anybatch
has a plan of the least budget that it does not refuse (`memory=`), which was made before.

Each cell is a process of its own: it takes a step of a short sample in the same way (anybatch in a
plan of its least budget), makes the network and the sample, RLIMIT_DATA is set, and two steps must
end, of which the second is clocked. The least limit is found in steps of 4 %. It counts
every private page beyond those before the step: gradients and all else, but not parameters, for all
ways alike. Blocks of malloc from 1 MiB on are mapped, so that free ones are no part of it. *live*
is the most bytes of tensors in a step, again without parameters, by the meter; *of `memory=`* is
the least budget that anybatch does not refuse, less parameters.

At equal memory, anybatch has a plan for the bytes that a peer holds at its least, live tensors and
parameters, or for its own least where that is refused. The peers are two of those that hold as much
as anybatch, but less than a plain step: the one that is fastest, and the one that needs least. Told
are seconds over those of the peer, of the processor, because others may use the machine, and of the
clock: the median over pairs of processes that alternate, of the median of three steps each. The
plan's first step, which tries modules and records, is not among them. Gradients are compared with
those of the undivided sample: in float64 up to 2,304 tokens and for the U-Net, in float32 up to
10,000, and beyond not at all. Rows that are missing here have not been run. *worst
error* is the largest of all ways.
"""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from anybatch.cli.allocator import glibc, settings_of
from benchmarks.environment import environment
from benchmarks.outofcore.floors import cell
from benchmarks.outofcore.floors.cell import Cell
from benchmarks.outofcore.floors.networks import ROWS, SMALL, made
from benchmarks.results import console, read, write

HERE = Path(__file__).parent
GRID, LEAST = 1.04, 1 << 20
"""Ratio of two limits that are tried, and the least first one, in bytes."""
IN_FLOAT64, COMPARED = 2304, 10_000
"""Lengths up to which gradients are compared with those in float64, and at all."""
OURS = "anybatch"


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns in a process of its own; None where that was killed."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.outofcore.floors.cell"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool:
            return None


def floor(one: Cell) -> dict[str, Any]:
    """Return the steps of a cell at its least limit, which is found in steps of `GRID`.

    The search begins at the growth of a process without a limit.
    """
    free = apart(cell.run, one)
    fits, limit = None, max(free["grown"], LEAST)
    while fits is None:
        found, limit = apart(cell.run, replace(one, limit=limit, truth=None)), int(limit * GRID)
        fits = found and {"limit": int(limit / GRID), **found}
    while found is not None:
        limit = int(fits["limit"] / GRID)
        found = apart(cell.run, replace(one, limit=limit, truth=None))
        fits = {"limit": limit, **found} if found else fits
    return {"error": free.get("error"), **fits}


def row(name: str, length: int, rounds: int) -> dict[str, Any]:
    """Return every way of one network and length."""
    with tempfile.TemporaryDirectory() as folder:
        path = None
        if name == "U-Net" or length < COMPARED:
            path, exact = f"{folder}/truth", name == "U-Net" or length <= IN_FLOAT64
            apart(cell.truth, name, length, torch.float64 if exact else torch.float32, path)
        cells, found = {}, {}
        for way, (flags, live) in apart(cell.settings, name, length).items():
            cells[way] = Cell(name, length, flags, flags, truth=path)
            found[way] = {"live": live, "flags": asdict(flags)}
        plan, budget, text = apart(cell.planned, name, length)
        short, _, _ = apart(cell.planned, name, SMALL[name])
        cells[OURS] = ours = Cell(name, length, plan, short, truth=path)
        found[OURS] = {"budget": budget, "plan": text, "live": apart(cell.live, ours)}
        for way, one in cells.items():
            found[way] |= floor(one)
            mib = found[way]["limit"] / 2**20
            console.print(name, length, way, f"{mib:.1f} MiB", found[way]["processor"])
    parameters = sum(p.nbytes for p in made(name, length).network.parameters())
    for way in compared(found):
        held = parameters + found[way]["live"]
        found[way]["equal"] = equal(cells[way], found[way]["limit"], held, ours, rounds)
        console.print(name, length, way, found[way]["equal"])
    return {"network": name, "length": length, "parameters": parameters, "ways": found}


def compared(found: dict[str, Any]) -> list[str]:
    """Return the peers to compare seconds with: the fastest one, and the one that needs least.

    Of those that need as much as anybatch, but not as much as a plain step.
    """
    least, most = found[OURS]["limit"], found["plain"]["limit"]
    peers = [way for way in found if way != OURS and least <= found[way]["limit"] < most / GRID]
    keys = ("processor", "limit")
    every = [min(peers, key=lambda way: found[way][key]) for key in keys if peers]
    return list(dict.fromkeys(every))


def equal(peer: Cell, limit: int, budget: int, ours: Cell, rounds: int) -> dict[str, Any]:
    """Return anybatch's time in a budget over that of a peer; of its least where it is refused.

    Args:
        peer: at its least.
        limit: of the peer, in which anybatch's steps should end, too.
        budget: live bytes of the peer.
        ours: a cell of anybatch.
        rounds: pairs of processes, which alternate.
    """
    plan, given, text = apart(cell.planned, peer.network, peer.length, budget)
    own = replace(ours, way=plan, truth=None)
    fits = apart(cell.run, replace(own, limit=limit)) is not None
    cells, pairs = [replace(one, truth=None, steps=3) for one in (peer, own)], []
    for at in range(rounds):
        first, second = (apart(cell.run, one) for one in cells[:: 1 - at % 2 * 2])
        theirs, found = (second, first) if at % 2 else (first, second)
        pairs.append([found[clock] / theirs[clock] for clock in ("processor", "wall")])
    processor, wall = (median(ratios) for ratios in zip(*pairs, strict=True))
    times = {"processor": processor, "wall": wall}
    return {**times, "fits": fits, "refused": given > budget, "plan": text}


def main(
    *,
    quick: bool = False,
    out: Annotated[Path, typer.Option(help="folder of results.json")] = HERE,
    rounds: Annotated[int, typer.Option(help="pairs of processes at equal memory")] = 2,
    only: Annotated[str, typer.Option(help="rows to run, as Llama:512; others are kept")] = "",
) -> None:
    """Run all rows, and write results.json after each."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    os.environ.clear()
    os.environ |= {**ours, **settings_of("tight", glibc()), "OMP_NUM_THREADS": "1"}
    every = [(name, length) for name, lengths in ROWS.items() for length in lengths]
    every.sort(key=lambda key: ROWS[key[0]].index(key[1]))  # the short ones first
    if quick:
        every = [("block", 64)]
    if only:
        every = [(n, int(at)) for n, at in (one.split(":") for one in only.split(","))]
    rows = {(one["network"], one["length"]): one for one in _kept(out)}
    for name, length in every:
        rows[name, length] = row(name, length, rounds)
        kept = sorted(rows, key=lambda key: ([*ROWS].index(key[0]), key[1]))
        write(
            out / "results.json",
            {"rows": [rows[key] for key in kept], "environment": environment()},
        )


def _kept(out: Path) -> list[dict[str, Any]]:
    found = read(out / "results.json")
    return found["rows"] if found else []


if __name__ == "__main__":
    typer.run(main)
