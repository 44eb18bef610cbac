"""The mini-batch B of the paper, and the micro-batches it is split into (MBS, Eq. 1-3).

A mini-batch lies on the host in two ways: as tensors (`TensorBatch`: a micro-batch is a view of
its rows) or as a data set and indices (`LazyBatch`: a micro-batch is loaded when it runs, so the
mini-batch may be larger than the host's memory, up to the whole data set).

    mini-batch      |----- mu_0 -----|----- mu_1 -----|- mu_2 -|     the last one may be smaller
    rows            0               n                2n        N
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Number
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from anybatch.core import pytree
from anybatch.errors import BatchError, LossError


@dataclass(slots=True)
class MicroBatch:
    """Micro-batch: rows of the mini-batch that are streamed and computed on together.

    Attributes:
        inputs: tree of tensors [n, ...].
        targets: the same.
        size: n, how many rows.
        begin: the place of the first one in the mini-batch.
    """

    inputs: Any
    targets: Any
    size: int
    begin: int = 0

    def map(self, fn: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return the micro-batch with ``fn(tensor)`` in place of each tensor."""
        return replace(
            self,
            inputs=pytree.map_tensors(fn, self.inputs),
            targets=pytree.map_tensors(fn, self.targets),
        )

    def fingerprint(self) -> int:
        """Return a checksum of every bit of it: tensors, arrays, texts and numbers."""
        check = 0
        for _, leaf in pytree.leaves((self.inputs, self.targets)):
            check = zlib.crc32(bytes_of_leaf(leaf), check)
        return check


class Batch(Protocol):
    """Protocol of a mini-batch: its size, and its micro-batches in order, any number of times."""

    @property
    def size(self) -> int:
        """The number of samples N_B."""

    def micro_batches(self, micro_batch: int) -> Iterator[MicroBatch]:
        """Yield micro-batches of `micro_batch` samples, the last one smaller when ragged."""


@dataclass(frozen=True)
class TensorBatch:
    """A mini-batch of tensors on the host or the device; its micro-batches are views."""

    inputs: Any
    targets: Any
    size: int

    @classmethod
    def of(cls, inputs: Any, targets: Any, *, least: int = 1) -> TensorBatch:
        """Return the batch, or raise `BatchError` naming the leaves that do not fit.

        Args:
            inputs: tree of tensors [N_B, ...].
            targets: the same, or None.
            least: samples that it must hold.
        """
        if type(inputs) is type(targets) is Tensor and pytree.in_rows(inputs, targets, least):
            batch = cls(inputs, targets, inputs.shape[0])
            vars(batch)["bare"] = True
            if not (inputs.requires_grad or targets.requires_grad):
                vars(batch)["trained"] = ()
            return batch
        named = {"inputs": inputs} if targets is None else {"inputs": inputs, "targets": targets}
        size = pytree.batch_size(least=least, **named)
        inputs = pytree.marked(inputs, size, "inputs", arguments=True)
        return cls(inputs, pytree.marked(targets, size, "targets"), size)

    @cached_property
    def bare(self) -> bool:
        """Whether it is two tensors with rows."""
        both = type(self.inputs) is type(self.targets) is Tensor
        return both and bool(self.inputs.ndim and self.targets.ndim)

    @cached_property
    def form(self) -> tuple[tuple[str, int, torch.dtype], ...]:
        """Path, dimensions and dtype of every tensor, found once for all that ask in a step."""
        inputs, targets = self.inputs, self.targets
        if self.bare:
            return ("[0]", inputs.ndim, inputs.dtype), ("[1]", targets.ndim, targets.dtype)
        every = pytree.tensors((inputs, targets))
        return tuple([(path, tensor.dim(), tensor.dtype) for path, tensor in every])

    @cached_property
    def trained(self) -> tuple[Tensor, ...]:
        """The tensors that receive a gradient themselves, found once."""
        pair = self.inputs, self.targets
        every = pair if self.bare else pytree.flat(pair)
        return tuple([tensor for tensor in every if tensor.requires_grad])

    @property
    def hanging(self) -> set[Hung]:
        """Attributes of its tensors that their rows lack."""
        if not (hangs(self.inputs) or hangs(self.targets)):
            return set()
        return hanging(self.inputs, "inputs") | hanging(self.targets, "targets")

    def micro_batches(self, micro_batch: int) -> Iterator[MicroBatch]:
        """Yield views of `micro_batch` rows."""
        size, inputs, targets, bare = self.size, self.inputs, self.targets, self.bare
        for start in range(0, size, micro_batch):
            stop = min(start + micro_batch, size)
            if bare:  # `rows` of two tensors, without a call for each
                yield MicroBatch(inputs[start:stop], targets[start:stop], stop - start, start)
                continue
            some = pytree.rows(inputs, start, stop, size)
            yield MicroBatch(some, pytree.rows(targets, start, stop, size), stop - start, start)


