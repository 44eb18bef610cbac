"""Every batch normalisation of a thread, wherever a model calls it, under an unmodified model.

Swapping modules is not enough: a bare ``F.batch_norm`` would stay unchanged, silently. A function
mode intercepts modules and bare calls. It is off while it handles a call, and ``backward`` is one:
there it has to be entered again, because checkpointed parts of a model are computed anew in it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.autograd import _make_grads, _tensor_or_tensors_to_tuple
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from anybatch.core.functions import keywords
from anybatch.core.meeting import samples_here
from anybatch.errors import NotExactError

OWN = torch.batch_norm
"""Torch's own: while another thread listens, something else may stand in its place."""


class Norms(TorchFunctionMode):
    """Function mode that runs `normalise` in place of training-mode batch normalisation.

    Args:
        counters: the ``num_batches_tracked`` of all modules.

    Attributes:
        samples: that the model was called with last.
    """

    def __init__(self, counters: Iterable[Tensor]) -> None:
        super().__init__()
        self.samples = 0
        self._counters = {id(counter) for counter in counters}

    @abstractmethod
    def normalise(
        self,
        x: Tensor,
        running: tuple[Tensor | None, Tensor | None],
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Return [n, C, ...] normalised for training."""

    def by_itself(self, x: Tensor) -> bool:
        """Say whether `x` is no batch: one row of n * C channels is each sample by itself."""
        self.samples = samples_here() or self.samples  # backward computes some again
        return x.shape[0] == 1 and self.samples > 1

    def escapes(self, tensor: Tensor) -> None:
        """Record that the memory of a tensor is read outside of all kernels."""

    @abstractmethod
    def counts(self, counter: Tensor) -> bool:
        """Say whether a counter of forwards moves now."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Intercept normalisation and counting; run all other functions unchanged."""
        kwargs = keywords(func, kwargs)
        if func is F.batch_norm:
            return self._function(*args, **kwargs)
        if func is OWN:
            return self._torch(*args, **kwargs)
        if func in AGAIN:
            with self:
                return AGAIN[func](*args, **kwargs)
        if func in ESCAPES:
            self.escapes(args[0])
        counter = func is Tensor.add_ and id(args[0]) in self._counters
        if counter and not self.counts(args[0]):
            return args[0]
        return func(*args, **kwargs)

    def _function(
        self,
        input: Tensor,  # noqa: A002
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,  # noqa: FBT001, FBT002
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or self.by_itself(input):
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        if any(isinstance(t, Tensor) and is_batchedtensor(t) for t in (input, weight, bias)):
            raise NotExactError(
                "batch normalisation must be called outside torch.func.vmap where the batch is "
                "divided, which passes its samples in parts, and it was called inside: call it on "
                "the batch itself, loop instead of vmap, or give micro_batch >= the batch size"
            )
        running = running_mean, running_var
        return self.normalise(input, running, weight, bias, momentum, eps)

    def _torch(
        self,
        input: Tensor,  # noqa: A002
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,  # noqa: FBT001
        momentum: float,
        eps: float,
        cudnn_enabled: bool,  # noqa: ARG002, FBT001
    ) -> Tensor:
        return self._function(
            input, running_mean, running_var, weight, bias, training, momentum, eps
        )


Some = Tensor | Sequence[Tensor] | None


def _backward(
    tensors: Tensor | Sequence[Tensor],
    grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,  # noqa: FBT001
    create_graph: bool = False,  # noqa: FBT001, FBT002
    grad_variables: Tensor | Sequence[Tensor | None] | None = None,
    inputs: Some = None,
) -> None:
    """Run a backward as ``torch.autograd.backward`` does, with the modes that are on."""
    initial_gradients = grad_variables if grad_tensors is None else grad_tensors
    _run(tensors, initial_gradients, retain_graph, create_graph, _several(inputs), accumulate=True)


def _of_tensor(
    self: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,  # noqa: FBT001
    create_graph: bool = False,  # noqa: FBT001, FBT002
    inputs: Some = None,
) -> None:
    """Run a backward as ``Tensor.backward`` does."""
    _run(self, gradient, retain_graph, create_graph, _several(inputs), accumulate=True)


def _grad(
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,  # noqa: FBT001
    create_graph: bool = False,  # noqa: FBT001, FBT002
    only_inputs: bool = True,  # noqa: ARG001, FBT001, FBT002
    allow_unused: bool | None = None,  # noqa: FBT001
    is_grads_batched: bool = False,  # noqa: FBT001, FBT002
    materialize_grads: bool = False,  # noqa: FBT001, FBT002
) -> tuple[Tensor | None, ...]:
    """Return gradients as ``torch.autograd.grad`` does."""
    if is_grads_batched:
        raise NotExactError(
            "gradients must be taken one at a time where micro-batches wait for each other, and "
            "forward calls torch.autograd.grad with is_grads_batched. Give micro_batch >= the "
            "batch size"
        )
    wanted = _several(inputs)
    unused = materialize_grads if allow_unused is None else allow_unused
    found = _run(
        outputs, grad_outputs, retain_graph, create_graph, wanted, accumulate=False, unused=unused
    )
    if not materialize_grads:
        return found
    return tuple(
        torch.zeros_like(x) if gradient is None else gradient
        for x, gradient in zip(wanted, found, strict=True)
    )


def _several(tensors: Some) -> tuple[Tensor, ...]:
    if tensors is None:
        return ()
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def _run(
    tensors: Tensor | Sequence[Tensor],
    initial_gradients: Tensor | Sequence[Tensor | None] | None,
    retain_graph: bool | None,  # noqa: FBT001
    create_graph: bool,  # noqa: FBT001
    inputs: tuple[Tensor, ...],
    *,
    accumulate: bool,
    unused: bool = True,
) -> tuple[Tensor | None, ...]:
    """Run autograd's engine; the checks of gradients and roots are torch's own."""
    roots = _several(tensors)
    gradients = _tensor_or_tensors_to_tuple(initial_gradients, len(roots))
    found: tuple[Tensor | None, ...] = torch.autograd.Variable._execution_engine.run_backward(
        roots,
        _make_grads(roots, gradients, is_grads_batched=False),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        inputs,
        allow_unreachable=unused,
        accumulate_grad=accumulate,
    )
    return found


AGAIN: dict[Any, Callable[..., Any]] = {
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
    Tensor.backward: _of_tensor,
}
"""Calls in which parts of a model may be computed again."""

ESCAPES = frozenset(
    {
        Tensor.__deepcopy__,
        Tensor.__reduce_ex__,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.tolist,
        Tensor.untyped_storage,
        Tensor.storage,
        Tensor._typed_storage,
    }
)
"""Calls that read a tensor's memory without a kernel."""
