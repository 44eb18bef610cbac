"""How glibc keeps freed memory: chosen for a training on the CPU, before the process starts.

glibc maps every block over 32 MiB anew and unmaps it when it is freed. In training each step then
pays for its pages again, which can be half its time; and smaller blocks remain in the process after
they are freed. Two settings are better, each in one respect:

    fast    keep all that is freed: after some steps no page is new
    tight   map every block over half a MiB, in huge pages: what is freed goes back at once

torch cannot choose: glibc reads them from the environment before the first line of a program. So
the command starts itself again, once, with the environment of the mode. Only the command does, and
not if the user has set glibc's variables; a library must not change a process silently.

Source: glibc manual, "Malloc Tunable Parameters" and "Memory Allocation Tunables".
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mode = Literal["default", "fast", "tight"]
RequestedMode = Literal["auto", "default", "fast", "tight"]

LARGE = str(2**30)  # bytes; a larger block is still mapped anew
SMALL = str(2**19)  # bytes; a smaller block stays with the process when it is freed
TUNABLES = "GLIBC_TUNABLES"
HUGE_PAGES_SINCE = (2, 35)  # the glibc from which malloc asks for huge pages


@dataclass(frozen=True)
class AllocatorChoice:
    """Which mode a process is to run in, and why.

    `environment` is for starting it again; None does not start it again.
    """

    mode: str
    why: str
    environment: dict[str, str] | None = None

    def __str__(self) -> str:
        return f"malloc: {self.mode} ({self.why})"


def choose(device: str, *, budgeted: bool) -> Mode:
    """Return the mode for a training on `device`: tight under a memory budget of the CPU's."""
    return "tight" if budgeted and device == "cpu" else "fast"


def settings_of(mode: Mode, libc: tuple[int, ...]) -> dict[str, str]:
    """Return the environment variables of `mode` for the glibc of version `libc`."""
    if mode == "fast":
        return {"MALLOC_MMAP_THRESHOLD_": LARGE, "MALLOC_TRIM_THRESHOLD_": LARGE}
    if mode == "default":
        return {}
    huge = {TUNABLES: "glibc.malloc.hugetlb=1"} if libc >= HUGE_PAGES_SINCE else {}
    return {"MALLOC_MMAP_THRESHOLD_": SMALL, **huge}


def running(environment: Mapping[str, str]) -> str:
    """Return the mode that a process with this environment runs in: "own" if it is none of ours."""
    if not glibc():
        return "default"
    found = _set(environment)
    modes: tuple[Mode, ...] = ("default", "fast", "tight")
    return next((mode for mode in modes if found == settings_of(mode, glibc())), "own")


def decide(
    requested: RequestedMode, device: str, *, budgeted: bool, environment: Mapping[str, str]
) -> AllocatorChoice:
    """Decide which mode the command runs in, and whether it must start again for it."""
    now = running(environment)
    wanted = choose(device, budgeted=budgeted) if requested == "auto" else requested
    if not glibc():
        return AllocatorChoice(now, "the modes are of glibc, which this system does not use")
    if now == wanted:
        return AllocatorChoice(now, _reason(requested, device, budgeted=budgeted))
    found = _set(environment)
    if found:
        return AllocatorChoice(now, f"left as the environment says: {', '.join(sorted(found))}")
    new = {**environment, **settings_of(wanted, glibc())}
    return AllocatorChoice(wanted, _reason(requested, device, budgeted=budgeted), new)


def restart(environment: Mapping[str, str]) -> None:
    """Start this program again in this process, as it was started, with another environment."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], dict(environment))


def glibc() -> tuple[int, ...]:
    """Return the version of the C library, (2, 36) say; () when it is not glibc."""
    name, version = platform.libc_ver() if sys.platform == "linux" else ("", "")
    return tuple(int(part) for part in version.split(".")) if name == "glibc" else ()


def _reason(requested: RequestedMode, device: str, *, budgeted: bool) -> str:
    if requested != "auto":
        return "as --malloc says"
    if choose(device, budgeted=budgeted) == "tight":
        return "a budget of the host's memory: freed memory is returned at once"
    return "no budget of the host's memory: freed memory is retained, which saves page faults"


def _set(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say how memory is allocated; another allocator's too."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("MALLOC_")
        or name == TUNABLES
        or (name == "LD_PRELOAD" and "malloc" in value)
    }
