from __future__ import annotations

import gc
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anybatch.memory.meter import Meter, take_in, within_kernel

CPU = torch.device("cpu")
KIB = 256
"""Elements of float32 in a KiB."""


def test_births_deaths_and_views() -> None:
    with Meter(CPU) as meter:
        a = torch.empty(KIB)
        b = a.view(16, 16)[2:]  # the same storage
        c = a + 1
        del a
        assert meter.live == 2048
        del b
        assert meter.live == 1024
        c.add_(1)
        assert meter.live == 1024
        del c
    gc.collect()
    assert (meter.live, meter.peak) == (0, 2048)
    assert meter.timeline().peak == 2048


def test_what_was_there_counts_where_it_is_named_and_else_is_the_callers() -> None:
    recorded, foreign = torch.empty(KIB), torch.empty(4 * KIB)
    with Meter(CPU, {"parameters": [recorded, recorded.view(2, -1)]}) as meter:
        retained = recorded + foreign[:KIB]
        foreign.mul_(2)
    assert meter.peak == 2048
    assert meter.timeline().at_peak() == {"parameters": 1024, "activations": 1024}
    del retained


def test_a_claim_names_the_owner_from_birth_and_takes_nothing_from_others() -> None:
    recorded = torch.empty(KIB)
    with Meter(CPU, {"parameters": [recorded]}) as meter:
        gradient = torch.empty(KIB)
        meter.claim("gradients", [gradient, recorded])
    assert meter.timeline().at_peak() == {"parameters": 1024, "gradients": 1024}


def test_an_argument_that_was_resized_without_a_kernel_is_the_callers() -> None:
    with Meter(CPU) as meter:
        a = torch.ones(KIB)
        a.untyped_storage().resize_(8 * a.nbytes)
        b = a + 1
        assert meter.live == b.nbytes


def test_a_storage_that_is_resized_changes_its_bytes() -> None:
    with Meter(CPU) as meter:
        a = torch.empty(KIB)
        a.resize_(4 * KIB)
        assert meter.live == 4096
        a.untyped_storage().resize_(0)
        a.detach()
        assert meter.live == 0
    assert meter.peak == 4096


def test_new_memory_from_outside_counts() -> None:
    with Meter(CPU) as meter:
        a = torch.tensor([1.0, 2.0])
        assert meter.live == a.nbytes


def test_sparse_and_other_tensors() -> None:
    with Meter(CPU) as meter:
        dense = torch.eye(4)
        sparse = dense.to_sparse()
        held = sparse._indices().nbytes + sparse._values().nbytes
        assert meter.live >= dense.nbytes + held
        offloaded = torch.empty(1 << 20, device="meta")
        assert meter.peak < offloaded.nbytes


def test_backward_is_counted_and_all_of_it_is_freed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    with Meter(CPU, {"parameters": model.parameters()}) as meter:
        model(x).sum().backward()
        meter.claim("gradients", (p.grad for p in model.parameters() if p.grad is not None))
        weights = sum(p.nbytes for p in model.parameters())
        assert meter.live == 2 * weights
    final = meter.timeline().final()
    assert final["parameters"] == final["gradients"] == weights


def test_fakes_count_only_under_their_own_mode() -> None:
    mode = FakeTensorMode()
    with Meter(CPU) as outer:
        with mode, Meter(CPU) as inner:
            fake = torch.empty(1 << 20) + 1
        with mode:
            fake = fake * 2
        torch.empty(KIB)
    assert inner.peak == 8 << 20
    assert outer.peak == 1024


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_goes_through_and_counting_goes_on(fails: bool) -> None:
    a = torch.empty(KIB)

    def work() -> Tensor:
        return a.view(3, -1) if fails else a + 1

    with Meter(CPU) as meter:
        try:
            work()
        except RuntimeError:
            assert fails
        b = a + 1
        assert meter.live == b.nbytes


@pytest.mark.parametrize("stops", [True, False])
def test_a_step_ends_at_the_kernel_with_which_it_holds_more_than_the_limit(stops: bool) -> None:
    meter, made = Meter(CPU, limit=100, stops=lambda: stops), []
    with suppress(torch.OutOfMemoryError), meter:
        for _ in range(4):
            made.append(torch.zeros(10, dtype=torch.float32))
    assert len(made) == (2 if stops else 4)
    assert meter.peak == (120 if stops else 160)


def test_a_limit_is_an_error_that_says_that_memory_ran_out() -> None:
    with (
        Meter(CPU, limit=100),
        pytest.raises(
            torch.OutOfMemoryError, match="a step holds 200 bytes, and its budget is 100"
        ),
    ):
        torch.zeros(50)


def test_a_tensor_that_was_made_outside_of_modes_is_counted_on_request() -> None:
    with Meter(CPU) as meter, Meter(torch.device("meta")) as elsewhere:
        with torch._C._DisableTorchDispatch():
            mine, other = torch.zeros(10), torch.zeros(20)
        assert meter.live == 0
        take_in(mine)
        assert (meter.live, meter.peak) == (40, 40)
        del mine, other
        assert (meter.live, elsewhere.peak) == (0, 0)


def test_a_meter_counts_what_a_kernel_says_it_allocates() -> None:
    device = torch.device("cpu")

    def kernel(x: Tensor) -> Tensor:
        with within_kernel(device, 1000), within_kernel(torch.device("cuda"), 5000):
            return x.clone()

    with torch.library._scoped_library("workspace_test", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", kernel, "CPU")
        x = torch.zeros(10)
        with Meter(device, {"operands": [x]}) as meter:
            y = torch.ops.workspace_test.op(x)
            assert meter.live == x.nbytes + y.nbytes
            with within_kernel(device, 10**6):  # none runs
                pass
        assert meter.peak == x.nbytes + 1000
