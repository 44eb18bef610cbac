from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from tests.oracle import same, snapshot
from torch import Tensor, nn

from anybatch.core.transaction import (
    Before,
    NoOptimizerStep,
    back_to,
    note_buffers,
    same_values,
    transaction,
    uninterrupted,
    where,
)
from anybatch.errors import NotExactError


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def test_buffers_are_restored_as_the_tensors_they_were() -> None:
    norm = nn.BatchNorm1d(3)
    (mean, *_) = states = note_buffers([*norm.named_modules()])
    assert [state.path for state in states] == [
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]
    old = norm.running_mean
    assert not mean.written()
    assert not mean.moved()
    norm.running_mean = torch.ones(3)
    assert mean.written()
    assert mean.moved()
    mean.put_back()
    assert norm.running_mean is old


def test_batch_norm_moves_statistics_without_a_version_and_is_detected_all_the_same() -> None:
    norm = nn.BatchNorm1d(3)
    mean = note_buffers([*norm.named_modules()])[0]
    norm(torch.randn(8, 3))
    assert not mean.written(), "if this fails torch counts the write now: written() suffices"
    assert mean.moved()
    mean.put_back()
    assert not mean.moved()


def test_failure_puts_back_what_was_noted() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.grad = torch.ones(3, 3)
    before, note = snapshot(model), Before([*model.named_modules()], model.parameters())
    with pytest.raises(ZeroDivisionError), transaction(note, lambda: None):
        model[0].weight.grad = None
        model(torch.randn(4, 3)).sum().backward()
        torch.set_grad_enabled(False)
        raise ZeroDivisionError
    assert same(before, snapshot(model))


def test_an_interrupted_inspection_is_over() -> None:
    """An interrupt comes between its entry and its body."""
    model, place = nn.Linear(3, 3), where()
    with (
        pytest.raises(KeyboardInterrupt),
        transaction(Before([*model.named_modules()], ()), lambda: None),
    ):
        back_to((*place[:-1], True))  # it looks, and is never left
        raise KeyboardInterrupt
    assert where() == place


@pytest.mark.usefixtures("_ctrl_c")
def test_an_interrupt_during_delivery_comes_after_it() -> None:
    model = nn.Linear(2, 2)
    delivered: list[str] = []

    def deliver() -> None:
        signal.raise_signal(signal.SIGINT)
        delivered.append("all of it")
        model.weight.grad = torch.ones(2, 2)

    with (
        pytest.raises(KeyboardInterrupt),
        transaction(Before([*model.named_modules()], model.parameters()), deliver),
    ):
        pass
    assert delivered == ["all of it"]
    assert model.weight.grad is not None, "what was delivered is not undone"


@pytest.mark.usefixtures("_ctrl_c")
def test_a_held_interrupt_is_let_through_once_and_the_handler_is_back() -> None:
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_another_thread_handlers_are_not_replaced() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with uninterrupted():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []


def test_an_ignored_signal_stays_ignored() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)


def test_an_optimizer_may_step_again_when_the_step_is_over() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = Before([*model.named_modules()], model.parameters())
    with NoOptimizerStep(before), pytest.raises(NotExactError, match="SGD"):
        optimizer.step()
    optimizer.step()
    with NoOptimizerStep(before):
        before.open = False
        optimizer.step()


class Holder(nn.Module):
    """One buffer, and whatever is done to it."""

    def __init__(self, buffer: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(1))
        self.register_buffer("b", buffer, persistent=False)
        self.register_buffer("last", torch.zeros(2))


NAN = torch.tensor([1.0, float("nan"), -2.0])


def swap_data(m: Holder) -> None:
    m.b.data = torch.full((4,), 7.0)


def shrink(m: Holder) -> None:
    m.b.resize_(1).fill_(7.0)


def grow(m: Holder) -> None:
    m.b.resize_(9).fill_(7.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "b", None),
        lambda m: setattr(m, "b", torch.ones(5)),
        lambda m: delattr(m, "b"),
        lambda m: m.register_buffer("new", torch.ones(1), persistent=False),
        lambda m: m.register_buffer("b", torch.ones(1)),
        lambda m: m.b is not None and not m.b.is_sparse and m.b.add_(1),
        lambda m: m.b is not None and m.b.layout == torch.strided and swap_data(m),
        lambda m: m.b is not None and m.b.layout == torch.strided and shrink(m),
        lambda m: m.b is not None and m.b.layout == torch.strided and grow(m),
        lambda m: m.b is not None and m.b.layout == torch.sparse_coo and m.b.mul_(3),
    ],
    ids="none replaced removed added again written data shrunk grown sparse".split(),
)
@pytest.mark.parametrize(
    "buffer",
    [
        lambda: None,
        lambda: NAN.clone(),
        lambda: torch.ones(()).expand(4, 4),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.arange(3),
        lambda: torch.ones(3).to(torch.float8_e4m3fn),
        lambda: torch.ones(3, device="meta"),
    ],
    ids="none nan expanded sparse csr integer float8 meta".split(),
)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_every_sort_of_buffer_comes_back(
    buffer: Callable[[], Tensor | None], change: Callable[[Holder], object]
) -> None:
    """Undoing a step raised on most of these, and that hid the error the step had failed with."""
    model = Holder(buffer())
    names, persistent, tensor = list(model._buffers), list(model.state_dict()), model.b
    values = None if tensor is None else tensor.clone()
    before = Before([*model.named_modules()], [])
    with pytest.raises(KeyError, match="the real error"), transaction(before, lambda: None):
        with suppress(RuntimeError):  # torch does not write to all of them
            change(model)
        raise KeyError("the real error")
    assert list(model._buffers) == names
    assert list(model.state_dict()) == persistent
    assert same_values(model.b, values)
    assert model.b is tensor or tensor.stride() == (0, 0), "its one entry was written"