def made_up(batch: Batch, size: int) -> MicroBatch:
    """Return rows of zeros in the form of a batch that has none.

    Raises:
        BatchError: the shapes of its rows are unknown.
    """
    if not isinstance(batch, TensorBatch):
        raise BatchError(
            "a rank without samples must know their shapes, and its LazyBatch holds none: pass "
            "tensors of shape [0, ...]"
        )
    for path, leaf in pytree.leaves(batch.inputs, "inputs"):
        if isinstance(leaf, pytree.ENTRIES):
            raise BatchError(
                f"a rank without samples must know their shapes, and {path} is an empty list: pass "
                "tensors of shape [0, ...]"
            )
    rows = pytree.map_tensors(
        lambda t: t.new_zeros((size, *t.shape[1:])) if t.dim() else t, batch.inputs
    )
    return MicroBatch(rows, None, size)


class LazyBatch:
    """Mini-batch that is never entirely in memory: samples of a data set, loaded when needed.

    Pass it as the inputs: ``engine.backward(LazyBatch(dataset))`` takes the entire data set as one
    batch. An item is a pair ``(input, target)``; with a loss inside the model (`Loss.inside`) an
    item is the input only.

    `collate_fn` pads to the longest sample of a micro-batch, not of the full batch, so a loss or
    model that counts padding gets another number than with the full batch. Where shapes differ
    between micro-batches the plan says "not shown"; pad to a fixed length. A function is refused if
    the rows of an item depend on the other items: the first step of each size, and of each
    function, loads the items once more, and collates them at once and in micro-batches. Of a batch
    above 512 MiB only a part is compared, and the plan says "not shown"; so it does if each call
    changes a number that the function stores. A number returned with the rows must not depend on
    the samples; one that differs between micro-batches is refused.

    Every pass over the batch seeds its `workers` from torch's global generator: each step draws
    its own augmentations, and both passes of one step draw the same.

    Args:
        dataset: any map-style ``torch.utils.data.Dataset``.
        indices: which samples, in order; None (default) is all of them.
        workers: processes that load ahead; 0 (default) loads in this process.
        collate_fn: makes a micro-batch of a list of items; None is torch's default.

    Raises:
        BatchError: `indices` is empty, or is None for a data set without a length.

    Source: MBS, section 4.3.2 (a batch "up to the total size of the dataset").
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        indices: Sequence[int] | None = None,
        *,
        workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if indices is None:
            if not isinstance(dataset, Sized):
                raise BatchError(
                    f"a lazy batch must know its samples, and {type(dataset).__name__} has no "
                    "length: pass indices=..."
                )
            indices = range(len(dataset))
        if len(indices) == 0:
            raise BatchError("a batch must hold at least one sample, and indices is empty")
        self.dataset = dataset
        self.indices = indices
        self.workers = workers
        self.collate_fn = collate_fn
        self.paired = True
        self._ragged = ""
        self._hanging: set[Hung] = set()
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()
        """Of one row of every input, as far as rows were loaded."""

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.indices)

    def __len__(self) -> int:
        return self.size

    def micro_batches(self, micro_batch: int) -> Iterator[MicroBatch]:
        """Load and yield micro-batches; the same ones whenever the RNG state is the same.

        This call seeds the loader at once; the first micro-batch is loaded when it is requested.

        Args:
            micro_batch: samples in a micro-batch; the last one may be smaller.

        Raises:
            BatchError: `collate_fn` changed the number of rows, or returned a number that depends
                on them; or an item is not a pair.
        """
        return self._loaded(micro_batch, int(torch.randint(2**31, ())))

    def _loaded(self, micro_batch: int, seed: int) -> Iterator[MicroBatch]:
        chunks = [
            list(self.indices[start : start + micro_batch])
            for start in range(0, self.size, micro_batch)
        ]
        loader = DataLoader(
            self.dataset,
            batch_sampler=chunks,
            num_workers=self.workers,
            collate_fn=self.collate_fn,
            generator=torch.Generator().manual_seed(seed),
        )
        numbers: dict[str, Any] = {}
        begin = 0
        shapes: dict[str, Any] = {}
        for item, chunk in zip(loader, chunks, strict=True):
            inputs, targets = collated(item, len(chunk), numbers, paired=self.paired)
            self._note_shapes(shapes, inputs, targets)
            self.shapes.add(row_shapes(inputs))
            if hangs((inputs, targets)):
                self._hanging |= hanging(inputs, "inputs") | hanging(targets, "target")
            yield MicroBatch(inputs, targets, len(chunk), begin)
            begin += len(chunk)

    def _note_shapes(self, shapes: dict[str, Any], inputs: Any, targets: Any) -> None:
        """Record the first tensor in which rows of another micro-batch have another shape."""
        for name, values in (("inputs", inputs), ("target", targets)):
            for path, leaf in pytree.leaves(values, name):
                if isinstance(leaf, pytree.ARRAYS):
                    first = shapes.setdefault(path, leaf.shape[1:])
                    if first != leaf.shape[1:] and not self._ragged:
                        self._ragged = path

    @property
    def hanging(self) -> set[Hung]:
        """Attributes of loaded tensors that their rows lack."""
        return self._hanging

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons why the loaded samples are not shown to be a part of the undivided batch."""
        if not self._ragged:
            return ()
        return (
            f"rows of {self._ragged} have other shapes in other micro-batches, and the undivided "
            "batch would be padded to the longest of all: let collate_fn pad to a fixed length",
        )


