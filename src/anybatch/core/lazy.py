"""Names of a public module that are imported when they are first read (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(
    module: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a public module.

    Type checkers read the names from its imports under `TYPE_CHECKING`, which must be the same
    (test_names_that_are_read_late_are_those_that_type_checkers_read).

    Args:
        module: its name.
        homes: of each module that defines some of its names, these names, between blanks; "" of
            names that are modules below it.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        home = home_of[name]
        found = getattr(import_module(home), name) if home else import_module(f"{module}.{name}")
        setattr(sys.modules[module], name, found)
        return found

    return get, lambda: sorted({*vars(sys.modules[module]), *home_of})