def test_a_tensor_that_cannot_be_written_to_is_replaced_by_what_was_noted() -> None:
    """An expanded buffer whose memory was written cannot be copied into."""
    memory = torch.ones(())
    model = Holder(memory.expand(3))
    state = note_buffers([*model.named_modules()])[1]
    memory.fill_(5.0)
    assert state.moved()
    state.put_back()
    assert model.b.tolist() == [1.0, 1.0, 1.0]


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2), check_trace=False)]
)
def test_buffers_of_scripted_modules_are_restored(make: Callable[[nn.Module], nn.Module]) -> None:
    """Their ``_buffers`` is a wrapper without ``get``."""
    model = make(Scripted())
    start, tensor = float(model.calls), model.calls
    before = Before([*model.named_modules()], [])
    (state,) = before.buffers
    assert not state.written()
    assert not state.moved()
    model(torch.ones(2))
    assert state.written()
    assert state.moved()
    before.put_back()
    assert model.calls is tensor
    assert float(model.calls) == start


def test_a_buffer_without_data_yet_is_noted() -> None:
    """LazyBatchNorm: nothing to copy, and nothing that could be taken away again."""
    norm = nn.LazyBatchNorm1d().eval()
    states = note_buffers([*norm.named_modules()])
    assert [state.moved() for state in states] == [False, False, False]
    norm(torch.randn(4, 3))
    assert [state.moved() for state in states] == [True, True, False]
    for state in states:
        state.put_back()
    assert norm.running_mean.tolist() == [0.0, 0.0, 0.0]


def test_buffers_made_in_inference_mode_are_restored() -> None:
    """They count no versions, and refuse to be written to."""
    with torch.inference_mode():
        model = Holder(torch.ones(3))
    before = Before([*model.named_modules()], [])
    assert not before.buffers[1].written()
    model.b = torch.zeros(3)
    assert before.put_back() == []
    assert model.b.tolist() == [1.0, 1.0, 1.0]


def test_what_cannot_be_undone_is_noted_on_the_real_error() -> None:
    """The dice come back all the same."""
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    before, rng_state = Before([*model.named_modules()], model.parameters()), torch.get_rng_state()
    with pytest.raises(KeyError) as caught, transaction(before, lambda: None):
        torch.rand(3)
        model.bias.grad = torch.ones(2)
        model.weight.grad = None
        model.weight.data = torch.zeros(5)
        raise KeyError("the real error")
    assert "while the step was undone" in caught.value.__notes__[0]
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert model.bias.grad is None


def test_gradients_of_leaves_that_appear_late_are_restored() -> None:
    """A parameter that only the loss closes over kept what a failed step had added."""
    model, late, other = nn.Linear(2, 2), torch.ones(2), torch.ones(2)
    late.grad = gradient = torch.ones(2)
    before = Before([*model.named_modules()], model.parameters())
    before.add([late, other, model.weight])
    late.grad, other.grad, model.weight.grad = None, torch.ones(2), torch.ones(2, 2)
    before.put_back()
    assert late.grad is gradient
    assert other.grad is None
    assert model.weight.grad is None


def test_an_optimizer_of_other_parameters_may_step() -> None:
    """Any optimizer in any thread was refused while a step was open."""
    model, other = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    unrelated = torch.optim.SGD([other], lr=0.1)
    mixed = torch.optim.SGD([{"params": [other]}, {"params": [model.bias]}], lr=0.1)
    before = Before([*model.named_modules()], model.parameters())
    with NoOptimizerStep(before):
        unrelated.step()
        with pytest.raises(NotExactError, match="SGD.step.. was called inside engine.backward"):
            mixed.step()
        before.add([other])
        with pytest.raises(NotExactError, match="SGD"):
            unrelated.step()
    assert other.tolist() == pytest.approx([0.9, 0.9])


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_values_are_compared_in_every_layout() -> None:
    full = torch.tensor([[1.0, float("nan"), 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]] * 2)
    other = full.clone()
    other[0, 0] = 3.0
    for layout in (
        lambda t: t,
        Tensor.to_sparse,
        Tensor.to_sparse_csr,
        Tensor.to_sparse_csc,
        lambda t: t.to_sparse_bsr((2, 2)),
        lambda t: t.to_sparse_bsc((2, 2)),
        lambda t: t.nan_to_num().to_mkldnn(),
        lambda t: t.to(torch.complex64),
        lambda t: t.to(torch.float8_e5m2),
    ):
        assert same_values(layout(full), layout(full.clone()))
        assert not same_values(layout(full), layout(other))
    assert not same_values(full, full.to_sparse())
    assert not same_values(full, None)
    assert not same_values(full, full.double())
    lazy = nn.LazyBatchNorm1d().running_mean
    assert same_values(lazy, lazy)
    assert not same_values(lazy, full)
