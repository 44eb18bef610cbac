"""Paragraphs of the help that Python itself ships, a byte a token: rows of very uneven length."""

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor

IGNORED = -100
"""The target of padding."""

LENGTH = 128
"""Tokens of a row; what is longer is cut."""

VOCABULARY = 128
HELD_OUT = 10
"""One paragraph in so many is for validation."""

Batch = tuple[Tensor, Tensor]


def paragraphs() -> tuple[list[bytes], list[bytes]]:
    """Return those to train on, and those held out."""
    every = [part.strip() for text in topics.values() for part in text.split("\n\n")]
    rows = sorted({part.encode("ascii", "replace")[: LENGTH + 1] for part in every})
    rows = [row for row in rows if len(row) > 1]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    held = [rows[i] for at, i in enumerate(order) if at % HELD_OUT == 0]
    return [rows[i] for at, i in enumerate(order) if at % HELD_OUT], held


def batch_of(rows: list[bytes]) -> Batch:
    """Return tokens and the tokens after them.

    Returns:
        Two int64 [n, longest]; targets of padding are -100.
    """
    longest = max(map(len, rows)) - 1
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    targets = torch.full((len(rows), longest), IGNORED)
    for row, (token, target) in zip(rows, zip(tokens, targets, strict=True), strict=True):
        every = torch.tensor(list(row))
        token[: len(row) - 1], target[: len(row) - 1] = every[:-1], every[1:]
    return tokens, targets


def batches(rows: list[bytes], size: int, seed: int) -> Iterator[list[bytes]]:
    """Yield `size` rows at a time without end, each epoch in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for at in range(0, len(rows) - size + 1, size):
            yield [rows[i] for i in order[at : at + size]]
