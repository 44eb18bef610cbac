"""What an allocator makes of bytes: by itself, and in the meter."""

from __future__ import annotations

import pytest
import torch
from tests.peaks import metered
from torch import nn
from torch.nn import functional as F

import anybatch
from anybatch.core.optimizers import allocated, rounded, rounding
from anybatch.devices import AbsentDevice, planned_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCK = 512
DEVICE = AbsentDevice("8GiB", 8 << 30)


@pytest.mark.parametrize(
    ("nbytes", "device", "expected"),
    [
        (0, CUDA, 0),
        (1, CUDA, 512),
        (512, CUDA, 512),
        (513, CUDA, 1024),
        (0, CPU, 0),
        (1, CPU, 1),
        (513, CPU, 513),
    ],
)
def test_an_allocation_is_rounded_up_as_its_device_does(
    nbytes: int, device: torch.device, expected: int
) -> None:
    assert rounded(nbytes, device) == expected


def test_the_host_rounds_only_while_it_stands_in_for_a_device() -> None:
    assert rounding(CPU) == 1
    with planned_for(DEVICE):
        assert rounding(CPU) == BLOCK
        with planned_for(None):
            assert rounding(CPU) == 1
    assert rounding(CPU) == 1


def test_a_sparse_tensor_has_memory_for_places_and_values() -> None:
    entries = torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.ones(2), (9,), check_invariants=True
    )
    assert allocated(entries) == 2 * (8 + 4)
    with planned_for(DEVICE):
        assert allocated(entries) == 2 * BLOCK
        assert allocated(torch.ones(129)) == 2 * BLOCK


def test_the_meter_counts_every_storage_as_it_is_allocated() -> None:
    there = [torch.ones(n) for n in (1, 128, 129, 1000)]
    with planned_for(DEVICE), metered({"parameters": there}) as meter:
        made = [t * 2 for t in there]
        assert meter.live == 2 * sum(allocated(t) for t in there)
        view = made[0].view(1)
        del made[1:], view
        assert meter.live == sum(allocated(t) for t in (*there, *made))
    assert meter.timeline().peak == meter.peak


def test_a_loss_that_is_retained_holds_no_more_than_a_number() -> None:
    """Its terms stayed through the next step: torch's mean of squares lies in their memory."""
    trained = anybatch.Engine(nn.Linear(3, 2), F.mse_loss, micro_batch=90)
    loss = trained.backward(torch.randn(70, 3), torch.randn(70, 2))
    assert loss.untyped_storage().nbytes() == loss.element_size()
    assert trained.last is not None
    assert trained.last.loss is loss
