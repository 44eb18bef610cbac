"""Hooks on parameters, which fire once a step, on the gradient of the full batch.

torch fires the hooks of a leaf whenever a backward has a gradient for it, so in a loop over
micro-batches ``p.register_hook(lambda g: g.clamp(-c, c))`` clamps every part and not the sum. For a
step the hooks are suspended. At its end one backward, whose nodes only return the sums, lets torch
itself fire them: in its order, with its checks, with the previous ``.grad``.

    micro-batches:  p.grad += d(part), no hook        end:  sum ──hooks──> .grad += ──hooks──> done

Source: torch's AccumulateGrad.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from anybatch.errors import NotExactError

Registered = OrderedDict[int, Callable[..., Any]]
"""The hooks of one sort on one leaf, as torch holds them."""

SERVICE = "_anybatch_service"
"""The attribute of a hook of our own, which fires with every micro-batch."""

Hook = TypeVar("Hook", bound=Callable[..., object])

ATTRIBUTES = "_backward_hooks", "_post_accumulate_grad_hooks"
"""The attributes of a leaf that hold the hooks before and after its gradient is added."""


def service(hook: Hook) -> Hook:
    """Mark a hook as one of our own."""
    setattr(hook, SERVICE, True)
    return hook


@dataclass(frozen=True)
class Suspended:
    """The hooks of a leaf that do not fire for now.

    Attributes:
        leaf: the leaf.
        held: for each of `ATTRIBUTES`, the object that torch holds; None where there is none.
        entries: the contents of each.
    """

    leaf: Any
    held: tuple[Registered | None, ...]
    entries: tuple[list[tuple[int, Any]], ...]

    def resume(self) -> None:
        """Let torch hold the same objects again."""
        for name, held in zip(ATTRIBUTES, self.held, strict=True):
            if getattr(self.leaf, name) is not held:
                setattr(self.leaf, name, held)

    def restore(self) -> None:
        """Resume the hooks, and restore the recorded entries of their containers."""
        self.resume()
        for held, entries in zip(self.held, self.entries, strict=True):
            if held is not None and not _same(list(held.items()), entries):
                held.clear()
                held.update(entries)


class LeafHooks:
    """The suspended hooks of the leaves of a step.

    Attributes:
        suspended: id of a leaf -> its hooks.
    """

    def __init__(self) -> None:
        self.suspended: dict[int, Suspended] = {}
        self._order: dict[int, int] = {}

    def __contains__(self, leaf: Tensor) -> bool:
        return id(leaf) in self.suspended

    def count(self, leaf: Tensor) -> tuple[int, ...]:
        """Return how many hooks of each of `ATTRIBUTES` are suspended on a leaf."""
        found = self.suspended.get(id(leaf))
        return () if found is None else tuple(map(len, found.entries))

    def suspend(self, leaves: Iterable[Tensor]) -> None:
        """Suspend the hooks of some leaves, but for our own.

        Args:
            leaves: tensors with a graph and those already suspended are skipped.
        """
        for leaf in leaves:
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                self._suspend(leaf)

    def _suspend(self, leaf: Any) -> None:
        before, after = held = tuple(getattr(leaf, name) for name in ATTRIBUTES)
        ours = {key: hook for key, hook in (after or {}).items() if hasattr(hook, SERVICE)}
        persons = bool(before) or len(ours) < len(after or ())
        if id(leaf) in self.suspended or not persons or not leaf.is_leaf:
            return
        entries = tuple(list((one or {}).items()) for one in held)
        self.suspended[id(leaf)] = Suspended(leaf, held, entries)
        if before is not None:
            leaf._backward_hooks = None
        # torch reaches leaf tensors in an order of its own, on which hooks that share state rely
        # (test_hooks_fire_once_on_the_gradient_of_the_full_batch).
        note = service(partial(self._note, id(leaf)))
        leaf._post_accumulate_grad_hooks = OrderedDict([*ours.items(), (-1, note)])

    def _note(self, leaf: int, _: Tensor) -> None:
        self._order.setdefault(leaf, len(self._order))

    def restore(self) -> None:
        """Restore all hooks, as if there had been no step."""
        for one in self.suspended.values():
            one.restore()

    def resume(self) -> None:
        """Let hooks fire again; those that were removed meanwhile are gone.

        Raises:
            NotExactError: some were registered meanwhile.
        """
        for one in self.suspended.values():
            refuse_registered([one.leaf])
            one.resume()

    def fire(
        self, leaves: Sequence[Tensor], take: Callable[[Tensor], Tensor | None], *, in_order: bool
    ) -> None:
        """Fire the hooks of `leaves`, and add the returned gradients to ``.grad``.

        Args:
            leaves: suspended ones, in the same order on every rank.
            take: restores ``.grad`` of a leaf to its value before the step, and returns the sum.
            in_order: in the order in which the first micro-batch reached them; else in the reverse
                order of `leaves`, which is the same for ranks without samples.

        Raises:
            NotExactError: as in `resume` and `refuse_on_nodes`.
        """
        self.resume()
        noted = self._order if in_order else {}
        last = sorted(leaves, key=lambda leaf: noted.get(id(leaf), len(noted)), reverse=True)
        with torch.enable_grad():  # the newest node is the first that a backward comes to
            roots = [_Sum.apply(leaf, take) for leaf in last]  # type: ignore[no-untyped-call]
        refuse_on_nodes(root.grad_fn.next_functions[0][0] for root in roots)
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    def fires(self, leaf: Tensor, total: Tensor | None) -> bool:
        """Say whether a leaf has hooks, and a gradient: torch fires them for an undefined one, too.

        Args:
            leaf: the leaf.
            total: its sum; None where no backward has had one.
        """
        return leaf in self and (total is not None or id(leaf) in self._order)


class _Sum(torch.autograd.Function):
    """The node that hands the sum of a leaf to torch, which fires its hooks."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, take: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.take = partial(take, leaf)
        return torch.zeros((), device=leaf.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        return ctx.take(), None


def refuse_registered(leaves: Iterable[Any]) -> None:
    """Refuse hooks that forward has registered on leaves with suspended hooks, or with none."""
    for leaf in leaves:
        found = [hook for name in ATTRIBUTES for hook in (getattr(leaf, name) or {}).values()]
        if any(not hasattr(hook, SERVICE) for hook in found):
            raise NotExactError(
                "hooks on parameters must be registered before a step, and one was registered "
                f"during it on a parameter of shape {tuple(leaf.shape)}, which each micro-batch "
                "would repeat: register it once, outside of forward"
            )


def refuse_on_nodes(nodes: Iterable[Any]) -> None:
    """Refuse hooks on the AccumulateGrad nodes of leaves, which cannot be suspended."""
    for node in nodes:
        for register in (node.register_hook, node.register_prehook):
            handle = register(refuse_on_nodes)  # torch tells of its hooks by the handle alone
            hooks = len(handle.hooks_dict_ref())
            handle.remove()
            if hooks > 1:
                raise NotExactError(
                    "hooks must be on parameters, where they fire once on the gradient of the "
                    "full batch, and one is on the AccumulateGrad node of a parameter of shape "
                    f"{tuple(node.variable.shape)}, where it fires with every micro-batch: use "
                    "register_hook or register_post_accumulate_grad_hook of the parameter"
                )


def _same(one: list[tuple[int, Any]], other: list[tuple[int, Any]]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a == b and f is g for (a, f), (b, g) in pairs)
