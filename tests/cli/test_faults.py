"""Errors of the library, in the words of the command."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import Result

import anybatch
from anybatch.cli.faults import ARGUMENTS, in_options

SOURCE = Path(anybatch.__file__).parent


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("give micro_batch=64 or less, or leave it out", "give --micro-batch 64 or less, or leave"),
        ("micro_batch= instead of memory=, which", "--micro-batch instead of --memory, which"),
        ('give memory="12KiB" or more', "give --memory 12KiB or more"),
        ("offload='off', or", "--offload off, or"),
        ('Use batchnorm="local", or give micro_batch >= the batch size', None),
        ("name another one (spill=)", "name another one (--spill)"),
        ("name another folder (store=), or give more memory=", None),
        ("by anybatch.plan(spill=...) or by", "by --spill ... or by"),
        ("Engine(batchnorm='local') or", "--batchnorm local or"),
        (
            "the peak is >= 3, in_memory=3, memory was 4",
            "the peak is >= 3, in_memory=3, memory was",
        ),
        ("declare Loss.inside(count=...)", "declare Loss.inside(count=...)"),
    ],
)
def test_a_message_names_options_for_arguments(text: str, said: str | None) -> None:
    found = in_options(text)
    assert said is None or said in found
    assert said is not None or "=" not in found.replace(">=", "")


def test_the_budget_error_of_a_run_names_the_option(
    tmp_path: Path, command: Callable[..., Result]
) -> None:
    words = ("--batch-size", 256, "--epochs", 1, "--memory", "2MiB", "--micro-batch", 256)
    ended = command("train", *words, "--offload", "off", "--out", tmp_path / "run")
    assert ended.exit_code == 1
    assert "--micro-batch " in ended.stderr
    assert "micro_batch" not in ended.stderr


def messages() -> Iterator[str]:
    """Yield every text of the library that is no docstring."""
    for file in SOURCE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr) and id(node) not in bare:
                parts = [v.value if isinstance(v, ast.Constant) else "7" for v in node.values]
                yield "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and id(node) not in bare:
                yield str(node.value)


def test_no_message_of_the_library_keeps_an_argument() -> None:
    """An example is a call, such as `anybatch.Engine(model, loss, memory="6GiB")`: it is one."""
    names = [name for name in ARGUMENTS if name != "device"]
    found = [text for text in messages() if any(f"{name}=" in text for name in names)]
    assert len(found) > 30
    kept = [t for t in map(in_options, found) if any(f" {n}=" in t or f"({n}=" in t for n in names)]
    assert not kept
