"""All accelerators of this process together: their generators, their autocast, their streams.

The state that a thread or a step passes to another includes that of every device in use. A device
that was not used yet is not touched: that would allocate memory on it, and a process that has used
CUDA cannot fork.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from anybatch.core.accelerator import DEFAULT, HOST, Accelerator, States, of, recognised
from anybatch.errors import NotYetError


def in_use() -> list[Accelerator]:
    """Return the accelerators that this process has used."""
    found = []
    for one in recognised():  # a comprehension would enter a frame of its own in every step
        if one.in_use:
            found.append(one)
    return found


def random_states() -> States:
    """Return the states of the generators of all accelerators in use.

    Those of a type without all verbs of generators are left out; a step there is refused.
    """
    every = in_use()
    return (
        tuple(state for _, states in _with_generators(every) for state in states) if every else ()
    )


def _with_generators(every: list[Accelerator]) -> Iterator[tuple[Accelerator, States]]:
    for one in every:
        with suppress(NotYetError):
            yield one, one.generators()


def require_generators(device: torch.device) -> None:
    """Require that the generators of a device's type can be stored, restored and seeded.

    Raises:
        NotYetError: they cannot.
    """
    there = of(device)
    if not there.host:
        there.generators()


def put_random_states(states: States) -> None:
    """Make these the states of the generators of their devices."""
    for name, state in states:
        of(name).put_random_state(state, torch.device(name))


def seed(number: int) -> None:
    """Seed the generators of all accelerators in use."""
    for one, _ in _with_generators(in_use()):
        one.seed(number)


def clear_workspaces() -> None:
    """Free the workspaces of libraries, of which each thread and stream has its own.

    cuBLAS takes 8 to 32 MiB for each: one for every waiting micro-batch was over the budget.
    """
    for one in in_use():
        one.clear_workspaces()


def autocast_types() -> tuple[str, ...]:
    """Return the device types for which a user may have switched on autocast."""
    every = (HOST.type, *(one.type for one in recognised()))
    return tuple(filter(torch.amp.is_autocast_available, every))


def streams() -> list[tuple[Accelerator, Any]]:
    """Return the present streams of this thread, in the order in which another is to enter them.

    Of other devices than the current one only streams that the user has made: entering a device's
    first stream creates a context there, which takes its memory.
    """
    found = list[tuple[Accelerator, Any]]()
    for one in in_use():
        with suppress(NotYetError):  # a link to such a device asks for the same, and is refused
            found += _streams(one) if one.streams else []
    return found


def _streams(one: Accelerator) -> list[tuple[Accelerator, Any]]:
    every = [one.current_stream(torch.device(one.type, k)) for k in range(one.count)]
    entered = [each for each in every if getattr(each, "stream_id", 0)]
    found = [*entered, one.current_stream()]
    for each in found:
        one.on(each)  # or none of them could be entered
    return [(one, each) for each in found]


def default_device() -> torch.device:
    """Return the device of training where none is named."""
    return torch.device(DEFAULT if of(DEFAULT).available else HOST.type)


def usable_device(name: str) -> torch.device:
    """Return the device of a name, such as "cuda:1", if torch can use it here.

    Args:
        name: of a device or of its type.

    Raises:
        ValueError: it cannot; the message is the reason in a few words.
    """
    try:
        device = torch.device(name)
        dataless = torch.empty(0, device=device).is_meta
        there = of(device)
        missing = not there.host and (device.index or 0) >= there.count
    except (RuntimeError, AssertionError, ImportError, AttributeError) as error:
        said = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ValueError(said[0].split(". ")[0].rstrip(".")) from error
    if dataless:
        raise ValueError("its tensors have no data")
    if missing:
        raise ValueError(f"of type {there.type} there are {there.count}, counted from 0")
    return device


def rank_device(name: str | None, local_rank: int) -> str | None:
    """Return the name of the device of one of several ranks on a machine.

    Args:
        name: as it is given to all of them: a type of device, or None for the default.
        local_rank: of this process among those of the machine.

    Returns:
        With accelerators of which each rank has its own, that of this rank; else `name`.

    Raises:
        ValueError: one such accelerator is named for all.
    """
    there = of(default_device() if name is None else name)
    if not there.facts.each:
        return name
    if name not in (None, there.type):
        raise ValueError(
            f"device must be {there.type} where several processes train, each on its own; got "
            f"{name}. Leave the number out"
        )
    return f"{there.type}:{local_rank}"


def choose_device(device: torch.device) -> str:
    """Make a `device` the present one of this thread; return the backend of its collectives."""
    there = of(device)
    there.choose(device)
    return there.backend


def with_plans() -> list[str]:
    """Return the host, and the available device types with an allocator that reports peaks."""
    return [HOST.type, *(one.type for one in recognised() if one.peaks and one.available)]


def forked_rng() -> AbstractContextManager[None]:
    """Return a context after which torch's generators are as they were before."""
    for one in recognised():
        with suppress(NotYetError):
            if one.available and one.count and one.generators():
                return torch.random.fork_rng(devices=range(one.count), device_type=one.type)
    return torch.random.fork_rng(devices=[])


def carrier(config: str) -> torch.device:
    """Return the device of tensors for the collectives of a process group.

    Args:
        config: such as "cpu:gloo,xpu:xccl", as ``torch.distributed.get_backend_config`` says.
    """
    if "gloo" in config:
        return torch.device(HOST.type)
    types = [entry.split(":")[0] for entry in config.split(",") if ":" in entry]
    return torch.device(next((name for name in types if not of(name).host), DEFAULT))


def cudnn_stream(device: torch.device) -> Any:
    """Return the present stream of a device as cuDNN takes it."""
    return of(DEFAULT).current_stream(device).cuda_stream


def library_switches() -> tuple[bool, bool, bool]:
    """Return how cuDNN chooses its kernels: whether it is used, measures, and is deterministic."""
    library = torch.backends.cudnn
    return library.enabled, library.benchmark, library.deterministic


def kernel_switches(device: str) -> list[bool]:
    """Return the settings on which the choice of a type's convolution kernels depends."""
    if not of(device).cudnn:
        return []
    return [*library_switches()[1:], torch.backends.cudnn.allow_tf32]
