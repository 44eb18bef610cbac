"""Tiny image folders, made on the spot, and the command as a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from anybatch.cli.cli import app

Make = Callable[..., Path]


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `plan --measure` measure few steps of the loop: how many is no matter of these tests."""
    monkeypatch.setattr("anybatch.cli.wanted.STEPS", 3)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run leave an empty page at its end: other tests look at what is on it."""
    monkeypatch.setattr("anybatch.cli.run_folder.page_of", lambda record: "")


@pytest.fixture
def classes(tmp_path: Path) -> Make:
    """Return a maker of DIR/<class>/*.png: dark and bright squares with noise."""

    def make(name: str = "data", count: int = 10, size: int = 12, parts: str = "") -> Path:
        draw = np.random.default_rng(0)
        for part in parts.split(",") if parts else [""]:
            for number, label in enumerate(("bright", "dark")):
                for index in range(count):
                    noise = draw.integers(0, 90, (size, size, 3))
                    pixels = (noise + (150 if number == 0 else 10)).astype(np.uint8)
                    save(tmp_path / name / part / label / f"{index}.png", pixels)
        return tmp_path / name

    return make


@pytest.fixture
def masks(tmp_path: Path) -> Make:
    """Return a maker of DIR/{image,label}/*.png: a bright square on grey noise, and its mask."""

    def make(name: str = "masks", count: int = 6, size: int = 32, value: int = 255) -> Path:
        draw = np.random.default_rng(1)
        for index in range(count):
            image = draw.integers(0, 80, (size, size)).astype(np.uint8)
            mask = np.zeros((size, size), np.uint8)
            top, left = draw.integers(0, size // 2, 2)
            mask[top : top + size // 2, left : left + size // 2] = value
            image[mask > 0] += 150
            save(tmp_path / name / "image" / f"{index}.png", image)
            save(tmp_path / name / "label" / f"{index}.png", mask)
        return tmp_path / name

    return make


@pytest.fixture
def command() -> Callable[..., Result]:
    """Return the command: its words in, exit code and both streams out."""
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    return lambda *words: runner.invoke(app, [str(word) for word in words])
