"""All accelerators of this process together: their generators, their autocast, their streams.

What a thread or a step hands to another must hold that of every device in use, and there may be
one that was never asked for. A device that was not used yet is not touched: that would take memory
of it, and a process that has used CUDA cannot fork.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from anybatch.core.accelerator import DEFAULT, FACTS, HOST, Accelerator, States, known, of


def in_use() -> list[Accelerator]:
    """Return the accelerators that this process has used."""
    return [one for one in known() if one.in_use]


def random_states() -> States:
    """Return the states of the generators of all accelerators in use."""
    return tuple(state for one in in_use() for state in one.random_states())


def put_random_states(states: States) -> None:
    """Make these the states of the generators of their devices."""
    for name, state in states:
        of(name).put_random_state(state, torch.device(name))


def seed(number: int) -> None:
    """Seed the generators of all accelerators in use."""
    for one in in_use():
        one.seed(number)


def clear_workspaces() -> None:
    """Free the workspaces of libraries, of which each thread and stream has its own.

    cuBLAS takes 8 to 32 MiB for each: one for every waiting micro-batch was over the budget.
    """
    for one in in_use():
        one.clear_workspaces()


def autocast_types() -> tuple[str, ...]:
    """Return the device types for which a user may have switched on autocast."""
    return (HOST.type, *(one.type for one in known()))


def streams() -> list[tuple[Accelerator, Any]]:
    """Return the present streams of this thread, in the order in which another is to enter them.

    Of devices beside the present one these are only streams that a person has made: to enter a
    device's first stream makes a context there, which takes its memory.
    """
    found = list[tuple[Accelerator, Any]]()
    for one in in_use():
        if one.streams:
            every = [one.current_stream(torch.device(one.type, k)) for k in range(one.count)]
            found += [(one, each) for each in every if getattr(each, "stream_id", 0)]
            found.append((one, one.current_stream()))
    return found


def default_device() -> torch.device:
    """Return the device of training where none is named."""
    return torch.device(DEFAULT if of(DEFAULT).available else HOST.type)


def with_plans() -> list[str]:
    """Return the host, and the available device types with an allocator that reports peaks."""
    return [HOST.type, *(kind for kind in FACTS if of(kind).peaks and of(kind).available)]


def forked() -> AbstractContextManager[None]:
    """Return a context after which torch's generators are as they were before."""
    there = next((one for one in map(of, FACTS) if one.count), HOST)
    if there is HOST:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=range(there.count), device_type=there.type)


def carrier(config: str) -> torch.device:
    """Return the device of tensors for the collectives of a process group.

    Args:
        config: such as "cpu:gloo,xpu:xccl", as ``torch.distributed.get_backend_config`` says.
    """
    if "gloo" in config:
        return torch.device(HOST.type)
    types = [entry.split(":")[0] for entry in config.split(",") if ":" in entry]
    return torch.device(next((kind for kind in types if not of(kind).host), DEFAULT))


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
