"""Devices, memory, generators and ranks of this process, for programs that run a training.

An `Engine` finds all of this by itself. A program around it, such as the command, needs it to
choose a device or to plan for an absent one, to limit and count memory, to save RNG states, and to
agree with the other ranks.
"""

from anybatch.core.absent import AbsentDevice, absent, parse_device, planned_for
from anybatch.core.accelerators import (
    choose_device,
    default_device,
    forked_rng,
    rank_device,
    usable_device,
)
from anybatch.core.rng import RNGState
from anybatch.distributed.process_group import Group, group_of
from anybatch.memory.limits import MemoryLimit, available_memory, segments_of
from anybatch.memory.meter import live_peak

__all__ = [
    "AbsentDevice",
    "Group",
    "MemoryLimit",
    "RNGState",
    "absent",
    "available_memory",
    "choose_device",
    "default_device",
    "forked_rng",
    "group_of",
    "live_peak",
    "parse_device",
    "planned_for",
    "rank_device",
    "segments_of",
    "usable_device",
]
