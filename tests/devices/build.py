"""The library of the stand-in: compiled once for its sources and the torch that is installed."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
COMPILERS = ("g++", "clang++")


class NoStandInError(Exception):
    """The stand-in cannot be had here; the message says what is missing."""


def torch_folder() -> Path:
    """Return the folder of torch, which is not imported for that."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def built() -> Path:
    """Return the path of the library, compiling it where no process has done so.

    Raises:
        NoStandInError: there is no compiler, or torch is not a build for the CPU.
    """
    version = importlib.metadata.version("torch")
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        raise NoStandInError(
            f"torch must be built for the CPU alone, and {version} is for CUDA, too"
        )
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoStandInError("a C++ compiler must be on the path (g++ or clang++), and none is")
    sources = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
    state = hashlib.sha256(b"\0".join([version.encode(), *(s.read_bytes() for s in sources)]))
    folder = Path(sys.prefix) / "stand_in"
    folder.mkdir(exist_ok=True)
    library = folder / f"{state.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, library)
    return library


def _compile(compiler: str, library: Path) -> None:
    torch = torch_folder()
    part = library.with_suffix(".part")
    subprocess.run(
        [
            *(compiler, "-std=c++20", "-O1", "-shared", "-fPIC"),
            *(str(HERE / "stand_in.cpp"), "-o", str(part)),
            f"-I{torch / 'include'}",
            f"-I{torch / 'include/torch/csrc/api/include'}",
            *(f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"),
        ],
        check=True,
    )
    part.replace(library)
    for other in library.parent.glob("*.so"):
        if other != library:
            other.unlink()


def loaded() -> ctypes.CDLL:
    """Load it, before torch is imported: torch asks for a device once.

    Raises:
        NoStandInError: as `built`, or torch has been imported.
    """
    if "torch" in sys.modules:
        raise NoStandInError("the stand-in must be loaded before torch, and torch is imported")
    path = built()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
