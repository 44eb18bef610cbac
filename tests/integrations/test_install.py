"""Where the library of an integration is missing, the error has the line to type."""

from __future__ import annotations

import importlib
import sys

import pytest

from anybatch.integrations.install import require


def test_a_missing_library_is_named_with_the_line_to_type() -> None:
    with pytest.raises(ImportError, match=r"no_such_library.*pip install 'anybatch\[lightning\]'"):
        require("lightning", "torch", "no_such_library")


def test_the_integration_cannot_be_imported_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "anybatch.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'anybatch\[transformers\]'"):
        importlib.import_module("anybatch.integrations.transformers")
