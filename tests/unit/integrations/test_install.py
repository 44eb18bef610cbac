"""Where the library of an integration is missing, the error has the line to type."""

from __future__ import annotations

import importlib
import sys

import pytest

from anybatch.integrations.install import require


def test_a_missing_library_is_named_with_the_line_to_type() -> None:
    with pytest.raises(ImportError, match=r"no_such_library.*pip install 'anybatch\[lightning\]'"):
        require("lightning", "torch", "no_such_library")


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_the_integration_cannot_be_imported_without_it(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"anybatch.integrations.{library}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'anybatch\[{library}\]'"):
        importlib.import_module(f"anybatch.integrations.{library}")
