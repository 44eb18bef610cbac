"""The workspace as the system sees it: how far a process grows while a kernel is computed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20

CHILD = """
import json, os, resource, sys
import torch
from anybatch.conv.algorithms import native
from anybatch.core.plan_sections import Configuration, KernelPart
from anybatch.conv.algorithms import run
from anybatch.conv.measure import held
from anybatch.conv.problem import Problem

def resident(name):
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(name)]
    return int(line.split()[1]) * 1024

def grown(kernel, name, size):
    torch.set_num_threads(1)
    one = Problem(kernel, 32, 32, (96, 96), (15, 15), (1, 1), (7, 7), (1, 1), 32)
    best = Configuration((KernelPart(8, name, 1.0, held(one, 8, name)),) * 2)
    operands = tuple(torch.randn(shape) for shape in one.operands(size))
    few = tuple(t[:1] if t.shape != one.weight else t for t in operands)
    strides = native(one, *few).stride()
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    result = run(one, best, operands, torch.empty(one.result(size)).stride())
    return [best.workspace, result.nbytes, resident("VmHWM") - before]

for line in sys.stdin:
    if os.fork() == 0:  # imported already, and nothing computed
        print(json.dumps(grown(*line.split(), 16)), flush=True)
        os._exit(0)
    _, code = os.wait()
    if code:
        sys.exit(1)
"""


@pytest.fixture(scope="module")
def child() -> Iterator[subprocess.Popen[str]]:
    """Start what forks a process for each kernel that it is told."""
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "PATH": ""}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield process


@pytest.mark.large(few=2)
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a process's peak"
)
@pytest.mark.parametrize("kernel", ["forward", "data", "filter"])
@pytest.mark.parametrize("name", ["fft", "overlap_save"])
def test_a_process_grows_by_the_result_and_the_workspace(
    child: subprocess.Popen[str], kernel: str, name: str
) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{kernel} {name}\n")
    child.stdin.flush()
    reported = child.stdout.readline()
    assert reported, "the child has failed, and its error is above"
    workspace, result, grown = json.loads(reported)
    assert workspace > 10 * MIB
    assert 0.5 * workspace < grown <= workspace + result + 12 * MIB
