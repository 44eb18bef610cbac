"""What a result was measured on: versions, processor, threads, malloc mode; no date, no host."""

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from anybatch.cli.allocator import running

Environment = dict[str, str | int]
PACKAGES = (
    *("torch", "numpy", "mbp-pytorch", "accelerate", "lightning", "transformers"),
    *("gradcache", "sentence-transformers", "timm", "torchvision"),
)
LARGE = str(1 << 30)  # bytes; glibc then keeps freed blocks instead of unmapping them
MALLOC: dict[str, dict[str, str]] = {
    "default": {},
    "large": {"MALLOC_MMAP_THRESHOLD_": LARGE, "MALLOC_TRIM_THRESHOLD_": LARGE},
}


def environment() -> Environment:
    """Versions and machine as a flat mapping, ready for a results file."""
    found: Environment = {"python": platform.python_version()}
    found |= {name: version for name in PACKAGES if (version := _version(name))}
    found |= {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "malloc": malloc_mode(),
    }
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found


def malloc_mode() -> str:
    """`large` where glibc's thresholds were raised, `default` where nothing was set, or `tight`."""
    mode = running(os.environ)
    return "large" if mode == "fast" else mode


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
