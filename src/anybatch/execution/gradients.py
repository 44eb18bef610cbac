"""Sum of the gradients of the micro-batches (MBS, Algorithm 1, line 12).

Autograd adds to ``.grad`` in place, which is the fastest sum there is, and right for float32
parameters. Two cases need more. Half-precision sums lose small addends (2048 micro-batches in
bfloat16 lose percents), so those are summed in float32 and cast once. And gradients that were there
before the step must survive a failed one, so they are set aside and added to at the end.

In an accumulator, the sum outlives a backward that fails: the partial ``.grad`` is discarded.

    micro-batch:   p.grad (new) ──> p.grad +=          in place
                   p.grad ──> sum of its own +=        accumulator; float32 for half precision
    hooks:         on leaves that have some, a copy of before, and on it what they return
    delivery:      p.grad = before + factor * sum
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _len_torch_function_stack
from torch.utils.weak import TensorWeakRef

from anybatch.core.hooks import LeafHooks
from anybatch.core.modules import storages_of
from anybatch.errors import NotExactError

HALF = (torch.bfloat16, torch.float16)

Shared = Callable[[list[tuple[Tensor, Tensor | None]]], list[Tensor | None]]


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype its gradient has: ``grad_dtype`` where torch knows it, else its own."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


AROUND = "do that before or after engine.backward"


class Gradients:
    """The sum of the gradients of a step, delivered once.

    Args:
        parameters: all tensors that may receive a gradient.
        wide: sum half-precision gradients in float32. Default True.
        accumulator: keep every sum outside of ``.grad``, so that a failed backward costs one
            micro-batch; it takes one more set of gradients. Default False.
        hooks: those of the parameters, suspended, which fire once the sum is ready. None (default)
            fires none.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        wide: bool = True,
        accumulator: bool = False,
        hooks: LeafHooks | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.hooks = LeafHooks() if hooks is None else hooks
        self._half: list[Tensor] = []
        self._found: list[Tensor] = []
        self._choose(wide=wide, accumulator=accumulator)
        self._separated = 0
        # By ids of parameters: a tensor as a key is hashed by a function of Python.
        self._sums: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}
        self._assigned: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._added: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._complete: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._hooked: dict[int, tuple[Tensor, Tensor | None]] = {}

    def _choose(self, *, wide: bool, accumulator: bool) -> None:
        self._wide, self._accumulator = wide, accumulator
        self._half = []
        if wide:  # `gradient_dtype`, without a call for each
            every = self.parameters
            self._half = [p for p in every if (getattr(p, "grad_dtype", None) or p.dtype) in HALF]

    def divide(self, *, accumulator: bool) -> None:
        """Sum as the gradients of several micro-batches need it."""
        self._choose(wide=True, accumulator=accumulator)

    @property
    def accumulator(self) -> bool:
        """Whether no sum is in ``.grad``, where a failed backward leaves a part of one."""
        return self._accumulator or len(self._half) == len(self.parameters)

    @property
    def half(self) -> tuple[str, ...]:
        """Names of the dtypes with gradients that are summed in float32."""
        if not self._half:
            return ()
        return tuple(sorted({str(gradient_dtype(p)).removeprefix("torch.") for p in self._half}))

    @property
    def added(self) -> bool:
        """Whether gradients were there before, to which the sum is added."""
        return bool(self._before)

    def set_aside(self) -> None:
        """Set the present gradients aside, so that the step starts from none."""
        self._set_aside(self.parameters)

    def _set_aside(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._before[id(parameter)] = parameter.grad
                parameter.grad = None

    def add(self, leaves: Iterable[Tensor]) -> None:
        """Add more leaves before they get a gradient, and set their present gradients aside."""
        here = {id(parameter) for parameter in self.parameters}
        more = {id(leaf): leaf for leaf in leaves if id(leaf) not in here}
        self.parameters += more.values()
        self._found += more.values()
        self._half += [p for p in more.values() if self._wide and gradient_dtype(p) in HALF]
        self._set_aside(more.values())

    def let_go(self) -> None:
        """Hold the leaves that were added only if the program does: a forward may have made them.

        With peft under checkpointing the embeddings of each micro-batch are such a leaf
        (test_leaves_that_forward_makes_end_with_their_micro_batch).
        """
        if not self._found:
            return
        found = {id(leaf) for leaf in self._found}
        noted = [
            (TensorWeakRef(leaf), self._sums.pop(id(leaf), None), self._before.pop(id(leaf), None))
            for leaf in self._found
        ]
        self._found.clear()
        self.parameters[:] = [p for p in self.parameters if id(p) not in found]
        self._half[:] = [p for p in self._half if id(p) not in found]
        for held, total, before in noted:
            leaf = held()
            if leaf is None:
                continue
            gradient, leaf.grad = leaf.grad, None
            self.add([leaf])
            leaf.grad = gradient
            if total is not None:
                self._sums[id(leaf)] = total
            if before is not None:
                self._before[id(leaf)] = before
        self._separated = sum(p.grad is not None for p in self.parameters)

    def marks(self) -> list[tuple[Tensor | None, int]]:
        """Return ``.grad`` of each parameter, and its version."""
        there = [parameter.grad for parameter in self.parameters]
        return [(one, 0 if one is None else one._version) for one in there]

    def refuse_moved(
        self, before: list[tuple[Tensor | None, int]], who: str = "observe=", mend: str = AROUND
    ) -> None:
        """Refuse an observer, or a forward, that has changed the sum that is on its way."""
        pairs = zip(before, self.marks(), strict=True)
        # The version shows a write in place (test_an_observer_that_changes_gradients_is_refused).
        if any(one is not other or n != m for (one, n), (other, m) in pairs):
            raise NotExactError(
                f"gradients must not change while micro-batches run, and {who} changes .grad "
                "(zero_grad, backward, clipping), in which those of earlier micro-batches are "
                f"summed: {mend}"
            )

    def restart(self) -> None:
        """Drop all sums so far, because the step starts over."""
        self._separated = 0
        self._sums.clear()
        self._assigned.clear()
        self._added.clear()
        self._complete.clear()
        self._hooked.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def collect(self) -> None:
        """Add the last micro-batch's gradients to the sums, where autograd did not do it."""
        if self._wide and self._separated != len(self.parameters):  # the step is divided
            self._separate()
        if self._accumulator or self._half:
            self._collect(self.parameters if self._accumulator else self._half)

    def _separate(self) -> None:
        """Clone gradients that share memory, so that an addition to one changes no other.

        torch passes both leaves of ``a.view(-1) + b.view(-1)`` views of one gradient.
        """
        if self._separated == len(self.parameters):
            return  # none is left that could get its first
        there = [p for p in self.parameters if p.grad is not None]
        if len(there) == self._separated:
            return
        self._separated = len(there)
        # torch raises for the storage of a sparse gradient
        # (test_gradients_of_every_layout_add_up_in_any_order).
        dense = [p for p in there if p.grad is not None and p.grad.layout == torch.strided]
        gradients = [p.grad for p in dense if p.grad is not None]
        places = storages_of(gradients)
        if len(set(places)) == len(places):
            return
        first: set[int] = set()
        for parameter, gradient, place in zip(dense, gradients, places, strict=True):
            if place in first:
                parameter.grad = gradient.detach().clone()
            first.add(place)

    @property
    def held(self) -> list[Tensor]:
        """The gradients that there are, and sums that wait for delivery."""
        assigned = (total for _, total in self._assigned.values())
        every = [*(p.grad for p in self.parameters), *self._sums.values(), *assigned]
        return [gradient for gradient in every if gradient is not None]

    def summed(self) -> set[int]:
        """Return the ids of the parameters that have a sum already."""
        return {id(p) for p in self.parameters if p.grad is not None or id(p) in self._sums}

    def take(
        self, parameters: list[Tensor], factor: float | Tensor, old: set[int]
    ) -> list[Tensor | None]:
        """Return the sums of some parameters, times `factor`, and let go of them.

        Inside a backward one of its gradients may share a storage with another one that is still in
        flow, as views of one sum do; so it is not written to, and a copy is returned.

        Args:
            parameters: they will get nothing more in this step.
            factor: as in `finish`.
            old: `summed` before that backward.
        """
        for parameter in parameters:
            if parameter.grad is not None and id(parameter) not in old:
                # Two parameters may get views of one gradient
                # (test_gradients_sent_early_are_those_sent_late_bit_for_bit).
                parameter.grad = parameter.grad.clone()
        wide = [p for p in parameters if self._wide and gradient_dtype(p) in HALF]
        self._collect(parameters if self._accumulator else wide)
        totals = self._totals(parameters, factor)
        for parameter in parameters:
            parameter.grad = None
        return totals

    def _collect(self, parameters: list[Tensor]) -> None:
        there = [p for p in parameters if p.grad is not None]
        if all(map(self._sums.__contains__, map(id, there))):
            totals = [*map(self._sums.__getitem__, map(id, there))]
            gradients = [p.grad for p in there if p.grad is not None]
            kinds = {*map(GROUP, totals), *map(GROUP, gradients)}
            if len(kinds) == 1 and totals[0].layout is torch.strided:
                for parameter in there:
                    parameter.grad = None
                with torch.no_grad():
                    torch._foreach_add_(totals, gradients)
                return
        self._collect_each(there)

    def _collect_each(self, parameters: list[Tensor]) -> None:
        """Add gradients of several dtypes, devices or layouts, and the first ones."""
        dense: defaultdict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        with torch.no_grad():
            for parameter in parameters:
                gradient = parameter.grad
                if gradient is None:
                    continue
                parameter.grad = None
                total = self._sums.get(id(parameter))
                if total is None:
                    half = self._wide and gradient.dtype in HALF
                    plain = gradient.layout is torch.strided and gradient.is_contiguous()
                    one = gradient if plain and not half else self._first(gradient)
                    self._sums[id(parameter)] = one
                # _foreach_add_ adds dense tensors only
                # (test_gradients_of_every_layout_are_summed_in_an_accumulator).
                elif total.layout == gradient.layout == torch.strided:
                    totals, gradients = dense[total.dtype, gradient.dtype, total.device]
                    totals.append(total)
                    gradients.append(gradient)
                else:
                    self._sums[id(parameter)] = _sum(total, gradient)
            for totals, gradients in dense.values():
                torch._foreach_add_(totals, gradients)

    def _first(self, gradient: Tensor) -> Tensor:
        """Return the gradient as a sum that can be added to."""
        if self._wide and gradient.dtype in HALF:
            gradient = gradient.float()
        dense = gradient.layout == torch.strided and not _is_plain(gradient)
        # torch cannot add in place to an expanded tensor
        # (test_gradients_of_every_layout_are_summed_in_an_accumulator).
        return gradient.contiguous() if dense else gradient

    def drop(self) -> None:
        """Drop the gradients that a failed backward wrote to ``.grad``; the sums are separate."""
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self, factor: float | Tensor = 1.0, shared: Shared | None = None) -> None:
        """Make the sum ready for delivery, times `factor`; nothing that was there is touched.

        Args:
            factor: the missing factor of the sum: a denominator known only at the end.
            shared: (parameter, sum) of all parameters -> the sums with those of other processes;
                None (default) where there are none.
        """
        nothing = shared is None and _is_one(factor) and not self._sums and not self._before
        hooked = bool(self.hooks.suspended)
        if nothing and not hooked:
            return  # the sums are where they belong
        if hooked:
            self._separate()  # a hook may write to the one that it gets
        with torch.no_grad():
            totals = self._totals(self.parameters, factor)
            if shared is not None:
                totals = shared(list(zip(self.parameters, totals, strict=True)))
            simple = not (hooked or self._before)  # `_prepare`, without a call for each
            for at, parameter in enumerate(self.parameters):
                total, totals[at] = totals[at], None
                if simple and total is not None:
                    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                    self._assigned[id(parameter)] = parameter, total.to(dtype)
                else:
                    self._prepare(parameter, total)

    def amend(self, sums: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Replace the sums of some parameters after `finish`."""
        sums = list(sums)
        if not sums:
            return
        with torch.no_grad():
            for parameter, total in sums:
                self._assigned.pop(id(parameter), None)
                self._added.pop(id(parameter), None)
                self._prepare(parameter, total)

    def fire(self, *, in_order: bool) -> None:
        """Fire the hooks of the parameters that have some, on the sums from `finish`.

        They find the final values in ``.grad`` of other parameters, and their changes are
        delivered. Only `deliver` writes to the previous gradients.
        """
        shown: dict[int, tuple[Tensor, Tensor | None]] = dict(self._assigned)
        shown |= {key: (p, complete) for key, (p, _, complete) in self._complete.items()}
        for parameter, gradient in shown.values():
            parameter.grad = gradient
        hooked = [parameter for parameter, _ in self._hooked.values()]
        for parameter in hooked:
            parameter.grad = self._before.get(id(parameter))

        def take(parameter: Tensor) -> Tensor | None:
            before, (_, total) = self._before.get(id(parameter)), self._hooked[id(parameter)]
            self._hooked[id(parameter)] = parameter, None
            parameter.grad = None if before is None else before.detach().clone()
            shown[id(parameter)] = parameter, parameter.grad
            return total

        self.hooks.fire(hooked, take, in_order=in_order)
        self._assigned.clear()
        self._complete.clear()
        for key, (parameter, gradient) in shown.items():
            before, found = self._before.get(key), parameter.grad
            if before is None or found is None or found is not gradient or not _is_plain(before):
                self._assigned[key] = parameter, found
            else:
                self._complete[key] = parameter, before, found

    def deliver(self) -> None:
        """Set ``.grad`` to its value before the step plus the sum; nothing here can fail.

        Sums that backward made in place exist already, and `finish` has recorded nothing. All steps
        that can fail (casts, layouts that do not add, tensors that cannot be written to) were done
        in `finish`; the rest are references, and sums in place of plain dense tensors.
        """
        if not (self._assigned or self._added or self._complete):
            return
        with torch.no_grad():
            for parameter, assigned in self._assigned.values():
                parameter.grad = assigned
            for parameter, before, total in self._added.values():
                parameter.grad = before
                if before.dtype == total.dtype:
                    before.add_(total)
                else:
                    before.copy_(total)
            for parameter, before, complete in self._complete.values():
                parameter.grad = before
                before.copy_(complete)

    def _totals(self, parameters: list[Tensor], factor: float | Tensor) -> list[Tensor | None]:
        sums = self._sums
        totals = [sums.pop(id(parameter), parameter.grad) for parameter in parameters]
        if not _is_one(factor):
            for total in totals:
                if total is not None:
                    total.mul_(factor)
        return totals

    def _prepare(self, parameter: Tensor, total: Tensor | None) -> None:
        key = id(parameter)
        before, dtype = self._before.get(key), gradient_dtype(parameter)
        if self.hooks.suspended and self.hooks.fires(parameter, total):
            self._hooked[key] = parameter, None if total is None else total.to(dtype)
        elif total is None:
            self._assigned[key] = parameter, before
        elif before is None:
            self._assigned[key] = parameter, total.to(dtype)
        elif not (_is_plain(before) and _is_plain(total)):
            self._assigned[key] = parameter, _sum(before.to(total.dtype), total).to(dtype)
        elif self.hooks.suspended:  # they may read it
            self._complete[key] = parameter, before, total.add_(before).to(dtype)
        else:  # a half-precision sum is complete here, and rounded once when it is delivered
            ready = total if before.dtype == total.dtype else total.add_(before)
            self._added[key] = parameter, before, ready


def _is_plain(gradient: Tensor) -> bool:
    """Say whether a tensor can be added to in place: dense, and no two entries in one place."""
    if gradient.layout != torch.strided or gradient.is_inference():
        return False
    steps = gradient.stride()
    pairs = zip(gradient.shape, steps, strict=True)
    return 0 not in steps or all(size < 2 or step != 0 for size, step in pairs)


def _sum(before: Tensor, total: Tensor) -> Tensor:
    """Return a new tensor; torch adds sparse to dense, and not dense to sparse."""
    return total + before if before.is_sparse else before + total


def _is_one(factor: float | Tensor) -> bool:
    return isinstance(factor, int | float) and factor == 1.0


TORCHS = torch.autograd.backward

GROUP = attrgetter("dtype", "device", "layout")
"""Gradients that agree in it are added to their sums in one call."""

FORM = attrgetter("shape", "dtype")
"""What torch compares of a root and the gradient that a backward begins with."""


def run_backward(roots: list[Tensor], gradients: list[Tensor], inputs: list[Tensor] | None) -> None:
    """Run a backward as ``torch.autograd.backward`` does.

    Its checks of arguments take as long as the graph of a small layer. They are made where they
    may find something, or where a mode, a transform or a tool gets the call
    (test_a_backward_is_torchs_own_where_something_notices).
    """
    plain = inputs is None and torch.autograd.backward is TORCHS
    plain = plain and not (_len_torch_function_stack() or _are_functorch_transforms_active())
    plain = plain and {*map(type, roots), *map(type, gradients)} == {Tensor}
    if plain and [*map(FORM, roots)] == [*map(FORM, gradients)]:
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        run(
            (*roots,), (*gradients,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        torch.autograd.backward(roots, gradients, inputs=inputs)


def outside_autocast(device_type: str, run: Callable[..., None]) -> Callable[..., None]:
    """Return a backward without autocast, as torch advises; forward chose the dtypes."""
    outside: Callable[..., None] = torch.autocast(device_type, enabled=False)(run)
    return outside
