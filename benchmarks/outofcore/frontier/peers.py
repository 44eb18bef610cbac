"""What there is in torch for a step that holds less, and what a person writes beside it.

A way is a context manager around forward and backward. Each peer has its best settings here: a
checkpoint keeps no state of the generator, since nothing is drawn, and the files hold no weights
and nothing that is small.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from benchmarks.outofcore.offload.steps import Anew

SHARES = {"half the blocks": 0.5, "three in four": 0.75, "every block": 1.0}
"""Of the blocks, how many are computed again: the first ones, which hold the most."""

SMALL = 64 << 10
"""Bytes below which a tensor is not worth a file; the same as in `anybatch.offload`."""

Ways = dict[str, AbstractContextManager[Any]]


def peers(
    model: nn.Module, blocks: Sequence[nn.Module], spill: Path | None = None
) -> dict[str, Ways]:
    """Return the lines of the figure that are not ours: name -> setting -> way.

    Args:
        model: whose step it is.
        blocks: what is computed again as a whole, in order.
        spill: the folder of the files; None for the system's.
    """
    return {
        "checkpoint": {
            name: checkpointed(blocks[: round(share * len(blocks))])
            for name, share in SHARES.items()
        },
        "save_on_cpu": {
            "as it is": Anew(save_on_cpu),
            "pin_memory=True": Anew(lambda: save_on_cpu(pin_memory=True)),
        },
        "files by hand": {"every saved tensor": Anew(lambda: files(model, spill))},
    }


def checkpointed(blocks: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """Return what computes these blocks again, with `torch.utils.checkpoint`."""
    return Anew(lambda: _checkpointed(blocks))


@contextmanager
def _checkpointed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    again: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    for block in blocks:
        block.forward = partial(again, block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def files(model: nn.Module, spill: Path | None = None) -> Iterator[None]:
    """Write every saved tensor to a file of its own, and read it when autograd asks for it.

    It is the tier that torch's tutorial on these hooks makes of `torch.save`, with bare bytes in
    its place, which are faster. They go through the page cache: what the system keeps there is
    memory too, and is not counted.
    """
    weights = frozenset(p.untyped_storage().data_ptr() for p in model.parameters())
    with TemporaryDirectory(dir=spill) as folder:
        names = (Path(folder) / str(number) for number in count())
        with saved_tensors_hooks(partial(_pack, names, weights), _unpack):
            yield


class _File:
    """A saved tensor in a file, which goes when autograd lets go of it."""

    def __init__(self, path: Path, tensor: Tensor) -> None:
        self.path, self.shape, self.dtype = path, tensor.shape, tensor.dtype
        self.stride = tensor.stride()
        path.write_bytes(_flat(tensor))

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)

    def tensor(self) -> Tensor:
        """Return it."""
        found = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        with self.path.open("rb", buffering=0) as file:
            assert file.readinto(_flat(found)) == found.nbytes
        return found


def _pack(names: Iterator[Path], weights: frozenset[int], tensor: Tensor) -> Tensor | _File:
    tensor = tensor.detach()  # or a result and its graph would hold each other
    if tensor.nbytes < SMALL or tensor.untyped_storage().data_ptr() in weights:
        return tensor
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return _File(next(names), tensor if dense else tensor.contiguous())


def _unpack(packed: Tensor | _File) -> Tensor:
    return packed.tensor() if isinstance(packed, _File) else packed


def _flat(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor without gaps."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
