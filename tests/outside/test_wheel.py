"""The wheel: built, installed into an empty environment outside the repository, and run there.

What works from a checkout may lack a file, a dependency or its type marker once it is packed. The
environment is new and has nothing of its own; torch and the other dependencies are seen through a
path file that comes after, so that nothing is downloaded. The build downloads its backend only
where hatchling is not installed.
"""

from __future__ import annotations

import email
import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import anybatch

ROOT = Path(__file__).parents[2]
THREE_LINES = """
import torch, anybatch
from torch.nn import CrossEntropyLoss, Linear
model, x, y = Linear(4, 3), torch.randn(7, 4), torch.randint(3, (7,))
engine = anybatch.Engine(model, CrossEntropyLoss(), micro_batch=3)
loss = engine.backward(x, y)
torch.testing.assert_close(loss, CrossEntropyLoss()(model(x), y).detach())
print(anybatch.__file__)
"""
PAGE = """
from anybatch.apps.report.known import Known
from anybatch.apps.report.page import page_of
print(page_of(Known("plan", {})))
"""


def run(command: list[str | Path], folder: Path) -> str:
    """Run a command in `folder`, without this checkout's paths, and return what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    here = ["--no-isolation"] if importlib.util.find_spec("hatchling") is not None else []
    run([sys.executable, "-m", "build", "--wheel", *here, "--outdir", folder, ROOT], folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel and nothing else, but sees what is installed here."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and path.suffix in (".py", ".typed", ".css", ".j2")
    }
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    assert "anybatch/py.typed" in names
    assert names == wanted


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (path,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        about = email.message_from_bytes(packed.read(path))
        licences = [name for name in packed.namelist() if name.endswith("/LICENSE")]
    assert (about["Name"], about["Version"]) == ("anybatch", anybatch.__version__)
    assert "torch>=2.11" in about.get_all("Requires-Dist", [])
    assert "# anybatch" in about.get_payload()
    assert licences


def test_the_command_runs(empty: Path) -> None:
    printed = run([empty / "bin" / "anybatch", "--version"], empty)
    assert printed == f"anybatch {anybatch.__version__}\n"


def test_a_step_runs(empty: Path) -> None:
    printed = run([empty / "bin" / "python", "-W", "error", "-c", THREE_LINES], empty)
    assert Path(printed.strip()).is_relative_to(empty)


def test_a_page_is_made(empty: Path) -> None:
    printed = run([empty / "bin" / "python", "-W", "error", "-c", PAGE], empty)
    assert printed.startswith("<!doctype html>")
    assert "prefers-color-scheme: dark" in printed
