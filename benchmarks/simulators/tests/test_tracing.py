"""The trace of a real step on shapes, against torch's own counters."""

from __future__ import annotations

import pytest
import torch
from benchmarks.simulators.tracing import trace_step
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from anybatch.memory.meter import Meter
from anybatch.offloading.schedule import Trace


class Net(nn.Module):
    """Convolutions with BatchNorm and ReLU in place, a shortcut, views on the way."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + nn.functional.relu(self.norm(self.second(x)), inplace=True)
        return self.head(x.flatten(1))


LOSS = nn.CrossEntropyLoss()


def trace_of(model: nn.Module, n: int) -> Trace:
    return trace_step(model, LOSS, (n, 3, 16, 16), (n,), small=0)


def test_operations_are_those_that_torch_counts() -> None:
    model, n = Net(), 3
    trace = trace_of(model, n)
    with FlopCounterMode(display=False) as counter:
        LOSS(model(torch.randn(n, 3, 16, 16)), torch.zeros(n, dtype=torch.long)).backward()
    assert sum(function.flops for function in trace.functions) == counter.get_total_flops()


def test_backward_of_a_grouped_convolution_costs_twice_its_forward() -> None:
    found = [f for f in trace_of(Net(groups=8), 2).functions if "convolution" in f.name]
    forward, backward = found[1], found[2]
    assert (forward.name, backward.name) == ("convolution", "convolution_backward")
    assert backward.flops == 2 * forward.flops == 2 * 2 * (2 * 8 * 16 * 16 * 9)


def test_live_bytes_are_those_of_the_meter_but_for_what_is_held_longer_than_it_is_used() -> None:
    model, n = Net(), 4
    with FakeTensorMode() as mode:
        fakes = {k: mode.from_tensor(t) for k, t in model.state_dict(keep_vars=True).items()}
        parameters = [fakes[k] for k, _ in model.named_parameters()]
        momentum = [torch.empty_like(p) for p in parameters]
        x, y = torch.empty(n, 3, 16, 16), torch.empty(n, dtype=torch.long)
        with Meter(torch.device("cpu"), {"there": [*fakes.values(), *momentum, x, y]}) as meter:
            loss = LOSS(torch.func.functional_call(model, fakes, (x,)), y)
            torch.autograd.grad(loss, parameters)
    peak = trace_of(model, n).peak
    assert 0.9 * meter.peak <= peak <= meter.peak


def test_sizes_grow_with_the_batch_and_nothing_else_changes() -> None:
    few, more, many = (trace_of(Net(), n) for n in (2, 3, 64))
    for f, g in zip(few.functions, many.functions, strict=True):
        assert (f.name, f.reads, f.makes, f.writes) == (g.name, g.reads, g.makes, g.writes)
    triples = zip(few.variables, more.variables, many.variables, strict=True)
    assert all(c.size == a.size + 62 * (b.size - a.size) for a, b, c in triples)


def test_who_reads_and_writes_what() -> None:
    trace = trace_of(Net(), 2)
    named = {v.name: i for i, v in enumerate(trace.variables)}
    norm = next(f for f in trace.functions if f.name == "native_batch_norm")
    relu = next(f for f in trace.functions if f.name == "relu_")
    assert set(norm.writes) == {named["norm.running_mean"], named["norm.running_var"]}
    assert relu.writes == relu.reads == norm.makes[:1]
    assert not any("view" in f.name for f in trace.functions)
    first_backward = next(i for i, f in enumerate(trace.functions) if f.backward)
    assert trace.functions[first_backward - 1].name == "nll_loss_forward"
    persistent = {v.name for v in trace.variables if v.after}
    assert persistent >= {"head.weight", "momentum head.weight", "norm.running_var"}
    assert {v.name for v in trace.variables if v.before and not v.after} == {"inputs", "targets"}


def test_random_functions_are_marked_and_small_variables_remain() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    trace = trace_step(model, LOSS, (8, 4), (8,), momentum=False)
    assert sum(f.draws for f in trace.functions) == 1
    assert all(v.stays for v in trace.variables)
    assert not any(v.name.startswith("momentum") for v in trace.variables)


def test_a_model_is_left_as_it_was() -> None:
    model = Net()
    before = {k: t.clone() for k, t in model.state_dict().items()}
    trace_of(model, 2)
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_reads_values_cannot_be_traced() -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * x.sum().item()

    with pytest.raises(RuntimeError, match="_local_scalar_dense"):
        trace_step(Reads(4, 3), LOSS, (8, 4), (8,))
