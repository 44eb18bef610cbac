"""A cap that is real: what a training may take beside what it holds when model and data are ready.

A training that is told how much it may use can be believed; one that is killed when it uses more
need not be. On the CPU the kernel refuses memory above RLIMIT_DATA, which counts every private
writable page of the process:

    limit = VmData when model, optimizer and data are ready + cap + what the host holds

The cap stands for the device of the paper, so what would lie in host memory there comes on top:
the decoded images and the mini-batch itself, three times, because the loader holds the views and
their stack while the loop still holds the last mini-batch; and where micro-batches wait for each
other, the stack of each one's thread, which the kernel counts whole, used or not: 8 MiB by default,
so that a step of 64 would need half a GiB of nothing. On CUDA the cap is torch's own limit on its
allocator.

Source: getrlimit(2); MBS, section 4.2.1, where the cap is the 24 GB of an RTX 3090.
"""

import ctypes
import resource
from pathlib import Path
from typing import Protocol

import torch

from anybatch.cli.build import RunParts
from anybatch.cli.data import CACHE_BYTES, sample_bytes

COPIES = 3  # of a mini-batch on the host
STACK = 256 * 1024  # bytes, of a thread that waits
PHRASES = (
    *("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc"),
    *("could not create a primitive", "could not create a memory", "unable to mmap"),
    "can't start new thread",
    *("failed to allocate", "alloc_failed", "memory allocation still failed", "memoryerror"),
)


class Limit(Protocol):
    """A limit that is not there until it begins."""

    def begin(self) -> None:
        """Refuse memory from now on."""

    def lift(self) -> None:
        """Refuse it no longer."""


class DataLimit:
    """RLIMIT_DATA of this process at `more` bytes above what it has when the limit begins."""

    def __init__(self, more: int) -> None:
        self.more = more
        self.before = resource.getrlimit(resource.RLIMIT_DATA)

    def begin(self) -> None:
        """Set the soft limit; the hard one stays, so that it can be lifted.

        What the heap holds free is given back first, so that it is no room beside the cap.
        """
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
        if trim is not None:
            trim(0)
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + self.more, self.before[1]))

    def lift(self) -> None:
        """Put back the limit that was there before."""
        resource.setrlimit(resource.RLIMIT_DATA, self.before)


class CudaLimit:
    """At most `cap` bytes of the device for torch's allocator in this process."""

    def __init__(self, device: torch.device, cap: int) -> None:
        self.device, self.cap = device, cap

    def begin(self) -> None:
        """Set the share; what the allocator has cached is given back first."""
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.cap / total), self.device)

    def lift(self) -> None:
        """Allow the whole device."""
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)


def make_limit(parts: RunParts, batch: int, cap: int, lanes: int = 0) -> Limit:
    """Return the limit for a training of `parts` in mini-batches of `batch`, not yet begun.

    `lanes` are the threads of a step, each with a stack of `STACK` bytes.
    """
    if parts.device.type == "cuda":
        return CudaLimit(parts.device, cap)
    return DataLimit(cap + host_bytes(parts, batch) + lanes * STACK)


def data_bytes() -> int:
    """Return VmData of this process: what RLIMIT_DATA is compared with."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("VmData"))
    return int(kib) * 1024


def host_bytes(parts: RunParts, batch: int) -> int:
    """Return the bytes of the decoded images and of `COPIES` mini-batches."""
    sources = (parts.data.train, parts.data.test)
    decoded = sum(min(CACHE_BYTES, len(source) * sample_bytes(source)) for source in sources)
    height, width = parts.train.crop
    image = parts.data.in_channels * height * width * 4
    target = height * width * 4 if parts.data.task == "segmentation" else 8
    return decoded + COPIES * batch * (image + target)


def is_memory_failure(error: BaseException) -> bool:
    """Say whether an error means that memory was refused, by its type or by its words."""
    return isinstance(error, MemoryError) or says_no_memory(str(error))


def says_no_memory(text: str) -> bool:
    """Say whether `text` is a library's way of saying that memory was refused."""
    return any(phrase in text.lower() for phrase in PHRASES)
