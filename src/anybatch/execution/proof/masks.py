"""Masks: the set of samples that have had a part in each number of a tensor.

A mask is a uint8 tensor that broadcasts to the shape of its tensor. Bit i stands for sample i;
three more bits follow integers that speak of places among samples:

    bits 0-3   sample 0-3 has had a part in the number
    EARLIER    a sample of an earlier call has
    PLACE      the number is a place among samples (an index that ``nonzero`` or ``sort`` has made)
    LOOSE      the dimension of samples is in an order, or in a choice, that the samples have made
    CUT        the dimension of samples was cut by position

A tensor of rows [4, C] has the mask [[1], [2], [4], [8]]: it stays that small for as long as
samples do not meet. Masks are recorded by storage, so that views and writes in place share them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from anybatch.core.accelerator import of
from anybatch.memory.meter import take_in

SAMPLES, EARLIER, PLACE, LOOSE, CUT = 0x1F, 0x10, 0x20, 0x40, 0x80
ALL = 0x0F
"""Mark of a number that depends on no sample by its value, and on all by their places."""

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Types of numbers that may be places."""

ROWS = 4
"""The most samples that can be distinguished."""

FEW = 4096
"""Bytes of a mask that a meter counts only where there are more: a page."""

Origin = Callable[[], str]
"""Returns the operation in which samples first met."""

Geometry = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


# Results for small masks, each computed once.
#
# A network computes with few masks, in thousands of kernels: [[1], [2], [4], [8]] for each step of
# time, or layer. A mask of so many bits is one object, which nothing writes to and which is never
# given up, so its id stands for its bits.

SMALL, MOST = 512, 1 << 12
"""The most numbers of a mask that is kept so, and the most masks, and results of a function."""

_ONCE: dict[tuple[torch.Size, bytes], Tensor] = {}
_IDS: set[int] = set()


def once(mask: Tensor) -> Tensor:
    """Return the one mask of these bits where it is small and on the host; else the mask itself."""
    if id(mask) in _IDS or mask.numel() > SMALL or not of(mask.device).host:
        return mask
    if mask.dtype != torch.uint8 or torch._C._functorch.is_functorch_wrapped_tensor(mask):
        return mask
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        key = mask.shape, mask.numpy().tobytes()
        found = _ONCE.get(key)
        if found is None and len(_ONCE) < MOST:
            found = _ONCE[key] = mask.clone(memory_format=torch.contiguous_format)
            _IDS.add(id(found))
    return mask if found is None else found


