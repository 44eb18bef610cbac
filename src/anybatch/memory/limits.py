"""Limits of memory: the default budget of a step, and segments of a device that can grow.

On the CPU a process can be limited by its control group, by ``setrlimit``, and by the free memory
of the machine; the lowest limit ends the training, and a control group by a kill that no program
can catch. A fifth of it is not used. On a GPU it is the free memory that the driver reports, less a
twentieth: the allocator rounds up, and libraries take workspace.

    budget = what the tensors of the process hold now + share * what is left

The processes that torchrun starts on one machine share the free memory of the machine, and of a
control group: each uses its part. A GPU belongs to one rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from anybatch.core import accelerator

if sys.platform != "win32":
    import resource

SHARE_CPU = 0.8
SHARE_THERE = 0.95


def available_memory(device: torch.device, share: float | None = None) -> tuple[int, str]:
    """Return the bytes that a step may still allocate on `device`, and the limit's name.

    Args:
        device: whose memory.
        share: of the free memory. Default None: all but a fifth on the host, else a twentieth.

    Returns:
        ``(bytes, words)``.

    Raises:
        ValueError: the system does not report it.
    """
    there = accelerator.of(device)
    if not there.host:
        return _of(share, SHARE_THERE, there.left(device), f"free on {device}")
    limits = sorted(_shared(_host_limits(Path("/"))))
    if not limits:
        raise ValueError(
            "memory= must be given where the system does not report its free memory, such as "
            f'memory="4GiB", and it is None on {device}'
        )
    free, words = limits[0]
    return _of(share, SHARE_CPU, max(0, free), words)


def _of(share: float | None, default: float, free: int, words: str) -> tuple[int, str]:
    """Return the bytes of a share of the free memory, and the words of it."""
    if share is None:
        return int(default * free), f"{words}, less {1 - default:.0%}".replace("%", " %")
    return int(share * free), f"{words}, {100 * share:g} % of it"


class MemoryLimit:
    """Limit of the memory that this process may take in addition, enforced by the system.

    An accelerator's allocator has it from now on; the host has it inside ``with limit:`` only.

    Args:
        device: whose memory.
        nbytes: bytes, in addition to those that it has when the limit is made.

    Raises:
        ValueError: the system has no such limit for the device.

    Example:
        >>> limit = MemoryLimit(torch.device("cpu"), 2**30)
        >>> with limit:
        ...     loss_fn(model(x), y).backward()
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        there = accelerator.of(device)
        self._most: int | None = None
        if not self.possible(device):
            raise ValueError(
                "a limit needs a device whose memory the system can limit, cuda, or cpu on Linux, "
                f"and it is {device} on {sys.platform}: leave the limit out"
            )
        if there.facts.limits:
            there.limit(nbytes, device)
        else:
            self._most = 1024 * _fields(Path("/proc/self/status"))["VmData"] + nbytes

    @staticmethod
    def possible(device: torch.device) -> bool:
        """Say whether the system can limit the memory of a `device`."""
        there = accelerator.of(device)
        return there.facts.limits or (there.host and sys.platform == "linux")

    def __enter__(self) -> None:
        if self._most is not None:
            self._before = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (self._most, self._before[1]))

    def __exit__(self, *error: object) -> None:
        if self._most is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._before)


