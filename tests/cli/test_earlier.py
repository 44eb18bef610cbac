from __future__ import annotations

from pathlib import Path

import pytest

from anybatch.cli.run_folder import Earlier

OLD = {"a": "old a", "b": "old b", "c": "old c"}


class Killed(BaseException):
    """The process ends here."""


def earlier(path: Path) -> Earlier:
    return Earlier(path, lambda name: name in OLD)


def fill(path: Path, names: str, text: str) -> None:
    for name in names:
        (path / name).write_text(f"{text} {name}")


def content(path: Path) -> dict[str, str]:
    return {at.name: at.read_text() if at.is_file() else "folder" for at in path.iterdir()}


def test_the_earlier_run_comes_back_or_goes(tmp_path: Path) -> None:
    fill(tmp_path, "abc", "old")
    (tmp_path / "notes").write_text("mine")
    before = content(tmp_path)
    earlier_run = earlier(tmp_path)
    earlier_run.set_aside()
    assert earlier_run.waits()
    assert content(tmp_path) == {"notes": "mine", ".earlier": "folder"}
    fill(tmp_path, "ab", "new")
    earlier_run.restore()
    assert content(tmp_path) == before
    earlier_run.set_aside()
    fill(tmp_path, "ab", "new")
    earlier_run.drop()
    assert not earlier_run.waits()
    earlier_run.restore()
    assert content(tmp_path) == {"notes": "mine", "a": "new a", "b": "new b"}


def test_without_an_earlier_run_nothing_is_made(tmp_path: Path) -> None:
    earlier_run = earlier(tmp_path)
    for act in (earlier_run.set_aside, earlier_run.drop, earlier_run.restore):
        act()
        assert content(tmp_path) == {}


def killed_at(count: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the process die before its `count`-th change of the folder."""
    calls: list[str] = []

    def before(name: str) -> None:
        real = getattr(Path, name)

        def act(self: Path, *rest: Path) -> object:
            if len(calls) == count:
                raise Killed
            calls.append(name)
            return real(self, *rest)

        monkeypatch.setattr(Path, name, act)

    for name in ("mkdir", "replace", "rmdir", "unlink"):
        before(name)
    return calls


@pytest.mark.parametrize("restored", [False, True])
def test_a_process_killed_at_any_point_loses_nothing(
    restored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, finished = 0, False
    while not finished:
        run = tmp_path / str(count)
        run.mkdir()
        fill(run, "abc", "old")
        with monkeypatch.context() as patch:
            calls = killed_at(count, patch)
            try:
                earlier(run).set_aside()
                fill(run, "ab", "new")
                if restored:
                    earlier(run).restore()
                finished = len(calls) < count
            except Killed:
                pass
        for _ in range(2):  # and the run after next finds the same
            earlier_run = earlier(run)
            earlier_run.set_aside()
            fill(run, "b", "newer")
        earlier_run.restore()
        assert content(run) == OLD, count
        count += 1
    assert count > (10 if restored else 5)


def test_a_run_killed_while_the_earlier_one_is_removed_is_the_one_to_keep(tmp_path: Path) -> None:
    fill(tmp_path, "ab", "new")
    (tmp_path / ".earlier.removing").mkdir()
    fill(tmp_path / ".earlier.removing", "c", "old")
    earlier_run = earlier(tmp_path)
    earlier_run.set_aside()
    earlier_run.restore()
    assert content(tmp_path) == {"a": "new a", "b": "new b"}
