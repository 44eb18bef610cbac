"""Place of a draw in a program, by which the next step finds it again.

The k-th draw of a forward pass is another one once a layer is skipped at random. The call site does
not change: the chain of calls that leads to it, and the modules whose calls are among these. A
checkpointed part is recomputed under another chain; it is recognised by the RNG state, which
checkpointing restores (`anybatch.execution.full_batch_rng.mode`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from anybatch.errors import NotExactError

CALL: CodeType = nn.Module._call_impl.__code__
OUTSIDE = ("anybatch.execution.step", "anybatch.core.modules")
"""The modules that call the model: frames before them are the same for all draws."""

OURS = "anybatch.execution.full_batch_rng."
"""The modules that stand between a draw and its kernel."""

COMPILED = "compile_wrapper"
"""The function of torch in which compiled code is called."""


class Site(NamedTuple):
    """A place in a program.

    Attributes:
        chain: a number for each call, and for each module that is called.
        words: the innermost place in a file that is not torch's, for people.
        codes: keep the code objects of the ids alive.
    """

    chain: tuple[int, ...]
    words: str
    codes: tuple[CodeType, ...]


def site(modules: Collection[int]) -> Site:
    """Return the place in the program that requested the present draw.

    Args:
        modules: ids of the modules of the model; others come and go.

    Raises:
        NotExactError: it is in compiled code.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(OURS):
        frame = frame.f_back
    chain, codes, words = list[int](), list[CodeType](), ""
    while frame is not None and frame.f_globals.get("__name__") not in OUTSIDE:
        code = frame.f_code
        if code.co_name == COMPILED:
            raise NotExactError(
                "random draws of a compiled model cannot be those of the full batch: its kernels "
                'draw otherwise than what they were made of. Use rng="micro_batch", or do not '
                "compile"
            )
        chain += [id(code), frame.f_lasti]
        codes.append(code)
        if code is CALL:
            module = id(frame.f_locals.get("self"))
            chain.append(module if module in modules else 0)
        if not words and not _of_torch(frame):
            words = f"{code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}"
        frame = frame.f_back
    return Site(tuple(chain), words or "a module of torch", tuple(codes))


def _of_torch(frame: Any) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in (torch.__name__, "anybatch")
