"""Systems that have less than Linux, as far as that can be taken away here.

A process imports torch and what else is installed, then becomes another system: `sys.platform` says
so, modules and functions that are not there cannot be had, and nothing may be read in /proc. Then
anybatch is imported and trains, with tensors away in a file. That is no run on such a system.
Windows has least; what macOS has less than Linux is among it.
"""

from __future__ import annotations

import subprocess
import sys

MISSING = """
os.O_DIRECT os.O_CLOEXEC os.pwrite os.pread os.preadv os.pwritev os.fork os.sysconf os.sysconf_names
os.sched_getaffinity os.posix_fadvise os.posix_fallocate os.getuid os.killpg os.setsid
signal.SIGKILL signal.SIGUSR1
"""
MODULES = "fcntl resource termios pwd grp"

PROGRAM = """
import pathlib, signal, sys, os
import torch, numpy, typer, rich, rich.progress, rich.console, jinja2, PIL.Image
import multiprocessing, concurrent.futures.process, tempfile, ctypes, mmap, shutil, platform
import torch._subclasses, torch.distributed, torch.utils.checkpoint, torch.distributed.tensor
import torch.distributed.fsdp, torch.utils.data, torch.distributed.algorithms.join, torch._dynamo
try:
    import triton
except ImportError:
    pass
system, missing, modules = sys.argv[1:]
for name in missing.split():
    owner, _, what = name.partition(".")
    if hasattr(globals()[owner], what):
        delattr(globals()[owner], what)
for name in modules.split():
    sys.modules[name] = None
real = pathlib.Path.read_text
def read_text(self, *args, **kwargs):
    if str(self).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "no such file", str(self))
    return real(self, *args, **kwargs)
pathlib.Path.read_text = read_text
sys.platform = system

import anybatch
import anybatch.cli.cli
from anybatch.tools.exactness import error_of, tolerance
from anybatch.memory.limits import available_memory
from anybatch.cli.run_folder import Lock

layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers).double()
x = torch.randn(2, 1024, 64, dtype=torch.float64)
loss = torch.nn.MSELoss()
plan = anybatch.plan(model, loss, (x, x), memory="6MiB", timed=False)
assert plan.offload.store == "file", plan
engine = anybatch.Engine(model, loss, plan=plan)
for _ in range(2):
    model.zero_grad()
    engine.backward(x, x)
assert engine.last.moved_bytes > 0
got = {name: p.grad.clone() for name, p in model.named_parameters()}
model.zero_grad()
loss(model(x), x).backward()
true = {name: p.grad for name, p in model.named_parameters()}
assert max(error_of(got, true).values()) <= tolerance()
try:
    print(available_memory(torch.device("cpu"))[1])
except ValueError as error:
    print(error)
lock = Lock(pathlib.Path(tempfile.mkdtemp()))
lock.take()
lock.release()
"""


def test_a_step_is_the_same_where_the_system_has_less() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, "win32", MISSING, MODULES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "memory= must be given where the system does not report" in ended.stdout
