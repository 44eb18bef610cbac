"""Recognition of out-of-memory errors, and release of the memory that such an error holds.

``torch.OutOfMemoryError`` is raised by the caching allocators only. The CPU allocator, oneDNN,
cuBLAS and cuDNN raise a plain RuntimeError that differs from a fault in the user's code only by its
message, and a library in between may wrap either. So messages are compared, along the chain of
causes. An exception holds its traceback, the traceback its frames, and the frames all tensors of
the failed attempt. So frames are cleared, which leaves the traceback readable.

    error ──> traceback ──> frame of forward ──> tensors         cleared: frames without locals
      └── __cause__, __context__ ──> the same again
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

import torch

from anybatch.errors import AnybatchError

WORDS = (
    "can't allocate memory",  # the CPU allocator
    "defaultcpuallocator: not enough memory",  # the same on other systems
    "std::bad_alloc",
    "could not create a memory",  # oneDNN
    "could not create a primitive",
    "cuda out of memory",
    "hip out of memory",
    "xpu out of memory",
    "mps backend out of memory",
    "cuda error: out of memory",  # from the driver: a context, a stream, a kernel's code
    "hip error: out of memory",
    "ur_result_error_out_of_device_memory",  # an XPU's runtime, from Level Zero or OpenCL
    "ur_result_error_out_of_host_memory",
    "cublas_status_alloc_failed",
    "hipblas_status_alloc_failed",
    "miopenstatusallocfailed",
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_host_allocation_failed",
    "cudnn_status_internal_error_device_allocation_failed",
)
"""Messages of a RuntimeError, in small letters, when memory ran out."""

NOT_THESE = ("could not create a primitive descriptor",)
"""oneDNN's word for an operation that it does not have."""


def out_of_memory(error: BaseException, *, outside: BaseException | None = None) -> bool:
    """Say whether `error`, or one that led to it, is that memory ran out.

    Args:
        error: any exception.
        outside: an exception that was being handled before; it led to nothing here.
    """
    return any(map(_says_so, _chain(error, outside)))


def release(error: BaseException, *, outside: BaseException | None = None) -> None:
    """Make `error` hold no tensor of the frames it came through, nor those that led to it.

    Args:
        error: an exception; frames that still run are not cleared.
        outside: as in `out_of_memory`; its frames are its owner's business.
    """
    for one in _chain(error, outside):
        traceback.clear_frames(one.__traceback__)


def forget(error: BaseException, *, outside: BaseException | None = None) -> None:
    """Release the frames of `error` too: it will be stored while the work goes on.

    A frame that has ended holds the one that called it, which will end with other tensors.

    Args:
        error: as in `release`.
        outside: as in `release`.
    """
    release(error, outside=outside)
    for one in _chain(error, outside):
        one.__traceback__ = None


class NothingHeld:
    """A context out of which an out-of-memory error comes without the tensors of the body."""

    def __enter__(self) -> None:
        self._outside = sys.exception()

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is not None and out_of_memory(error, outside=self._outside):
            release(error, outside=self._outside)
        self._outside = None


def _chain(error: BaseException, outside: BaseException | None) -> Iterator[BaseException]:
    visited = {id(outside)}
    ahead: list[BaseException | None] = [error]
    while ahead:
        one = ahead.pop()
        if one is not None and id(one) not in visited:
            visited.add(id(one))
            yield one
            ahead += [one.__cause__, one.__context__]


def _says_so(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):  # the kernel's word for it: an import, a worker that starts
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError) or isinstance(error, AnybatchError):
        return False  # ours may quote another rank, which ran out of its memory, not of this one's
    said = str(error).lower()
    if "cudnn" in said and "not enough workspace" in said:
        return True
    return any(words in said for words in WORDS) and not any(words in said for words in NOT_THESE)
