"""``torch.cuda`` of the stand-in: the functions that a build for the CPU leaves empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.cuda.amp.common

if TYPE_CHECKING:
    from tests.devices.device import Device

MAJOR, MINOR = 8, 0
DEVICE_TYPE = 1
"""c10's number of CUDA among the device types."""


def index_of(device: Any = None) -> int:
    """Return the index of a device given as torch takes it; None is the present one."""
    if isinstance(device, int):
        return device if device >= 0 else STATE.device.current()
    found = None if device is None else torch.device(device).index
    return STATE.device.current() if found is None else found


class State:
    """The device that is loaded, and whether a program has begun to use it."""

    device: Device
    begun = False


STATE = State()


class Stream(torch.Stream):
    """A stream, as ``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **named: Any) -> Stream:
        """Take a new one, or wrap one by its number."""
        if named:
            return super().__new__(cls, **named)
        place = torch.device("cuda", index_of(device))
        return super().__new__(cls, device=place, priority=priority)

    @property
    def cuda_stream(self) -> int:
        """Its number."""
        return self.stream_id

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event here."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    """An event, as ``torch.cuda.Event``."""

    def __new__(cls, enable_timing: Any = None, **_ignored: Any) -> Event:
        """Make one."""
        return super().__new__(cls, device="cuda", enable_timing=bool(enable_timing))

    def record(self, stream: Any = None) -> None:
        """Record it on a stream, or on the present one."""
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        """Let a stream, or the present one, wait for it."""
        super().wait(current_stream() if stream is None else stream)


def current_stream(device: Any = None) -> Stream:
    """Return the present stream of a device."""
    index = index_of(device)
    return Stream(stream_id=STATE.device.stream(index), device_index=index, device_type=DEVICE_TYPE)


def default_stream(device: Any = None) -> Stream:
    """Return the stream of a device that is there from the beginning."""
    return Stream(stream_id=0, device_index=index_of(device), device_type=DEVICE_TYPE)


def set_stream(stream: Any) -> None:
    """Make a stream the present one of its device, and that the present device."""
    STATE.device.set_current(stream.device_index)
    STATE.device.set_stream(stream.device_index, stream.stream_id)


class StreamContext:
    """The body runs on a stream; None changes nothing."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> StreamContext:
        if self.stream is not None:
            self.device = STATE.device.current()
            self.before = STATE.device.stream(self.stream.device_index)
            set_stream(self.stream)
        return self

    def __exit__(self, *_error: object) -> None:
        if self.stream is not None:
            STATE.device.set_stream(self.stream.device_index, self.before)
            STATE.device.set_current(self.device)


def exchange_device(index: int) -> int:
    """Make a device the present one, where the index is one; return the one before."""
    before = STATE.device.current()
    if index >= 0:
        STATE.device.set_current(index)
    return before


class Properties:
    """What a device says of itself."""

    name = "stand-in"
    major, minor = MAJOR, MINOR
    multi_processor_count = 4

    def __init__(self, index: int) -> None:
        self.total_memory = STATE.device.statistics(index)["cap"]


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the figures of the allocator that programs ask for."""
    now = STATE.device.statistics(index_of(device))
    active = now["live"] + now["held"]
    return {
        "allocated_bytes.all.current": now["live"],
        "allocated_bytes.all.peak": now["peak"],
        "active_bytes.all.current": active,
        "active_bytes.all.peak": now["active_peak"],
        "reserved_bytes.all.current": active,
        "reserved_bytes.all.peak": now["active_peak"],
        "requested_bytes.all.current": now["requested"],
        "num_ooms": now["failures"],
        "num_alloc_retries": 0,
    }


def _stat(name: str) -> Callable[..., int]:
    return lambda device=None: memory_stats(device)[name]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the bytes that are free, and all."""
    now = STATE.device.statistics(index_of(device))
    return now["cap"] - now["live"] - now["held"], now["cap"]


def begin(*_ignored: Any) -> None:
    """Note that a program uses the device, as torch does at the first call."""
    STATE.begun = True


def now(call: Callable[[], None], **_ignored: Any) -> None:
    """Do at once what torch does once CUDA is initialised."""
    call()


def fraction(share: float, device: Any = None) -> None:
    """Set the cap to a share of itself."""
    index = index_of(device)
    STATE.device.cap(int(share * STATE.device.statistics(index)["cap"]), index)


def patch(device: Device) -> None:
    """Fill ``torch.cuda``."""
    STATE.device = device
    cuda: Any = torch.cuda
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: STATE.begun or device.statistics(0)["allocations"] > 0,
        "init": begin,
        "_lazy_init": begin,
        "_lazy_call": now,
        "device_count": device.count,
        "current_device": device.current,
        "set_device": lambda requested: device.set_current(index_of(requested)),
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "synchronize": lambda requested=None: device.synchronize(index_of(requested)),
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "memory_stats": memory_stats,
        "memory_allocated": _stat("allocated_bytes.all.current"),
        "max_memory_allocated": _stat("allocated_bytes.all.peak"),
        "memory_reserved": _stat("reserved_bytes.all.current"),
        "max_memory_reserved": _stat("reserved_bytes.all.peak"),
        "reset_peak_memory_stats": lambda requested=None: device.reset_peak(index_of(requested)),
        "empty_cache": lambda: None,
        "mem_get_info": mem_get_info,
        "set_per_process_memory_fraction": fraction,
        "get_device_properties": lambda requested=None: Properties(index_of(requested)),
        "get_device_name": lambda _requested=None: Properties.name,
        "get_device_capability": lambda _requested=None: (MAJOR, MINOR),
        "get_allocator_backend": lambda: "native",
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_requested, **_named: True,
        "_sleep": lambda _cycles: None,
    }
    for name, function in functions.items():
        setattr(cuda, name, function)
    for name in ("_lazy_init", "_lazy_call", "current_device", "device_count", "is_initialized"):
        setattr(cuda.random, name, functions[name])
    cuda.memory.set_per_process_memory_fraction = fraction
    cuda.default_generators = tuple(device.generator(i) for i in range(device.most))
    cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.backends.cuda.is_built = lambda: True
    cudnn: Any = torch.backends.cudnn
    cudnn.is_available = lambda: True
    cudnn.is_acceptable = lambda tensor: torch.backends.cudnn.enabled and tensor.is_cuda
    cudnn.rnn.get_cudnn_mode = ("RNN_RELU", "RNN_TANH", "LSTM", "GRU").index
    torch._C._cuda_clearCublasWorkspaces = device.clear_workspaces
    _patch_storages()


def _patch_storages() -> None:
    resize, clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone

    def resize_(self: Any, count: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, count)
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # it is no kernel
            torch.ops.stand_in.resize_(self, int(count))
        return self

    def cloned(self: Any) -> Any:
        if self.device.type != "cuda":
            return clone(self)
        made = torch.empty(self.nbytes(), dtype=torch.uint8, device=self.device)
        return made.untyped_storage().copy_(self)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    torch.UntypedStorage.clone = cloned  # type: ignore[method-assign]
