"""Types of devices, which no other file names but `absent`: CUDA, ROCm, XPU, MPS, the host, others.

Code that asks ``device.type == "cuda"`` treats an XPU as if it were the host. So all of this
library calls a verb here instead; the verb works, is made of others, or refuses by name.

    verb                works by                          without it
    stream, event       torch.<type>.Stream, .Event       copies in the one queue of the device
    synchronise         torch.<type>.synchronize          refused
    allocated           memory_allocated                  refused
    peak                max_memory_allocated              counted by the meter
    free and total      mem_get_info                      refused: memory= must be given
    random states       get_rng_state_all                 of each device, one by one
    pinned memory       torch.empty(pin_memory=True)      memory that is not pinned
    float64             sums on the device                sums on the host

``torch.accelerator`` has some of these verbs for every type; it is used where the module of the
type has none. A ROCm device is of type CUDA for torch, and is for this library.

Source: torch.accelerator, torch.get_device_module; c10/core/AllocatorConfig.h for the rounding.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anybatch.core.oom import out_of_memory
from anybatch.errors import NotYetError

States = tuple[tuple[str, Tensor], ...]
"""Names of devices, such as "cuda:0", and the states of their random generators."""

GENERIC = {
    "mem_get_info": "get_memory_info",
    "memory_allocated": "memory_allocated",
    "memory_reserved": "memory_reserved",
    "synchronize": "synchronize",
}
"""Functions of a module, and those of ``torch.accelerator`` that do the same."""


ABSENT = (RuntimeError, AttributeError, ImportError)
"""Errors of torch where it has no module for a type."""

FAILURES = (RuntimeError, AttributeError, AssertionError, TypeError)
"""Errors of functions that a build of torch, or a package, only declares."""


@dataclass(frozen=True)
class DeviceFacts:
    """Properties of a device type that no function of torch reports.

    Attributes:
        rounding: bytes; an allocation is rounded up to a multiple of them.
        float64: whether it has this dtype; None where each device says.
        pins: whether copies from the host want page-locked memory.
        peaks: whether its allocator records the peak.
        collectives: the backend of ``torch.distributed`` for it; None where there is none.
        each: whether each rank of a machine has a device of its own.
        foreach: whether torch's optimizers update all parameters at once there by default.
        limits: whether its allocator can be given a limit in bytes.
    """

    rounding: int = 512
    float64: bool | None = True
    pins: bool = False
    peaks: bool = False
    collectives: str | None = None
    each: bool = False
    foreach: bool = False
    limits: bool = False


FACTS = {
    "cuda": DeviceFacts(
        pins=True, peaks=True, collectives="nccl", each=True, foreach=True, limits=True
    ),
    "xpu": DeviceFacts(
        float64=None,
        pins=True,
        peaks=True,
        collectives="xccl",
        each=True,
        foreach=True,
        limits=True,
    ),
    # Metal rounds as it likes (heapBufferSizeAndAlign): a page of 16 KiB is assumed as its bound
    # (test_a_tensor_on_metal_takes_a_page).
    "mps": DeviceFacts(rounding=1 << 14, float64=False, collectives="gloo"),
}
"""Types of accelerators, in the order of the search."""

DEFAULT = "cuda"
"""The accelerator that is used where no device is named: the only type that has been run."""


class Accelerator:
    """One type of accelerator, by its module in torch.

    Args:
        device_type: the type, such as "xpu".

    Attributes:
        type: the same.
        facts: of it.
    """

    host = False
    """Whether its memory is the host's own: a pointer to it may be read by the host."""

    def __init__(self, device_type: str) -> None:
        self.type = device_type
        self.facts = FACTS.get(device_type, DeviceFacts(float64=None))
        self._draws_again = False

    @property
    def module(self) -> Any:
        """The module of torch, such as ``torch.xpu``.

        Raises:
            NotYetError: torch has none.
        """
        try:
            return torch.get_device_module(self.type)
        except ABSENT as error:
            raise NotYetError(
                f"a device of type {self.type} must have a module in torch, and torch.{self.type} "
                "is not there: import the package that brings it, or train on the CPU"
            ) from error

    def call(self, name: str, device: torch.device | None = None, *values: Any) -> Any:
        """Call a function of the module, or of ``torch.accelerator``, and return its result.

        Args:
            name: of the module's function.
            device: one of this type; None (default) where the function takes none.
            values: arguments before the device.

        Raises:
            NotYetError: neither has it, or it fails otherwise than for memory or in a kernel.
        """
        found = self._function(name)
        try:
            return found(*values) if device is None else found(*values, device)
        except FAILURES as error:
            if isinstance(error, torch.AcceleratorError) or out_of_memory(error):
                raise
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise NotYetError(
                f"a device of type {self.type} must have {name}, and that of torch.{self.type} "
                f"fails ({said}): train on another device, or on the CPU"
            ) from error

    def _function(self, name: str) -> Any:
        found = getattr(self.module, name, None)
        if found is None and name in GENERIC and _built() == self.type:
            found = getattr(torch.accelerator, GENERIC[name], None)
        if found is None:
            raise NotYetError(
                f"a device of type {self.type} must have {name}, and torch.{self.type} has not: "
                "train on another device, or on the CPU"
            )
        return found

    def has(self, *names: str) -> bool:
        """Say whether torch has the module, and the module all of these."""
        try:
            module = torch.get_device_module(self.type)
        except ABSENT:
            return False
        return all(hasattr(module, name) for name in names)

    def _says(self, *names: str) -> bool:
        """Return the answer of the first of these functions that is there; one that fails has none.

        Args:
            names: of functions of the module that take no device.
        """
        try:
            module = torch.get_device_module(self.type)
        except ABSENT:
            return False
        for name in names:
            function = getattr(module, name, None)
            if function is not None:
                try:
                    return bool(function())
                except FAILURES as error:
                    if isinstance(error, torch.AcceleratorError) or out_of_memory(error):
                        raise
                    return False
        return False

    @property
    def available(self) -> bool:
        """Whether torch can use one here; a module that fails counts as none."""
        return self._says("is_available")

    @property
    def in_use(self) -> bool:
        """Whether this process has used such a device; on MPS, whether one is available."""
        return self._says("is_initialized", "is_available")

    @property
    def count(self) -> int:
        """Devices of this type."""
        return int(self.call("device_count"))

    def choose(self, device: torch.device) -> None:
        """Make a device the present one of this thread."""
        if self.has("set_device"):
            self.call("set_device", device)

    @property
    def backend(self) -> str:
        """The backend of ``torch.distributed`` for tensors of such devices."""
        return self.facts.collectives or str(dist.get_default_backend_for_device(self.type))

    def describe(self, device: torch.device | None = None) -> str:
        """Return the name of a device's product; the type where the module has none."""
        return (
            str(self.call("get_device_name", device)) if self.has("get_device_name") else self.type
        )

    @property
    def streams(self) -> bool:
        """Whether copies may run concurrently with kernels, in a separate stream."""
        return self.has("Stream", "Event", "stream", "current_stream")

    def stream(self, device: torch.device) -> Any:
        """Return a new stream."""
        return self.call("Stream", device)

    def current_stream(self, device: torch.device | None = None) -> Any:
        """Return the stream of this thread; of the present device by default."""
        return self.call("current_stream", device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which kernels go to a stream."""
        found: AbstractContextManager[Any] = self.call("stream", None, stream)
        return found

    def event(self) -> Any:
        """Return a new event."""
        return self.call("Event")

    def synchronise(self, device: torch.device) -> None:
        """Wait for all work that is queued on a device."""
        self.call("synchronize", device if self.indexed else None)

    @property
    def indexed(self) -> bool:
        """Whether functions of the module take a device; there is one of MPS."""
        return self.type != "mps"

    @property
    def capturing(self) -> bool:
        """Whether the present stream is captured as a graph."""
        name = "is_current_stream_capturing"
        return self.has(name) and bool(self.call(name))

    @property
    def allocator(self) -> str:
        """The allocator's name where it can be chosen, such as "native"; else empty."""
        name = "get_allocator_backend"
        return str(self.call(name)) if self.has(name) else ""

    def allocated(self, device: torch.device) -> int:
        """Return the bytes of all tensors on a device."""
        if not self.indexed:
            return int(self.call("current_allocated_memory"))
        return int(self.call("memory_allocated", device))

    def reserved(self, device: torch.device) -> int:
        """Return the bytes that the allocator has reserved on a device."""
        if not self.indexed:
            return int(self.call("driver_allocated_memory"))
        return int(self.call("memory_reserved", device))

    @property
    def peaks(self) -> bool:
        """Whether the allocator reports `peak`; elsewhere the meter counts."""
        return self.facts.peaks or (
            self.type not in FACTS and self.has("max_memory_allocated", "reset_peak_memory_stats")
        )

    def peak(self, device: torch.device) -> int:
        """Return the bytes that were allocated at most since `reset_peak`."""
        return int(self.call("max_memory_allocated", device))

    def reset_peak(self, device: torch.device) -> None:
        """Let the peak begin anew."""
        self.call("reset_peak_memory_stats", device)

    def memory(self, device: torch.device) -> tuple[int, int]:
        """Return the bytes of a device that are free, and all of them.

        The recommended maximum of Metal for one process, less the memory of the driver.

        Raises:
            NotYetError: it does not say.
        """
        if not self.indexed:
            total = int(self.call("recommended_max_memory"))
            return max(0, total - self.reserved(device)), total
        try:
            free, total = self.call("mem_get_info", device)
        except NotYetError as error:
            raise self._silent(device) from error
        return int(free), int(total)

    def left(self, device: torch.device) -> int:
        """Return the bytes that tensors may take: free ones, and idle ones of the allocator."""
        return self.memory(device)[0] + self.reserved(device) - self.allocated(device)

    def limit(self, nbytes: int, device: torch.device) -> None:
        """Let the allocator take no more than this of a device."""
        name = "get_device_properties"
        sized = self.indexed and self.has(name)
        total = self.call(name, device).total_memory if sized else self.memory(device)[1]
        there = device if self.indexed else None
        self.call("set_per_process_memory_fraction", there, min(1.0, nbytes / total))

    def _silent(self, device: torch.device) -> NotYetError:
        return NotYetError(
            "memory= must be given where a device does not report its free memory, and it is None "
            f'on {device}: give memory="4GiB", or the memory of the device'
        )

    def random_state(self, device: torch.device) -> Tensor:
        """Return the state of a device's generator."""
        found: Tensor = self.call("get_rng_state", device)
        return found

    def put_random_state(self, state: Tensor, device: torch.device) -> None:
        """Make this the state of a device's generator."""
        self.call("set_rng_state", device, state)

    def random_states(self) -> States:
        """Return those of all devices of this type."""
        if self.has("get_rng_state_all"):
            found = self.call("get_rng_state_all")
        else:
            found = [self.random_state(torch.device(self.type, i)) for i in range(self.count)]
        return tuple((f"{self.type}:{i}", state) for i, state in enumerate(found))

    def seed(self, seed: int) -> None:
        """Seed the generators of all devices of this type.

        Raises:
            NotYetError: there are several, and the module seeds one.
        """
        one = self.has("manual_seed") and not self.has("manual_seed_all") and self.count == 1
        self.call("manual_seed" if one else "manual_seed_all", None, seed)

    def generators(self) -> States:
        """Return the states of all generators, which can be restored and seeded, too.

        Raises:
            NotYetError: one of these does not work: draws there could not be made again.
        """
        states = self.random_states()
        if not self._draws_again:  # tried once, and nothing is left of it
            self._put_back(states)
            try:
                self.seed(0)
            finally:
                self._put_back(states)
            self._draws_again = True
        return states

    def _put_back(self, states: States) -> None:
        for name, state in states:
            self.put_random_state(state, torch.device(name))

    def has_float64(self, device: torch.device) -> bool:
        """Say whether a device has float64."""
        if self.facts.float64 is not None:
            return self.facts.float64
        if self.has("get_device_properties"):
            return bool(getattr(self.call("get_device_properties", device), "has_fp64", True))
        return True

    def clear_workspaces(self) -> None:
        """Free cuBLAS's workspaces, where this type has it; each is made again when it is used."""
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if self.type == "cuda" and clear is not None:
            clear()

    @property
    def cudnn(self) -> bool:
        """Whether convolutions are cuDNN's."""
        return self.type == "cuda" and torch.version.hip is None


class Host(Accelerator):
    """The null object: the CPU computes while it is called, in memory that anybody may read."""

    host = True
    available = in_use = True
    streams = peaks = capturing = False
    allocator = ""
    count = 0

    def __init__(self, device_type: str = "cpu") -> None:
        self.type = device_type
        self.facts = DeviceFacts(rounding=1, collectives="gloo")

    def call(self, name: str, device: torch.device | None = None, *values: Any) -> Any:
        """Refuse: nothing here asks the host for a verb of a device.

        Raises:
            NotYetError: always.
        """
        del device, values
        raise NotYetError(f"{name} must be called for an accelerator, and this is the host")

    def choose(self, device: torch.device) -> None:
        """Do nothing."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext(stream)

    def synchronise(self, device: torch.device) -> None:
        """Do nothing: the host has waited."""

    def allocated(self, device: torch.device) -> int:
        """Return 0: the host's allocator does not say."""
        del device
        return 0

    def random_states(self) -> States:
        """Return nothing: the host's generator is `torch.get_rng_state`."""
        return ()

    def seed(self, seed: int) -> None:
        """Do nothing."""

    def has_float64(self, device: torch.device) -> bool:
        """Say that it has."""
        del device
        return True


HOST = Host()


def of(device: torch.device | str) -> Accelerator:
    """Return the accelerator of a device, passed as such or as a name like "cuda:1"."""
    return _of(device.type if isinstance(device, torch.device) else device.split(":")[0])


def finish(device: torch.device) -> None:
    """Wait for a device that computes on its own."""
    of(device).synchronise(device)


@cache
def _of(device_type: str) -> Accelerator:
    return Host(device_type) if device_type in ("cpu", "meta") else Accelerator(device_type)


def _built() -> str | None:
    """Return the type of accelerator that this torch was built for."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on the host where its device has none."""
    return tensor.to(home(tensor.device)).double()


def home(device: torch.device) -> torch.device:
    """Return the device of float64 sums over a device's tensors: itself, or the host."""
    return device if of(device).has_float64(device) else torch.device("cpu")


def recognised() -> list[Accelerator]:
    """Return the accelerators that torch knows, present or not."""
    built = _built()
    others = [] if built is None or built in FACTS else [built]
    return [*map(_of, (*FACTS, *others))]
