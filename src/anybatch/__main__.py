"""The command as a process of its own: `anybatch` where it is installed, or `python -m anybatch`.

Only here may the command start itself again with another host allocator (`cli.devices`); a
program that calls it is left as it is.
"""

from __future__ import annotations

import sys
from typing import NoReturn

LIBRARIES = ("typer", "rich", "jinja2", "PIL")
"""Modules of the extra `cli`."""


def _without(error: ModuleNotFoundError) -> NoReturn:
    if error.name not in LIBRARIES:
        raise error
    sys.exit(f"the command needs {error.name}, which is not installed: pip install 'anybatch[cli]'")


try:
    from anybatch.cli.cli import app
    from anybatch.cli.process import ENTRY, end_readers
except ModuleNotFoundError as error:
    _without(error)


def main() -> None:
    """Run the command with the words of this process."""
    try:
        app(obj=ENTRY)
    except ModuleNotFoundError as error:  # the code of a command is imported when it runs
        _without(error)
    finally:
        end_readers()


if __name__ == "__main__":
    main()
