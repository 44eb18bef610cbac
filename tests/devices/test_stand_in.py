"""The stand-in finds what it is there for: each kind of fault once, and its twin that is none."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.pool import ranks
from torch import Tensor, nn

N = 1 << 12


def numbers() -> Tensor:
    made = torch.arange(N, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    return made


def read_early(wait: bool) -> None:
    x, side = numbers(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)
    if wait:
        torch.cuda.current_stream().wait_stream(side)
    assert x.sum() >= 0
    torch.cuda.synchronize()


def write_early(wait: bool) -> None:
    x, side = numbers(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x * 2
    if wait:
        torch.cuda.current_stream().wait_stream(side)
    x.zero_()
    torch.cuda.synchronize()
    assert len(y) == N


def free_early(wait: bool) -> None:
    x, side = numbers(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x * 2
    if wait:
        x.record_stream(side)
    del x
    torch.cuda.synchronize()
    assert len(y) == N


def send_early(wait: bool) -> None:
    side, x = torch.cuda.Stream(), torch.ones(N).pin_memory()
    with torch.cuda.stream(side):
        y = x.to("cuda", non_blocking=True)
        sent = side.record_event()
    if wait:
        sent.wait()
    y.mul_(2)
    torch.cuda.synchronize()
    y.record_stream(side)


def collective_early(wait: bool) -> None:
    x = numbers()
    work = dist.all_reduce(x, async_op=True)
    if wait:
        work.wait()
    x.mul_(2)
    torch.cuda.synchronize()


KINDS = [read_early, write_early, free_early, send_early]


@pytest.mark.parametrize("variant", KINDS)
def test_a_race_is_found_with_both_stacks(stand_in: Any, variant: Callable[[bool], None]) -> None:
    variant(True)
    assert stand_in.faults() == []
    variant(False)
    found = stand_in.faults()
    assert len(found) >= 1
    assert found[0].text.startswith("race: ")
    for side in (found[0].first, found[0].second):
        assert variant.__name__ in side


def test_the_race_of_a_collective_is_found(stand_in: Any, tmp_path: Any) -> None:
    meet = f"file://{tmp_path}/meet"
    dist.init_process_group("nccl", init_method=meet, rank=0, world_size=1)
    try:
        collective_early(wait=True)
        assert stand_in.faults() == []
        collective_early(wait=False)
        assert "collective" in stand_in.faults()[0].text
    finally:
        dist.destroy_process_group()


def test_a_copy_of_pinned_memory_comes_as_late_as_it_may(stand_in: Any) -> None:
    x = torch.ones(N).pin_memory()
    there = x.to("cuda", non_blocking=True)
    x.zero_()
    assert there.sum() == 0
    stand_in.late(False)
    x.fill_(1)
    there = x.to("cuda", non_blocking=True)
    x.zero_()
    assert there.sum() == N


def test_what_was_copied_back_is_not_there_before_a_wait() -> None:
    x, host = numbers(), torch.zeros(N).pin_memory()
    host.copy_(x, non_blocking=True)
    assert host.sum() == 0
    torch.cuda.synchronize()
    assert host.sum() == x.sum()


def test_memory_that_is_new_or_freed_is_not_a_number() -> None:
    x = torch.empty(N, device="cuda")
    assert x.isnan().all()
    assert torch.empty(N, device="cuda", dtype=torch.bfloat16).isnan().all()
    x.zero_()
    retained = torch.ops.stand_in.on_host(x)
    assert retained.sum() == 0


MIXED = {
    "added": lambda a, b: a + b,
    "multiplied": lambda a, b: a.view(64, -1) @ b.view(-1, 64),
    "joined": lambda a, b: torch.cat([a, b]),
    "written": lambda a, b: a.add_(b),
    "chosen": lambda a, b: torch.where(a > 0, a, b),
    "a layer": lambda a, b: nn.functional.linear(a.view(64, -1), b.view(64, -1)),
}


@pytest.mark.parametrize("variant", MIXED)
@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_operands_on_several_devices_are_refused(stand_in: Any, variant: str, other: str) -> None:
    stand_in.devices(2)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        MIXED[variant](numbers(), torch.ones(N, device=other))
    MIXED[variant](numbers(), torch.ones(N, device="cuda:0"))


def test_numbers_and_indices_of_the_host_are_accepted() -> None:
    x = numbers()
    assert (x + torch.tensor(1.0)).sum() == x.sum() + N
    assert x[torch.arange(3)].tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="same device"):
        x.index_select(0, torch.arange(3))


def test_sizes_are_rounded_up_and_the_cap_holds(stand_in: Any) -> None:
    before = torch.cuda.memory_allocated()
    x = torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() - before == 512
    stand_in.cap(before + 1024)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(129, device="cuda")
    del x
    assert torch.empty(129, device="cuda").numel() == 129
    assert torch.cuda.max_memory_allocated() <= before + 1024


def test_peaks_begin_again_where_they_are_reset() -> None:
    x = torch.empty(N, device="cuda")
    most = torch.cuda.max_memory_allocated()
    del x
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() < most


def test_recorded_memory_counts_until_its_stream_is_done() -> None:
    x, side = numbers(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = x + 1
    x.record_stream(side)
    live = torch.cuda.memory_stats()["active_bytes.all.current"]
    del x
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == live
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == live - y.nbytes


def test_the_allocation_that_is_chosen_fails(stand_in: Any) -> None:
    stand_in.fail(1)
    retained = torch.empty(1, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="cuda")
    assert torch.empty_like(retained).numel() == 1


def test_an_interrupt_comes_at_the_launch_that_is_chosen(stand_in: Any) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    x = numbers()
    done = 0
    stand_in.interrupt(3)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):
            x.add_(1)
            done += 1
    assert 3 <= done < 10


def test_each_thread_that_multiplies_has_a_workspace(stand_in: Any) -> None:
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    (x @ x).sum().backward()  # autograd's thread is another one
    assert stand_in.statistics()["workspaces"] == 2
    assert torch.cuda.memory_allocated() >= 2 * 8_519_680
    stand_in.clear_workspaces()
    assert stand_in.statistics()["workspaces"] == 0


def test_draws_follow_seed_and_offset() -> None:
    torch.manual_seed(3)
    first, state = torch.rand(N, device="cuda"), torch.cuda.get_rng_state()
    second = torch.rand(N, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(N, device="cuda"), second)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(N, device="cuda"), first)
    assert not torch.equal(first, second)
    assert len(state) == 16


def test_several_devices_have_memory_and_streams_of_their_own(stand_in: Any) -> None:
    stand_in.devices(2)
    assert torch.cuda.device_count() == 2
    before = torch.cuda.memory_allocated(0)
    x = torch.ones(N, device="cuda:1")
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.memory_allocated(1) == x.nbytes
    y = x.to("cuda:0")
    y.add_(1)
    assert y.device.index == 0
    assert float(y.sum()) == 2 * N
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device.index == 1


@pytest.mark.parametrize("cells", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}])
def test_recurrent_layers_are_those_of_the_cpu(cells: Any, options: dict[str, Any]) -> None:
    layer = cells(5, 7, batch_first=True, **options).double()
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    here, there = x.clone().requires_grad_(), x.cuda().requires_grad_()
    layer(here)[0].square().sum().backward()
    want = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    twin = cells(5, 7, batch_first=True, **options).double()
    twin.load_state_dict(layer.state_dict())
    twin.cuda()
    twin(there)[0].square().sum().backward()
    assert torch.allclose(here.grad, there.grad.cpu())
    for mine, its in zip(want, twin.parameters(), strict=True):
        assert torch.allclose(mine, its.grad.cpu())


def test_ranks_sum_over_processes() -> None:
    with ranks(2) as pool:
        for found in pool.run(over_nccl):
            assert found == (3.0, [1.0, 2.0])


def over_nccl(rank: int, size: int) -> Any:
    group = dist.new_group(backend="nccl")
    x = torch.full((N,), float(rank + 1), device="cuda")
    dist.all_reduce(x, group=group)
    both = [torch.empty(1, device="cuda") for _ in range(size)]
    dist.all_gather(both, torch.full((1,), float(rank + 1), device="cuda"), group=group)
    return x[0].item(), [one.item() for one in both]