def row_shapes(tree: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shape of one row of every tensor."""
    return tuple(tuple(t.shape[1:]) for _, t in pytree.tensors(tree))


def collated(item: Any, items: int, numbers: dict[str, Any], *, paired: bool) -> tuple[Any, Any]:
    """Return inputs and targets of a result of `collate_fn`, lists marked, or refuse a faulty one.

    Args:
        item: of a micro-batch.
        items: that it was made of.
        numbers: those of the first micro-batch, by path.
        paired: it is a pair (input, target); else the input only.

    Raises:
        BatchError: it is no pair, or rows or numbers are not as they must be.
    """
    pair = isinstance(item, tuple | list) and len(item) == 2
    if paired and not pair:
        raise BatchError(
            f"an item of a lazy batch must be a pair (input, target), and it is "
            f"{type(item).__name__}: return pairs from the data set or from collate_fn"
        )
    inputs, targets = item if paired else (item, None)
    named = {"inputs": inputs} if targets is None else {"inputs": inputs, "target": targets}
    size = pytree.batch_size(**named)
    if size != items:
        raise BatchError(
            f"collate_fn must return as many rows as items, and it made {size} rows of {items} "
            "items. Drop samples from indices=, not in collate_fn"
        )
    inputs = pytree.marked(inputs, size, "inputs", arguments=True)
    targets = pytree.marked(targets, size, "target")
    for name, values in {"inputs": inputs, "target": targets}.items():
        for path, leaf in pytree.leaves(values, name):
            if isinstance(leaf, Number) or getattr(leaf, "ndim", None) == 0:
                pytree.check_constant(path, leaf, numbers.setdefault(path, leaf))
    return inputs, targets


def bytes_of_leaf(leaf: Any) -> bytes | memoryview:
    """Return every bit of a tensor, an array, a text or a number; nothing of another object."""
    if isinstance(leaf, Tensor):
        flat = leaf.detach().cpu().contiguous().reshape(-1)
        flat = flat.resolve_conj().resolve_neg()
        return flat.view(torch.uint8).numpy().data
    if isinstance(leaf, np.ndarray):
        return leaf.tobytes() if leaf.dtype != object else b""
    if isinstance(leaf, pytree.BySample):
        return leaf.bits()
    readable = isinstance(leaf, str | bytes | int | float | list | tuple)
    return repr(leaf).encode() if readable else b""


def count_micro_batches(size: int, micro_batch: int) -> int:
    """Return N_S, the number of micro-batches (MBS, Algorithm 1, line 5).

    Args:
        size: N_B, samples in the mini-batch.
        micro_batch: N_mu, samples in a micro-batch.
    """
    return math.ceil(size / micro_batch)


# Attributes and classes of tensors that their rows lack: a doubt, or an error by name.
#
# A user may write ``outputs.aux = ...`` in forward, or ``targets.scale = 2.0``, and read it in the
# loss. Rows that are cut, joined, copied to a device or faked are other tensors, and ``hasattr``
# would choose another loss for them. So a step with such a tensor is not shown; if the read fails,
# the error shows what to write.
#
#     outputs.aux, outputs.__class__      doubt: outputs has aux, which is no part of its rows

PLAIN = (Tensor, nn.Parameter)

OWN = ("torch", "anybatch")
"""Packages whose classes of tensors, and whose attributes, are no one's message to a loss."""


Hung = tuple[str, str]
"""The path of a tensor or a container, and the name of an attribute that rows lack."""


def hangs(values: Any) -> bool:
    """Return whether a tree may hold attributes that rows lack; runs for every micro-batch."""
    type_ = type(values)
    if type_ in PLAIN:
        return bool(values.__dict__)
    if type_ in pytree.LEAVES:
        return False
    if type_ is tuple or type_ is list:
        return any(map(hangs, values))
    return any(map(hangs, values.values())) if type_ is dict else True


def hanging(values: Any, path: str, *, classes: bool = False) -> set[Hung]:
    """Return the attributes of the tensors and containers of a tree that rows lack.

    Args:
        values: a tree.
        path: of it.
        classes: a user's class is named, too. Default False: rows are of that class.
    """
    found: set[Hung] = set()
    for at, one in _every(values, path):
        found.update((at, name) for name in _attributes(one))
        type_ = type(one)
        if classes and isinstance(one, Tensor) and type_.__module__.split(".")[0] not in OWN:
            found.add((at, f"the class {type_.__name__}"))
    return found


def doubts_of(found: set[Hung]) -> tuple[str, ...]:
    """Return the doubts of a step with tensors that have attributes that rows lack."""
    if not found:
        return ()
    return tuple(
        f"{at} has {name}, which hangs on the tensor or its container and is no part of its rows: "
        "pass it beside it, in a tuple or a mapping"
        for at, name in sorted(found)
    )


def refuse_missing(error: AttributeError, found: set[Hung]) -> None:
    """Refuse to read an attribute that the full-batch tensor had and its rows lack.

    Raises:
        LossError: it names the attribute.
    """
    at = next((at for at, name in sorted(found) if name == error.name), None)
    if at is not None and isinstance(error.obj, Tensor):
        raise LossError(
            f"a loss or a model must read only its tensors, and {at}.{error.name} is an attribute, "
            f"which rows of a split batch do not have: return or pass it with {at}, in a tuple or "
            "a mapping"
        ) from error


def _every(values: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, values
    for key, child in pytree.children(values):
        yield from _every(child, path + key)


def _attributes(one: Any) -> list[str]:
    """Return the names of attributes that rows of a tensor or a container would not have."""
    held = getattr(one, "__dict__", {})
    if not held:
        return []
    if isinstance(one, Tensor):
        retained = set(one[:1].__dict__) if one.dim() and type(one) is not Tensor else set()
    elif dataclasses.is_dataclass(one) and not isinstance(one, Mapping):
        retained = {field.name for field in dataclasses.fields(one)} | set(dir(type(one)))
    elif isinstance(one, pytree.LISTS):
        retained = set(dir(type(one)))
    else:
        return []
    return [name for name in held if name not in retained and not name.startswith("_dynamo")]


def copied(micro: MicroBatch) -> MicroBatch:
    """Return the micro-batch with its own copies of its inputs."""
    inputs = pytree.map_tensors(
        lambda t: t if t.requires_grad else t.detach().clone(), micro.inputs
    )
    return replace(micro, inputs=inputs)


def first_rows(outputs: Any, micro: MicroBatch) -> tuple[Any, MicroBatch]:
    """Return the first two rows of outputs and targets, where each output holds rows first."""
    few, n = 2, micro.size
    if not all(one.dim() and len(one) == n for _, one in pytree.tensors(outputs)):
        return outputs, micro
    targets = pytree.rows(micro.targets, 0, few, n)
    return pytree.rows(outputs, 0, few, n), MicroBatch(micro.inputs, targets, min(few, n))