def _shared(limits: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Yield the part of one rank of those that torchrun has started on this machine."""
    launched = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched else 1
    for free, words in limits:
        unshared = ranks == 1 or words.startswith("RLIMIT")
        yield (free, words) if unshared else (free // ranks, f"{words}, for each of {ranks} ranks")


def _host_limits(root: Path) -> Iterator[tuple[int, str]]:
    """Yield ``(bytes left, the limit's name)``; `root` is the folder of the system's files."""
    info = _fields(root / "proc/meminfo")
    if "MemAvailable" in info:
        yield info["MemAvailable"] * 1024, "memory available"
    elif hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        yield os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "memory available"
    yield from _of_control_groups(root)
    if sys.platform == "win32":
        return
    used = _fields(root / "proc/self/status")
    for name, limit_name in (("VmSize", "RLIMIT_AS"), ("VmData", "RLIMIT_DATA")):
        limit = resource.getrlimit(getattr(resource, limit_name))[0]
        if limit != resource.RLIM_INFINITY and name in used:
            yield limit - used[name] * 1024, limit_name


def _of_control_groups(root: Path) -> Iterator[tuple[int, str]]:
    """Yield the bytes left in each control group, v1 or v2, of this process, and in its parents."""
    lines = _text(root / "proc/self/cgroup").splitlines()
    for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if kinds and "memory" not in kinds.split(","):
            continue
        base = root / ("sys/fs/cgroup" if not kinds else "sys/fs/cgroup/memory")
        names = ("memory.max", "memory.current")
        if kinds:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        inner = path.strip("/")
        for group in (base / inner, *(base / inner).parents):
            limit, used = _text(group / names[0]).strip(), _text(group / names[1]).strip()
            if limit.isdecimal() and used.isdecimal() and int(limit) < 1 << 60:
                yield int(limit) - int(used), "control group limit"
            if group == base:
                break


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of lines such as ``VmData:  123 kB``."""
    pairs = (line.split()[:2] for line in _text(path).splitlines() if ":" in line)
    return {p[0].rstrip(":"): int(p[1]) for p in pairs if len(p) == 2 and p[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# Expandable CUDA segments: memory made of pages, so that offloaded tensors fit on return.
#
# torch's allocator allocates segments and splits them. If tensors are offloaded and return all the
# time, the free parts of many segments are enough bytes and yet in no one piece: in simulation best
# fit loses a half of the held bytes, and pages a few hundredths
# (`benchmarks.simulators.fragmentation`). The paper has pages of its own for that, by virtual
# addresses; torch has them since 2.1, switched off:
#
#     PYTORCH_ALLOC_CONF=expandable_segments:True
#
# It holds for the whole process, and only for memory that is allocated afterwards. So a library
# must not switch it on silently; a plan states it. The command, which begins its own process,
# switches it on, unless the user has set it or memory has been allocated already.
#
# Source: Hayakawa and Narihira, section 4; torch, "Optimizing memory usage".

SETTING = "expandable_segments:True"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where a user sets it; the first one that is set counts."""


def segments_of(device: torch.device) -> Segments:
    """Return the memory segments of a device.

    Args:
        device: of CUDA; any other has nothing to ask for.

    Returns:
        An object with ``ask()``, which requests expandable segments for this process, unless a
        person has set them or it is too late, and returns the resulting state in words; and with
        ``in_words()``, the words that a plan has on it.
    """
    return Segments(device)


class Segments:
    """The segments of torch's allocator for a CUDA device; the host's memory is made of pages."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._there = device, accelerator.of(device)
        self._paged = self._there.host or not self._there.has("get_allocator_backend")

    def in_words(self) -> str:
        """Return how it is, and how to change it; empty where there is nothing to report."""
        if self._paged or self._there.allocator != "native":
            return ""
        if SETTING in _settings():
            return "CUDA memory is in expandable segments: fragments cost little"
        return (
            "CUDA memory is in segments of fixed size, and what is free in them may be in too "
            f"small parts: {VARIABLES[0]}={SETTING} in the environment makes them expandable"
        )

    def ask(self) -> str:
        """Request pages, unless there is a setting or it is too late; return the state in words."""
        if self._paged:
            return ""
        settings, backend = _settings(), self._there.allocator
        if backend != "native":
            return f"CUDA segments: none, the allocator is {backend}"
        if "expandable_segments" in settings:
            return f"CUDA segments: as was set ({settings})"
        if self._there.reserved(self._device):
            return "CUDA segments: fixed (memory was taken before they could be made expandable)"
        chosen = f"{settings},{SETTING}" if settings else SETTING  # it replaces all that was set
        torch._C._accelerator_setAllocatorSettings(chosen)
        return "CUDA segments: expandable (offloaded and prefetched tensors leave no gaps)"


def _settings() -> str:
    """Return the allocator's settings: from torch, or in older versions from the environment."""
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is not None:
        return str(ask())
    return next((found for name in VARIABLES if (found := os.environ.get(name))), "")
