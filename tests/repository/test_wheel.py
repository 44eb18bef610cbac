"""The release: sdist and wheel, installed into an empty environment elsewhere, and run there.

What works from a checkout may lack a file, a dependency or its type marker once it is packed. The
environment is new and has nothing of its own; torch and the other dependencies are seen through a
path file that comes after, so that nothing is downloaded. The build downloads its backend only
where hatchling is not installed. The wheel is built from the sdist, so that lacks nothing either.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

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
OF_COMMAND = "typer rich jinja2 PIL platformdirs"
PLAIN = f"""
import sys
for name in {OF_COMMAND!r}.split():
    sys.modules[name] = None
{THREE_LINES}
try:
    import anybatch.__main__
except SystemExit as ended:
    print(ended)
"""
EXTRAS = {
    "demo": ["sklearn"],
    "report": ["matplotlib"],
    "tensorboard": ["tensorboard"],
    "transformers": ["transformers", "accelerate"],
    "lightning": ["lightning"],
}
"""Extra -> what it brings; `conv-cuda` is used where it is there and missed nowhere."""


WITHOUT = """
import sys
for name in sys.argv[1].split():
    sys.modules[name] = None
import importlib, pathlib, tempfile, torch, anybatch, anybatch.cli.cli
from anybatch.cli.run_folder import ABSENT
from anybatch.cli.progress import RunLog
from anybatch.cli.report.parts import drawn
from anybatch.cli.data import digits
model = torch.nn.Linear(4, 3)
batch = torch.randn(7, 4), torch.randint(3, (7,))
assert anybatch.check(model, torch.nn.CrossEntropyLoss(), batch).exact
assert not RunLog(pathlib.Path(tempfile.mkdtemp())).start_events()
print(ABSENT.format("tensorboard"))
print(drawn(lambda: "").missing)
for call in (
    digits,
    lambda: importlib.import_module("anybatch.integrations.transformers"),
    lambda: importlib.import_module("anybatch.integrations.lightning"),
):
    try:
        call()
    except (ImportError, anybatch.errors.AnybatchError) as error:
        print(error)
"""
PAGE = f"""{THREE_LINES}
from anybatch.cli.report.record import RunRecord
from anybatch.cli.report.write import page_of
print(page_of(RunRecord("plan", {{}})))
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
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the sdist and of the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    here = ["--no-isolation"] if importlib.util.find_spec("hatchling") is not None else []
    run([sys.executable, "-m", "build", *here, "--outdir", folder, ROOT], folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


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


def contents(sdist: Path) -> dict[str, bytes]:
    """The files of an sdist, below its one folder."""
    with tarfile.open(sdist) as packed:
        files = [(member.name, packed.extractfile(member)) for member in packed]
        return {name.partition("/")[2]: file.read() for name, file in files if file is not None}


def test_the_sdist_holds_what_the_repository_does(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    assert sdist.name == f"anybatch-{anybatch.__version__}.tar.gz"
    found = set(contents(sdist)) - {"PKG-INFO"}
    completed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode:  # the tests of an sdist, which is no repository
        assert {"CHANGELOG.md", "LICENSE", "pyproject.toml", "src/anybatch/py.typed"} <= found
        return
    there = {name for name in completed.stdout.splitlines() if (ROOT / name).is_file()}
    left_out = {name for name in there if name.startswith(".ci/")}
    assert found == there - left_out


def test_both_say_what_they_are(built: Path, wheel: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as packed:
        (path,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        raw = packed.read(path)
        licences = [name for name in packed.namelist() if name.endswith("/LICENSE")]
    assert raw == contents(sdist)["PKG-INFO"]
    assert licences
    about = Metadata.from_email(raw, validate=True)  # every field, as the core metadata has it
    assert (about.name, str(about.version)) == ("anybatch", anybatch.__version__)
    assert (about.license_expression, about.license_files) == ("MIT", ["LICENSE"])
    assert "torch>=2.11" in map(str, about.requires_dist or [])
    assert about.requires_python is not None
    works = [minor for minor in range(9, 14) if f"3.{minor}" in about.requires_python]
    named = re.findall(r"Python :: 3\.(\d+)", " ".join(about.classifiers or []))
    assert works == list(map(int, named)) == [11, 12, 13]
    assert about.description_content_type == "text/markdown"
    assert "# anybatch" in (about.description or "")
    assert set(about.provides_extra or []) >= {*EXTRAS, "cli", "conv-cuda", "dev", "peers", "site"}
    plain = {one.name for one in about.requires_dist or [] if one.marker is None}
    assert plain == {"torch", "numpy"}


def test_the_changelog_is_of_this_version_and_can_be_read() -> None:
    parts = re.split(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert parts[1:5:2] == ["Unreleased", anybatch.__version__]
    assert max(text.count("\n") for text in parts) <= 90


def test_the_command_runs(empty: Path) -> None:
    printed = run([empty / "bin" / "anybatch", "--version"], empty)
    assert printed == f"anybatch {anybatch.__version__}\n"


def test_without_the_command_a_step_runs_and_the_command_says_what_to_install(empty: Path) -> None:
    printed = run([empty / "bin" / "python", "-W", "error", "-c", PLAIN], empty).splitlines()
    assert Path(printed[0]).is_relative_to(empty)
    assert printed[1:] == [
        "the command needs typer, which is not installed: pip install 'anybatch[cli]'"
    ]


def test_a_step_runs_and_a_page_is_made(empty: Path) -> None:
    printed = run([empty / "bin" / "python", "-W", "error", "-c", PAGE], empty)
    place, printed = printed.split("\n", 1)
    assert Path(place).is_relative_to(empty)
    assert printed.startswith("<!doctype html>")
    assert "prefers-color-scheme: dark" in printed


def test_without_extras_it_works_and_each_says_what_to_type(empty: Path) -> None:
    """A process in which no library of an extra can be imported."""
    hidden = " ".join(name for names in EXTRAS.values() for name in names)
    completed = run([empty / "bin" / "python", "-W", "error", "-c", WITHOUT, hidden], empty)
    for extra in EXTRAS:
        assert f"pip install 'anybatch[{extra}]'" in completed, extra
