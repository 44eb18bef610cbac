"""The command as a process of its own: `anybatch` where it is installed, or `python -m anybatch`.

Only here may the command start itself again with another host allocator (`cli.process`); a
program that calls it is left as it is.
"""

from __future__ import annotations

from anybatch.cli.cli import app
from anybatch.cli.process import ENTRY


def main() -> None:
    """Run the command with the words of this process."""
    app(obj=ENTRY)


if __name__ == "__main__":
    main()
