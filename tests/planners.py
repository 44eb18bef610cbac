"""Planners that are told other seconds and bytes than those of the steps that ran."""

from __future__ import annotations

from typing import Any

import pytest

from anybatch.planner.planner import Planner


def instead(patch: pytest.MonkeyPatch, name: str, method: Any) -> Any:
    """Have planners use another method, and return their own."""
    real = getattr(Planner, name)
    patch.setattr(Planner, name, method)
    return real
