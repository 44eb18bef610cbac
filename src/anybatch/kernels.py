"""Convolution kernels one by one: for programs that measure them before a training, or show them.

A training itself needs `anybatch.convolutions`, or ``Engine(workspace=...)``.
"""

from anybatch.conv.convolutions import kernel_devices
from anybatch.conv.dispatch import KernelRecorder, record_kernels
from anybatch.conv.divide import keys_of
from anybatch.conv.warm import KernelBenchmark, MeasuredKernel

__all__ = [
    "KernelBenchmark",
    "KernelRecorder",
    "MeasuredKernel",
    "kernel_devices",
    "keys_of",
    "record_kernels",
]
