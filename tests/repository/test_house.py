"""The figures of the house may only become better, and are counted right."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import house

SOURCE = '''
"""What is here."""
from anybatch.{0} import thing
class Kept(Exception):
    """Something that somebody keeps."""
class Kept(Exception):
    # a comment
    def __init__(self, roomOf):
        try:
            self.size_given = 1
        except (Kept, ValueError):
            pass
'''


def test_no_figure_is_worse_than_the_last_one_that_was_written() -> None:
    assert house.worse(house.figures(house.House()), json.loads(house.WRITTEN.read_text())) == []


def test_worse_names_what_is_further_from_its_goal() -> None:
    before = dict.fromkeys(house.FIGURES, 0)
    assert house.worse({**before, "files": 90, "comment_lines": 9}, before) == []
    assert house.worse({**before, "files": 91}, before) == [
        "files of the library, without the command: 0 before, and 91 now"
    ]


def test_a_planted_source_is_counted(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "cli").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "core" / "room.py").write_text(SOURCE.format("memory"))
    (tmp_path / "cli" / "b.py").write_text(SOURCE.format("core"))
    found = house.House(tmp_path)
    assert found.upward() == 1
    assert sorted(found.internal()) == []
    (tmp_path / "cli" / "b.py").write_text("")
    found = house.House(tmp_path)
    assert found.internal() == {"Kept"}
    assert found.handlers() == 1
    assert list(map(bool, map(house.HEADLESS.search, found.summaries()))) == [True, True]
    banned = [name for name in found.names() if house.words(name) & house.BANNED]
    assert sorted(banned) == ["Kept", "Kept", "room", "roomOf", "size_given"]
