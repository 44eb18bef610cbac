"""The line to type where an integration's library is not there."""

from __future__ import annotations

from importlib import import_module


def require(extra: str, *libraries: str) -> None:
    """Raise, with the line to type, where one of `libraries` cannot be imported.

    Args:
        extra: the optional extra of anybatch that brings them.
        libraries: names to import.

    Raises:
        ImportError: one is missing.
    """
    for library in libraries:
        try:
            import_module(library)
        except ImportError as error:
            raise ImportError(
                f"anybatch.integrations.{extra} needs {library}, which is not installed: "
                f"pip install 'anybatch[{extra}]'"
            ) from error
