"""Helpers that keep a table by size: in a dict of their file, a default, an attribute, a class."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

CACHE: dict[Any, Tensor] = {}


class Tables:
    """Tables by size."""

    cache: dict[Any, Tensor] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.own: dict[Any, Tensor] = {}


TABLES = Tables()


def made(n: int, t: int) -> Tensor:
    return torch.ones(n, t, 1, dtype=torch.float64)


def of_file(n: int, t: int) -> Tensor:
    if (n, t) not in CACHE:
        CACHE[n, t] = made(n, t)
    return CACHE[n, t]


def of_default(n: int, t: int, cache: dict[Any, Tensor] = {}) -> Tensor:  # noqa: B006
    if (n, t) not in cache:
        cache[n, t] = made(n, t)
    return cache[n, t]


def of_attribute(n: int, t: int) -> Tensor:
    cache = vars(of_attribute).setdefault("kept", {})
    if (n, t) not in cache:
        cache[n, t] = made(n, t)
    return cache[n, t]  # type: ignore[no-any-return]


def of_class(n: int, t: int) -> Tensor:
    if (n, t) not in Tables.cache:
        Tables.cache[n, t] = made(n, t)
    return Tables.cache[n, t]


def of_object(n: int, t: int) -> Tensor:
    if (n, t) not in TABLES.own:
        TABLES.own[n, t] = made(n, t)
    return TABLES.own[n, t]


@lru_cache
def cached(n: int, t: int) -> Tensor:
    return made(n, t)


def hidden(n: int, t: int) -> Tensor:
    """Keep it where no name of the code leads to."""
    cache = sys.modules[__name__].__dict__.setdefault("_no_name", {})
    if (n, t) not in cache:
        cache[n, t] = made(n, t)
    return cache[n, t]  # type: ignore[no-any-return]


WAYS = [of_file, of_default, of_attribute, of_class, of_object, cached]


def forget() -> None:
    """Empty all of them."""
    for cache in (CACHE, Tables.cache, TABLES.own, of_default.__defaults__[0]):  # type: ignore[index]
        cache.clear()
    vars(of_attribute).clear()
    globals().pop("_no_name", None)
    cached.cache_clear()