def of_bits(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function of masks, and of values with a hash, compute once for the same small ones.

    Outside of all modes, so that no later call of it is another for who counts kernels.
    """
    results: dict[tuple[Any, ...], Any] = {}

    @wraps(compute)
    def recalled(*args: Any) -> Any:
        if any(isinstance(one, Tensor) and id(one) not in _IDS for one in args):
            return compute(*args)
        key = tuple(id(one) if isinstance(one, Tensor) else one for one in args)
        found = results.get(key, results)
        if found is results:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                found = compute(*args)
            found = once(found) if isinstance(found, Tensor) else found
            if len(results) < MOST:
                results[key] = found
        return found

    return recalled


@of_bits
def has(mask: Tensor, bits: int = 0xFF) -> bool:
    """Say whether some number of a mask has one of these bits."""
    return bool((mask & bits).any() if bits != 0xFF else mask.any())


@of_bits
def laid_on(mask: Tensor, shape: torch.Size) -> Tensor:
    """Return the mask of a tensor of this shape, as small as it gets."""
    return shrink(mask.expand(shape))


def shrink(mask: Tensor) -> Tensor:
    """Return the mask with a size of 1 in every dimension along which it does not change."""
    for d in range(mask.dim()):  # first those of which there is one, or comparing takes memory
        if mask.shape[d] > 1 and mask.stride(d) == 0:
            mask = mask.narrow(d, 0, 1)
    for d in range(mask.dim()):
        if mask.shape[d] > 1:
            first = mask.narrow(d, 0, 1)
            if bool((mask == first).all()):
                mask = first
    nbytes = mask.untyped_storage().nbytes()
    return mask.clone() if nbytes > mask.numel() else mask  # a part would keep all of it alive


def counted(mask: Tensor) -> Tensor:
    """Return a mask that is recorded, which the meters around count where it is large."""
    if mask.numel() > FEW:
        take_in(mask)
    return mask


def fold(mask: Tensor, dims: Iterable[int], *, keep: bool = True) -> Tensor:
    """Return the union of a mask along `dims`, which are not negative."""
    return _folded(mask, tuple(sorted(dims, reverse=True)), keep)  # type: ignore[no-any-return]


@of_bits
def _folded(mask: Tensor, dims: tuple[int, ...], keep: bool) -> Tensor:  # noqa: FBT001
    for d in dims:
        while mask.shape[d] > 1:
            half, odd = divmod(mask.shape[d], 2)
            joined = mask.narrow(d, 0, half) | mask.narrow(d, half, half)
            if odd:
                joined.narrow(d, 0, 1).bitwise_or_(mask.narrow(d, 2 * half, 1))
            mask = joined
        if mask.shape[d] == 0:
            shape = list(mask.shape)
            shape[d] = 1
            mask = mask.new_zeros(shape)
        if not keep:
            mask = mask.squeeze(d)
    return mask


def line_along(line: Tensor, dim: int, rank: int) -> Tensor:
    """Return a line as a tensor of some rank that varies along one dimension."""
    return line.reshape([-1 if d == dim else 1 for d in range(rank)])


def on_one_device(masks: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the masks of a kernel's operands on one device, which is not the host's if any is."""
    devices = {mask.device for mask in masks.values()}
    if len(devices) < 2:
        return masks
    device = next(one for one in devices if not of(one).host)
    return {key: mask.to(device) for key, mask in masks.items()}


def union(masks: Iterable[Tensor | None]) -> Tensor | None:
    """Return the union of masks that broadcast to each other; None where there is none."""
    found: Tensor | None = None
    for mask in masks:
        if mask is not None:
            found = mask if found is None else _joined(found, mask)
    return found


@of_bits
def _joined(one: Tensor, other: Tensor) -> Tensor:
    return one | other


def total(mask: Tensor) -> int:
    """Return the union of all of a mask as a number."""
    return int(fold(mask, range(mask.dim())).reshape(()))


@of_bits
def several(mask: Tensor | None) -> bool:
    """Say whether some number has had a part of more than one sample."""
    if mask is None:
        return False
    samples = mask & SAMPLES
    return bool(((samples & (samples - 1)) != 0).any())


def samples_of(bits: int) -> list[int]:
    """Return the samples that a set holds."""
    return [i for i in range(ROWS + 1) if bits >> i & 1]


def strange_row(mask: Tensor, axis: int, samples: Sequence[int]) -> tuple[int, list[int]] | None:
    """Return a row that has had a part of other samples, and these; None where none has."""
    mask = mask & SAMPLES
    others = [d for d in range(mask.dim()) if d != axis]
    rows = fold(mask, others, keep=True).reshape(-1)
    if len(rows) == 1 and len(samples) > 1:
        rows = rows.expand(len(samples))
    for at, bits in enumerate(rows.tolist()):
        wrong = samples_of(bits & ~(1 << samples[at]))
        if wrong:
            return samples[at], wrong
    return None


def geometry(tensor: Tensor) -> Geometry:
    """Return which part of its storage a tensor is."""
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def elsewhere(mask: Tensor, here: Geometry, there: Geometry) -> Tensor | None:
    """Return the mask of another view of the same elements; None if geometry does not show it.

    A mask varies along few dimensions, and it is looked up only along these: spread over all
    elements it would take a quarter of the memory of its tensor. The mask is as small as it gets,
    and its view lies `here` without overlaps.
    """
    offset, shape, stride, dtype = here
    if dtype.itemsize != there[3].itemsize or not all(there[1]):
        return None
    laid = sorted((s, n) for s, n in zip(stride, shape, strict=True) if n > 1)
    least = 1
    for step, n in laid:
        if step < least:
            return None
        least = step * n
    start = there[0] - offset
    last = start + sum((n - 1) * s for n, s in zip(there[1], there[2], strict=True))
    if not 0 <= start <= last < least:
        return None
    steps = [s for s, _ in laid]
    index = []
    for d, n in enumerate(mask.shape):
        if n == 1:
            index.append(np.zeros([1] * len(there[1]), dtype=np.int64))
            continue
        wider = [s for s in steps if s > stride[d]]
        index.append(_places(start, there, stride[d], min(wider, default=0)))
    if any((at >= n).any() for at, n in zip(index, mask.shape, strict=True)):
        return None  # a gap between its elements
    if not index:
        return mask.reshape([1] * len(there[1]))
    flat = np.ravel_multi_index(np.broadcast_arrays(*index), tuple(mask.shape))
    where = torch.as_tensor(flat.reshape(-1), dtype=torch.int32, device=mask.device)
    return mask.reshape(-1).index_select(0, where).reshape(flat.shape)


def _places(start: int, there: Geometry, step: int, wider: int) -> np.ndarray[Any, Any]:
    """Return the places of a view's elements along the dimension of this step, where they differ.

    The view begins at `start`, from the first element; the step of the dimension around it is
    `wider`, 0 for none.
    """
    _, shape, stride, _ = there
    order = sorted((s, d) for d, s in enumerate(stride) if shape[d] > 1)
    for few in range(len(order), -1, -1):  # the finer steps do not carry
        unit = gcd(step, wider, *(s for s, _ in order[few:]))
        if start % unit + sum((shape[d] - 1) * s for s, d in order[:few]) < unit:
            break
    found = np.full([1] * len(shape), start, dtype=np.int64)
    for s, d in order[few:]:
        line = np.arange(shape[d], dtype=np.int64) * s
        found = found + line.reshape([-1 if k == d else 1 for k in range(len(shape))])
    found = found % wider if wider else found
    return found // step


@dataclass
class _Record:
    """The masks of a storage.

    Attributes:
        alive: keeps the storage's address from being given to another one.
        owner: the tensor that was made with it.
        views: masks of the tensors that lie in it.
        flat: the mask of every element; None where the views are all alike.
        origin: the operation in which samples first met; "" where they have not.
    """

    alive: StorageWeakRef
    nbytes: int
    owner: Geometry | None = None
    views: dict[Geometry, Tensor] = field(default_factory=dict)
    flat: Tensor | None = None
    origin: str = ""


def _aged(mask: Tensor) -> Tensor:
    return ((mask & SAMPLES) != 0).to(torch.uint8) * EARLIER


class Masks:
    """The masks of all tensors that samples have had a part in."""

    EVERY = 4
    """New records after which those of storages that are gone are given up, or as many as live."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._enough = self.EVERY

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the mask of a tensor; None where no sample has had a part in it."""
        record = self._record(tensor)
        if record is None or not tensor.numel():
            return None
        place = geometry(tensor)
        mask = record.views.get(place)
        if mask is None:
            mask = self._found(record, tensor, place)
            mask = mask if record.flat is not None else once(mask)  # a part of it is written to
            record.views[place] = counted(mask)
        return mask if has(mask) else None

    def origin(self, tensor: Tensor) -> str:
        """Return where the samples that have a part in `tensor` meet; "" where they do not."""
        record = self._record(tensor)
        return "" if record is None else record.origin

    def put(self, tensor: Tensor, mask: Tensor | None, origin: Origin = str) -> None:
        """Record the mask of a tensor that was just made, and where its samples meet if they do."""
        self._note(tensor, mask, origin, written=False)

    def write(self, tensor: Tensor, mask: Tensor | None, origin: Origin = str) -> None:
        """Note the mask of a tensor that has just been written to."""
        self._note(tensor, mask, origin, written=True)

    def join(self, tensor: Tensor, mask: Tensor) -> None:
        """Record a view, and add its mask to that of the tensor that it is a view of."""
        record = self._record(tensor)
        if record is None or tensor.layout != torch.strided:
            return
        place, mask = geometry(tensor), laid_on(once(mask), tensor.shape)
        old = record.views.get(place)
        record.views[place] = counted(mask if old is None else _joined(old, mask))
        if old is not None and record.flat is not None and bool((mask & ~old).any()):
            part = self._part(record, tensor)
            if part is not None:
                part.copy_(mask.expand(tensor.shape))

    def taint(self, tensor: Tensor, origin: str) -> None:
        """Record where the samples that have a part in a view meet."""
        record = self._record(tensor)
        if record is not None:
            record.origin = record.origin or origin

    def age(self) -> None:
        """Make all samples so far those of an earlier call."""
        self._give_up()
        for record in self._records.values():
            record.views = {place: _aged(mask) for place, mask in record.views.items()}
            record.flat = None if record.flat is None else _aged(record.flat)
            record.origin = ""

    def count_retained(self, ours: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> int:
        """Return how many storages of samples are held by something else than some tensors.

        Args:
            ours: tensors that may hold a storage: the mask of one with more holders remains.
            besides: tensors whose storages do not count. Default: there are none.
        """
        self._give_up()
        records = {id(tensor): id(self._record(tensor)) for tensor in ours}
        holders = Counter(records.values())
        aside = {id(self._record(tensor)) for tensor in besides}
        one = torch.zeros(())  # whose storage Python has seen, as those of the records
        extra = torch._C._storage_Use_Count(one.untyped_storage()._cdata) - 1
        return sum(
            torch._C._storage_Use_Count(at) - extra > holders[id(record)]
            for at, record in self._records.items()
            if id(record) not in aside and any(bool(mask.any()) for mask in record.views.values())
        )

    def _record(self, tensor: Tensor) -> _Record | None:
        if tensor.layout != torch.strided:
            return None
        try:
            return self._records.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a subclass that only wraps others
            return None

    def _note(self, tensor: Tensor, mask: Tensor | None, origin: Origin, *, written: bool) -> None:
        if tensor.layout != torch.strided or tensor.is_meta:
            return
        mask, record = None if mask is None else once(mask), self._record(tensor)
        if record is None:
            if mask is None or not has(mask):
                return
            record = self._new(tensor)
            if record is None:
                return
        if mask is None:
            mask = torch.zeros([1] * tensor.dim(), dtype=torch.uint8, device=tensor.device)
        else:
            mask = laid_on(mask, tensor.shape)
        if mask.device != tensor.device:  # numbers that were copied from a device to another
            mask = mask.to(tensor.device)
        meeting = origin() if several(mask) else ""
        mask, place = counted(once(mask)), geometry(tensor)
        every = tensor.numel() * tensor.itemsize >= record.nbytes and (
            tensor.is_contiguous() if written else not tensor._is_view()
        )
        sole = written and place == record.owner and record.flat is None  # no other part has one
        if record.owner is None or every or sole:
            record.views, record.flat = {place: mask}, None
            record.owner, record.origin = place, meeting
            return
        if written:
            part = self._part(record, tensor)
            if part is not None:
                part.copy_(mask.expand(tensor.shape))
            else:
                self._flat(record).bitwise_or_(fold(mask, range(mask.dim())).reshape(()))
            record.views = {}
            record.origin = record.origin or meeting
        record.views[place] = mask

    def _new(self, tensor: Tensor) -> _Record | None:
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return None
        if len(self._records) >= self._enough:
            self._give_up()
            self._enough = max(self.EVERY, 2 * len(self._records))
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        record = _Record(weak, storage.nbytes())
        self._records[storage._cdata] = record
        return record

    def _give_up(self) -> None:
        every = self._records.items()
        self._records = {k: r for k, r in every if not r.alive.expired()}  # type: ignore[no-untyped-call]

    def _found(self, record: _Record, tensor: Tensor, place: Geometry) -> Tensor:
        if record.flat is None and record.owner is not None:
            mask = elsewhere(record.views[record.owner], record.owner, place)
            if mask is not None:
                return shrink(mask)
        spread = record.flat is not None
        part = self._part(record, tensor)
        if part is not None:
            mask = shrink(part)
        else:  # the same bytes as another dtype
            mask = fold(self._flat(record), [0]).reshape([1] * tensor.dim())
        if not spread:
            record.flat = None  # it can be made again
        return mask

    def _part(self, record: _Record, tensor: Tensor) -> Tensor | None:
        """Return the mask of every element of a tensor; None where these are no elements of it."""
        offset, shape, stride, dtype = geometry(tensor)
        flat = self._flat(record)
        assert record.owner is not None
        if record.owner[3].itemsize != dtype.itemsize:
            return None
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
        if last > len(flat):  # the storage has grown
            flat = record.flat = torch.cat([flat, flat.new_zeros(last - len(flat))])
        return flat.as_strided(shape, stride, offset)

    @staticmethod
    def _flat(record: _Record) -> Tensor:
        if record.flat is None:
            assert record.owner is not None
            offset, shape, stride, dtype = record.owner
            mask = record.views[record.owner]
            count = max(record.nbytes // dtype.itemsize, 1)
            record.flat = counted(torch.zeros(count, dtype=torch.uint8, device=mask.device))
            record.flat.as_strided(shape, stride, offset).copy_(mask.expand(shape))
        return record.flat
