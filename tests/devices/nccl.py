"""A process group that calls itself NCCL: gloo's, over aliases of the stand-in's memory.

As NCCL it takes tensors of the device alone, runs on a stream of its own, and makes the present
stream wait only where somebody waits for the work.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.devices.cuda import Event, Stream, StreamContext, current_stream
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


class Options:
    """What a caller may set of a group; nothing is heeded but the timeout."""

    is_high_priority_stream = False
    _timeout = timedelta(minutes=10)
    global_ranks_in_group: Any = None
    group_name = ""
    split_from: Any = None
    split_color = 0


class Work(dist._Work):  # type: ignore[name-defined]
    """A collective that gloo has ended, and the device may not have."""

    def __init__(self, ended: Event) -> None:
        super().__init__()
        self._ended = ended

    def is_completed(self) -> bool:
        """Say that it has ended."""
        return True

    def wait(self, timeout: Any = None) -> bool:
        """Let the present stream wait for it."""
        self._ended.wait(current_stream())
        return True

    def get_future(self) -> Any:
        """Return a future that is done."""
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


class ProcessGroupNCCL(dist.ProcessGroup):  # type: ignore[misc]
    """Collectives over processes, each with its stand-in."""

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
        self._size, self._named = size, options.group_name
        self._stream: Any = None

    def size(self) -> int:
        """Return the ranks."""
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name that torch knows it by."""
        return "nccl"

    @property
    def group_name(self) -> str:
        """Name of the group."""
        return str(self._named)

    @property
    def pg_name(self) -> str:
        """Name of the group."""
        return str(self._named)

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: gloo counts for itself."""

    def _run(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], *inputs_on_host: Any
    ) -> Work:
        if any(t.device.type != "cuda" for t in (*outputs, *inputs)):
            raise RuntimeError("No backend type associated with device type cpu")
        if self._stream is None:
            self._stream = Stream(outputs[0].device)
        self._stream.wait_stream(current_stream())
        with StreamContext(self._stream):
            getattr(self._gloo, name)(*inputs_on_host).wait()
            for tensor in inputs:
                torch.ops.stand_in.used(tensor, False)
            for tensor in outputs:
                torch.ops.stand_in.used(tensor, True)
            for tensor in (*outputs, *inputs):
                tensor.record_stream(self._stream)
            ended = Event()
            ended.record(self._stream)
        return Work(ended)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Sum, or what is asked for, in place."""
        return self._run("allreduce", tensors, tensors, on_host(tensors), _or(opts, "Allreduce"))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Send those of one rank to all."""
        return self._run("broadcast", tensors, tensors, on_host(tensors), _or(opts, "Broadcast"))

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """Gather one tensor of each rank."""
        inputs_on_host = [on_host(some) for some in outputs], on_host(inputs)
        flat = [tensor for some in outputs for tensor in some]
        return self._run("allgather", flat, inputs, *inputs_on_host, _or(opts, "Allgather"))

    def all_gather_single(self, output: Tensor, part: Tensor, opts: Any = None) -> Work:
        """Gather into one tensor."""
        rows = list(output.view(-1).chunk(self._size))
        return self.allgather([rows], [part.view(-1)], opts)

    _allgather_base = all_gather_single

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self._gloo.barrier()


def on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Return the same memory as tensors of the host."""
    return [torch.ops.stand_in.on_host(tensor) for tensor in tensors]


def _or(value: Any, name: str) -> Any:
    return getattr(dist, f"{name}Options")() if value is None else value


def patch() -> None:
    """Let ``torch.distributed`` find it where NCCL would be."""
    module: Any = c10d
    module._NCCL_AVAILABLE = True
    module.ProcessGroupNCCL = ProcessGroupNCCL
    module.default_pg_nccl_timeout = timedelta(minutes=10)
    dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
