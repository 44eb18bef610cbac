"""Micro-batches on their way to the device: in two places, in their own strides, without a race."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Engine
from anybatch.core.accelerator import of
from anybatch.core.batch import TensorBatch
from anybatch.execution.prefetch import StreamLink, feed

CUDA = torch.device("cuda")


def link() -> StreamLink:
    return StreamLink(CUDA, of(CUDA))


def large() -> int:
    return int(torch.cuda.max_memory_reserved())


@pytest.mark.parametrize("pinned", [False, True])
def test_the_inputs_of_two_micro_batches_are_there_at_once(stand_in: Any, pinned: bool) -> None:
    x = torch.randn(40, 1 << 10)
    x = x.pin_memory() if pinned else x
    batch = TensorBatch.of(x, None)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, total = large(), torch.zeros((), device=CUDA)
    for part in feed(batch.micro_batches(4), link()):
        total += part.inputs.sum()
        del part
    kernels = 2 * 512 + 8  # a sum, rounded up
    assert large() - before <= 3 * x[:4].nbytes + kernels
    assert torch.allclose(total.cpu(), x.sum(), rtol=1e-3, atol=1e-3)


def test_what_a_step_holds_does_not_grow_with_the_micro_batches(stand_in: Any) -> None:
    stand_in.workspace(0)
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(3 * 64 * 64, 8), nn.ReLU(), nn.Linear(8, 5)
    model = nn.Sequential(*layers).cuda()
    engine = Engine(model, nn.CrossEntropyLoss(), micro_batch=8)
    found = []
    for n in (64, 64, 256):
        x, y = torch.randn(n, 3, 64, 64), torch.randint(5, (n,))
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        engine.backward(x, y)
        found.append(large())
    assert found[2] <= found[1] + 1024


STRIDES = {
    "channels last": lambda: torch.randn(8, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(3, 8, 5).transpose(0, 1),
    "expanded": lambda: torch.randn(8, 1).expand(8, 4),
    "every other": lambda: torch.randn(8, 6)[:, ::2],
    "numbers": lambda: torch.arange(8),
}


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("variant", STRIDES)
def test_values_and_strides_are_those_of_torch(variant: str, pinned: bool) -> None:
    x: Tensor = STRIDES[variant]()
    if pinned:
        bytes_of = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).pin_memory()
        x = bytes_of.as_strided(x.shape, x.stride(), x.storage_offset())
    parts = [part.inputs for part in feed(TensorBatch.of(x, None).micro_batches(3), link())]
    torch.cuda.synchronize()
    for part, here in zip(parts, x.split(3), strict=True):
        assert torch.equal(part.cpu(), here)
        assert part.stride() == here.to(CUDA).stride()


def test_a_loop_that_is_left_leaves_no_copy_on_its_way() -> None:
    x = torch.randn(40, 1 << 10).pin_memory()
    for part in feed(TensorBatch.of(x, None).micro_batches(4), link()):
        del part
        break
    y = torch.zeros(1 << 14, device=CUDA)
    assert float(y.sum()) == 0
