"""The functions and variables of a training step, from tensors without data.

A `FakeTensorMode` runs every kernel on shapes alone, and a dispatch mode sees each of them with
the storages it reads, makes and writes to. A variable is a storage, so views and in-place kernels
need no care; floating-point operations come from torch's own formulas (``flop_counter``).

Source: design 5.5 and 5.7; Hayakawa and Narihira, Figure 1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from anybatch.memory.fakes import interrupted_between_functions
from anybatch.memory.meter import tensors_in
from anybatch.offloading.schedule import Function, Trace, Variable

SMALL = 1 << 16
"""Bytes below which a variable stays: moving it costs more than it frees."""


STATISTICS = ("aten.native_batch_norm.default", "aten.cudnn_batch_norm.default")
"""Kernels that write to their arguments 3 and 4 in training, of which their schema says nothing."""


class Tracing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Write down every kernel inside ``with tracing:``, and the storages it uses.

    Args:
        states: name -> tensor that is there before and after the step.
        inputs: name -> tensor that is there before it.
        small: bytes below which a variable stays on the device.

    Attributes:
        backward: what comes from now on comes after the forward pass.
    """

    backward = False

    def __init__(
        self,
        states: Iterable[tuple[str, Tensor]],
        inputs: Iterable[tuple[str, Tensor]],
        small: int = SMALL,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._small = small
        self._variables: list[Variable] = []
        self._functions: list[Function] = []
        self._place: dict[int, int] = {}
        self._watches: list[Any] = []
        for after, named in ((True, states), (False, inputs)):
            for name, tensor in named:
                self._variable(tensor.untyped_storage(), name, before=True, after=after)

    def trace(self) -> Trace:
        """Return what was seen."""
        used = {v for function in self._functions for v in function.uses}
        retained = [v for v, one in enumerate(self._variables) if v in used or one.after]
        place = {v: k for k, v in enumerate(retained)}
        return Trace(
            tuple(self._variables[v] for v in retained),
            tuple(_renumbered(function, place) for function in self._functions),
        )

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one kernel, and write it down."""
        kwargs = kwargs or {}
        arguments = {t.untyped_storage()._cdata: t for t in tensors_in((args, kwargs))}
        result = func(*args, **kwargs)
        returned = {t.untyped_storage()._cdata: t for t in tensors_in(result)}
        fresh = [key for key in returned if key not in self._place]
        written = _written(func, args, kwargs)
        if not fresh and not written:  # a view
            return result
        reads = tuple(self._place[key] for key in arguments if key in self._place)
        name = str(func).removeprefix("aten.").split(".")[0]
        makes = tuple(
            self._variable(returned[key].untyped_storage(), f"{name}{len(self._functions)}")
            for key in fresh
        )
        tensors = [*tensors_in((args, kwargs)), *tensors_in(result)]
        self._functions.append(
            Function(
                name=name,
                reads=reads,
                makes=makes,
                writes=tuple(self._place[key] for key in written if key in self._place),
                flops=_flops(func, args, kwargs, result),
                touched=sum(t.numel() * t.element_size() for t in tensors),
                backward=self.backward,
                draws=torch.Tag.nondeterministic_seeded in func.tags,
            )
        )
        return result

    def _variable(
        self, storage: Any, name: str, *, before: bool = False, after: bool = False
    ) -> int:
        key, v = storage._cdata, len(self._variables)
        if key in self._place:
            return self._place[key]
        size = storage.nbytes()
        self._variables.append(Variable(name, size, before, after, stays=size < self._small))
        self._place[key] = v
        self._watches.append(weakref.ref(storage, lambda _: self._place.pop(key, None)))
        return v


def trace_step(
    model: nn.Module,
    loss_fn: Callable[[Any, Tensor], Tensor],
    inputs: tuple[int, ...],
    targets: tuple[int, ...],
    *,
    target_dtype: torch.dtype = torch.long,
    momentum: bool = True,
    small: int = SMALL,
) -> Trace:
    """Return the trace of forward, loss, backward and an SGD update of a model on shapes alone.

    Args:
        model: its parameters and buffers are replaced by fakes for the time of the call.
        loss_fn: of the outputs and the targets.
        inputs: shape of the mini-batch, float32.
        targets: shape of the targets.
        target_dtype: theirs.
        momentum: the update has one more state for each parameter.
        small: bytes below which a variable stays on the device.

    Raises:
        Exception: whatever the model raises on tensors without data, such as for ``.item()``.
    """
    with (
        interrupted_between_functions(),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        fakes = {
            name: mode.from_tensor(tensor.detach()).requires_grad_(tensor.requires_grad)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }
        parameters = {name: t for name, t in fakes.items() if t.requires_grad}
        state = {name: torch.empty_like(t) for name, t in parameters.items()} if momentum else {}
        x, y = torch.empty(inputs), torch.empty(targets, dtype=target_dtype)
        states = [*fakes.items(), *((f"momentum {name}", t) for name, t in state.items())]
        with Tracing(states, [("inputs", x), ("targets", y)], small) as tracing:
            loss = loss_fn(torch.func.functional_call(model, fakes, (x,)), y)
            tracing.backward = True
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            _update(list(parameters.values()), list(gradients), list(state.values()))
    found: Trace = tracing.trace()
    return found


def _update(parameters: list[Tensor], gradients: list[Tensor], momentum: list[Tensor]) -> None:
    """Take a step of SGD over lists, with momentum where it has some."""
    sgd = torch.optim.SGD(parameters, 1e-3, momentum=0.9 if momentum else 0.0, foreach=True)
    for parameter, buffer in zip(parameters, momentum, strict=False):
        sgd.state[parameter]["momentum_buffer"] = buffer
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    sgd.step()


def _renumbered(function: Function, place: dict[int, int]) -> Function:
    def moved(variables: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(place[v] for v in variables)

    reads, makes, writes = map(moved, (function.reads, function.makes, function.writes))
    return replace(function, reads=reads, makes=makes, writes=writes)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return the storages of the arguments that a kernel's schema says it writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [t.untyped_storage()._cdata for t in tensors_in(value)]
    if str(func) in STATISTICS and args[5]:
        found += [t.untyped_storage()._cdata for t in tensors_in(args[3:5])]
    return found


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Return torch's count; its one for the weight gradient of grouped convolutions is too high."""
    packet = func._overloadpacket
    if packet is torch.ops.aten.convolution_backward:
        out, x, weight, _, stride, padding, dilation, transposed, *_, wanted = args
        forward = flop_registry[torch.ops.aten.convolution]
        once = forward(x, weight, None, stride, padding, dilation, transposed, out_val=out)
        return float(once * (wanted[0] + wanted[1]))
    formula = flop_registry.get(packet)
    return float(formula(*args, **kwargs, out_val=result)) if formula is not None else 0.0
