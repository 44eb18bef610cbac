"""Fakes of kernels are derived once for each shape, and are those that torch derives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import functional

from anybatch.memory.fakes import CachedFakeMode

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "sum of two": lambda x: x + x,
    "int and float": lambda x: (torch.full((2,), 1), torch.full((2,), 1.0), torch.full((2,), True)),
    "promoted": lambda x: (x.long() + 1, x.long() + 1.0, x.double() + 1),
    "matrix product": lambda x: x.flatten(1) @ x.flatten(1).t(),
    "convolution": lambda x: functional.conv2d(x, x.new_zeros(5, 3, 3, 3)),
    "channels last": lambda x: functional.conv2d(
        x.to(memory_format=torch.channels_last), x.new_zeros(5, 3, 3, 3)
    ),
    "strides": lambda x: (x.transpose(1, 2).exp(), x.expand(4, 2, 3, 8, 8).exp()),
    "views": lambda x: (x.view(2, -1), x[:, 1:], x[0, 0], x.permute(3, 2, 1, 0), x.detach()),
    "several views": lambda x: (*x.split(2, 1), *x.unbind(2), *x.chunk(3, 3)),
    "reshaped": lambda x: (x.reshape(6, 64), x.transpose(1, 2).reshape(6, 64)),
    "parts": lambda x: [row.exp() @ x.new_zeros(8, 5) for row in x[0]],
    "parts, written to": lambda x: [row.mul_(2) for row in x[0]],
    "parts, laid out by numbers": lambda x: [
        (row.as_strided((2, 2), (1, 1)), torch.as_strided_copy(row, (2, 2), (1, 1))) for row in x[0]
    ],
    "unsafe view": lambda x: torch.ops.aten._unsafe_view.default(x, [6, 64]),
    "written to": lambda x: (x.add_(1), x.mul_(2).relu_(), x.copy_(x + 1), x.zero_()),
    "written to by name": lambda x: torch.add(x, x, out=x.new_empty(x.shape)),
    "another memory": lambda x: x.clone().set_(x.new_empty(3, 4)),
    "resized": lambda x: x.clone().resize_(7, 7),
    "transposed in place": lambda x: x.new_empty(3, 4).t_(),
    "several results": lambda x: torch.ops.aten.native_layer_norm(x, [8], None, None, 1e-5),
    "statistics": lambda x: torch.ops.aten.native_batch_norm(
        x, None, None, x.new_zeros(3), x.new_ones(3), True, 0.1, 1e-5
    ),
    "not requested": lambda x: torch.ops.aten.native_layer_norm_backward(
        x, x, [8], x.sum(3, keepdim=True), x.sum(3, keepdim=True), None, None, [True, False, False]
    ),
    "numbers": lambda x: (x.shape[0] + x.numel(), x.stride(), torch.arange(5), torch.arange(5.0)),
    "complex": lambda x: (torch.complex(x, x).conj().exp(), torch.complex(x, x).imag.exp()),
    "index": lambda x: (x[torch.tensor([0, 1])], functional.one_hot(torch.tensor([1]), 4)),
    "drawn": lambda x: (torch.rand_like(x), functional.dropout(x), torch.empty(3, device="cpu")),
    "recurrent": lambda x: torch._VF.gru_cell(  # type: ignore[attr-defined]
        x[0, 0], x.new_zeros(8, 4), x.new_zeros(12, 8), x.new_zeros(12, 4)
    ),
    "gradients": lambda x: torch.autograd.grad(
        functional.gelu(functional.layer_norm(y := x.clone().requires_grad_(), (8,))).sum(), y
    ),
    "sparse": lambda x: functional.embedding(torch.tensor([1]), x[0, 0], sparse=True),
}


def _fakes(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [one for each in value for one in _fakes(each)]
    return [value]


def _described(mode: FakeTensorMode, call: Callable[[Tensor], Any], times: int) -> list[Any]:
    """Return all that can be asked of the results of a call, and whose memory they have."""
    with mode:
        for _ in range(times):
            x = torch.zeros(2, 3, 8, 8)
            results = _fakes(call(x))
    memories = dict[int, int]()
    found = list[Any]()
    for one in results:
        if not isinstance(one, Tensor):
            found.append(one)
            continue
        assert isinstance(one, FakeTensor)
        storage = one.untyped_storage()
        place = memories.setdefault(storage._cdata, len(memories))
        found.append(
            (
                *(one.shape, one.stride(), one.storage_offset(), one.dtype, one.device),
                *(one.requires_grad, one.is_conj(), one.is_neg(), one.layout, storage.nbytes()),
                *(place, storage._cdata == x.untyped_storage()._cdata),
                *(torch._C._dispatch_key_set(one), one.fake_mode is mode),
            )
        )
    return found


@pytest.mark.parametrize("name", CALLS)
def test_cached_results_are_those_that_torch_derives(name: str) -> None:
    """The first time and the third, views and memory that is shared too."""
    wanted = _described(FakeTensorMode(), CALLS[name], 1)
    mode = CachedFakeMode()
    assert _described(mode, CALLS[name], 1) == wanted
    assert _described(mode, CALLS[name], 3) == wanted


def test_a_kernel_is_derived_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each layer and micro-batch: that is what a dry run consists of."""
    derived = list[str]()
    dispatch = FakeTensorMode.__torch_dispatch__

    def counted(self: Any, func: Any, *rest: Any) -> Any:
        if func is not torch.ops.prim.device.default:  # asks a fake where it is
            derived.append(str(func))
        return dispatch(self, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counted)
    with CachedFakeMode():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(20)))
        x = torch.zeros(3, 4)
        assert isinstance(x, FakeTensor)
        model(x)
        before = len(derived)
        model(x + 1)
        model(torch.zeros(3, 4))
        assert len(derived) == before + 1  # the sum
        for part in torch.zeros(2, 3, 4):
            model(part)
        assert len(derived) == before + 2  # their memory
        model(torch.zeros(5, 4))
        assert len(derived) > before + 1
    assert derived.count("aten.addmm.default") == 4  # two of an input without a gradient


def test_values_are_asked_of_nobody() -> None:
    """A kernel whose result depends on values raises, the second time too."""
    with CachedFakeMode():
        x = torch.zeros(4)
        for _ in range(2):
            with pytest.raises(DynamicOutputShapeException):
                x.nonzero()
            with pytest.raises(DataDependentOutputException):
                x.sum().item()


def test_another_default_type_is_another_result() -> None:
    """A kernel without a dtype makes tensors of the one that is set."""
    before = torch.get_default_dtype()
    with CachedFakeMode():
        one = torch.zeros(2)
        try:
            torch.set_default_dtype(torch.float64)
            other = torch.zeros(2)
        finally:
            torch.set_default_dtype(before)
    assert (one.dtype, other.dtype) == (torch.float32, torch.float64)
