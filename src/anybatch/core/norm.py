"""BatchNorm under an unmodified model: every call of a thread, replaced or counted.

Swapping modules is not enough: a bare ``F.batch_norm`` would stay unchanged, silently. A function
mode intercepts modules and bare calls. It is off while it handles a call, and ``backward`` is one:
there it has to be entered again, because checkpointed parts of a model are computed anew in it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.autograd import _make_grads, _tensor_or_tensors_to_tuple
from torch.jit import ScriptModule
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from anybatch.core.barrier import Site, samples_here, site_of
from anybatch.core.modules import Modules, in_training, keywords
from anybatch.core.moments import accumulated
from anybatch.errors import NotExactError

OWN = torch.batch_norm
"""Torch's own: another thread that detects calls may have replaced it."""


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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


# Where the samples of a batch meet inside a model: BatchNorm in training.
#
# It normalises with the statistics of the rows it is given, so rows that come in micro-batches give
# another function than rows that come at once; then micro-batches go in lanes. Modules are found by
# walking the model; a bare ``F.batch_norm`` only shows itself when it is called.

WAY_OUT = (
    'Use batchnorm="local" to normalise each micro-batch by its own statistics, which is inexact; '
    "or call eval() on these layers, replace them by GroupNorm, or give micro_batch >= the batch "
    "size"
)

SCRIPTED = ("aten::batch_norm", "aten::native_batch_norm", "aten::_batch_norm_impl_index")
"""Kernels whose sixth operand says that they use the statistics of their rows."""


class BatchStatisticsError(NotExactError):
    """A kernel normalises over the batch, and no module said that it would."""


class ScriptedNormError(NotExactError):
    """TorchScript normalises over the batch, where micro-batches cannot wait for each other."""


class GatherError(BatchStatisticsError):
    """Error of a forward that gathers the rows of the full batch.

    Attributes:
        call: the call of it, in words.
    """

    def __init__(self, what: str) -> None:
        self.call = f"a call of {what} in forward"
        super().__init__(
            "samples must not meet inside the model when the batch is split, and they meet in "
            f'{what} called in forward. Use batchnorm="exact", or give micro_batch >= the batch '
            "size"
        )


def training_batchnorms(modules: Modules) -> list[str]:
    """Return the names of the BatchNorm modules that would use the statistics of their rows."""
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in modules
        if isinstance(module, _BatchNorm)
        and (module.training or (module.running_mean is None and module.running_var is None))
    ]


def running_statistics(modules: Modules) -> set[tuple[int, str]]:
    """Return ``(id(module), buffer name)`` of every running statistic."""
    return {
        (id(module), name)
        for _, module in modules
        if isinstance(module, _NormBase)
        for name in module._buffers
    }


def counters(modules: Modules) -> list[Tensor]:
    """Return every ``num_batches_tracked``."""
    found = [
        getattr(m, "num_batches_tracked", None) for _, m in modules if isinstance(m, _NormBase)
    ]
    return [counter for counter in found if counter is not None]


def names_of_norms(modules: Modules) -> dict[int, str]:
    """Return id of every running mean and weight of BatchNorm -> the path of its module."""
    return {
        id(tensor): path or "the model"
        for path, module in modules
        if isinstance(module, _BatchNorm)
        for tensor in (module.running_mean, module.weight)
        if tensor is not None
    }


def refuse(name: str) -> NoReturn:
    """Raise `BatchStatisticsError` for a kernel that normalises over the batch."""
    raise BatchStatisticsError(
        "samples must not meet inside the model when the batch is split, and they meet in "
        f"BatchNorm in training mode: {name}. {WAY_OUT}"
    )


def refuse_lanes(modules: Modules, names: list[str], *, literal: bool) -> None:
    """Raise where micro-batches cannot wait for each other in BatchNorm.

    Args:
        modules: of the model.
        names: the layers where samples meet.
        literal: the loss is Algorithm 1 to the letter, which knows no full batch.

    Raises:
        NotExactError: naming the first of the layers.
    """
    compiled = [
        name or "the model"
        for name, module in modules
        if _is_compiled(module) and any(isinstance(inner, _BatchNorm) for inner in module.modules())
    ]
    reason = f"torch.compile has compiled {compiled[0]}" if compiled else ""
    if literal:
        reason = "Algorithm 1 to the letter computes the loss of each micro-batch by itself"
    if reason:
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise NotExactError(
            "micro-batches must wait for each other where samples meet, which is BatchNorm in "
            f"training mode ({shown}), and {reason}, where they cannot. {WAY_OUT}"
        )


def refuse_scripted_norms(modules: Modules) -> None:
    """Raise where TorchScript normalises over the batch: its calls are none that can wait.

    Raises:
        ScriptedNormError: naming the first of the modules.
    """
    for name, module in modules:
        if isinstance(module, ScriptModule) and _normalises_in_script(module):
            raise ScriptedNormError(
                "micro-batches must wait for each other where samples meet, and "
                f"{name or 'the model'} is a torch.jit.ScriptModule with BatchNorm in training "
                "mode, where they cannot: use the module it was made of, or freeze its statistics "
                "with .eval() before it is scripted or traced, or give micro_batch >= the batch "
                "size"
            )


def _normalises_in_script(module: ScriptModule) -> bool:
    """Return whether a scripted or traced module has a batch norm that uses its batch's rows."""
    graph = getattr(module, "inlined_graph", None)  # none where it has no forward
    nodes = [] if graph is None else [n for name in SCRIPTED for n in graph.findAllNodes(name)]
    for flag in (list(node.inputs())[5] for node in nodes):
        constant = flag.node().kind() == "prim::Constant"
        if flag.toIValue() if constant else any(map(in_training, module.modules())):
            return True
    return False


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


# BatchNorm without batch statistics, for inspections of a model and for dry runs.
#
# Whether samples meet *elsewhere* in a model shows only when they do not meet in BatchNorm. And a
# rehearsal on one sample must not fail for the want of a variance, nor move running statistics. So
# the layer normalises with mean 0 and variance 1, by the kernel that is used between meetings.


class NormObserver(Protocol):
    """Protocol of an observer of normalisations while a model is inspected."""

    def record_input(self, x: Tensor) -> None:
        """Record the input of a normalisation."""

    def record_site(self, site: Site) -> None:
        """Record a place of forward where samples meet."""


class RefusedNorms(Norms):
    """While it is on, batch normalisation for training is refused: no module said there would be.

    Raises:
        BatchStatisticsError: from the call.
    """

    def normalise(
        self,
        x: Tensor,  # noqa: ARG002
        running: tuple[Tensor | None, Tensor | None],  # noqa: ARG002
        weight: Tensor | None,  # noqa: ARG002
        bias: Tensor | None,  # noqa: ARG002
        momentum: float,  # noqa: ARG002
        eps: float,  # noqa: ARG002
    ) -> Tensor:
        """Refuse it."""
        return refuse("batch_norm called in forward")

    def by_itself(self, x: Tensor) -> bool:
        """Return whether `x` has one row; of the two forwards of an inspection, one has several."""
        return x.shape[0] == 1

    def counts(self, counter: Tensor) -> bool:  # noqa: ARG002
        """Everything is counted."""
        return True


class NonReducingNorms(Norms):
    """While it is on, batch normalisation for training mixes no samples and moves no statistics.

    Args:
        counters: the ``num_batches_tracked`` of all modules.
        observer: records where samples meet. Default none.
        rows: of the full batch, if gathered tensors shall be as large. Default 0: they are not.

    Attributes:
        gathered: bytes gathered so far.
        called: arguments of functions of the full batch, in order.
        singles: calls that normalise each of several samples by itself.
    """

    def __init__(
        self,
        counters: Iterable[Tensor],
        observer: NormObserver | None = None,
        *,
        rows: int = 0,
    ) -> None:
        super().__init__(counters)
        self._observer, self.rows, self.gathered = observer, rows, 0
        self.called: list[Any] = []
        self.singles = 0

    def normalise(
        self,
        x: Tensor,
        running: tuple[Tensor | None, Tensor | None],  # noqa: ARG002
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Return x, scaled and shifted."""
        if self._observer is not None:
            self._observer.record_input(x)
        self.meets(site_of(x))
        dtype = accumulated(x.dtype) if weight is None else weight.dtype
        mean = x.new_zeros(x.shape[1], dtype=dtype)
        var = x.new_ones(x.shape[1], dtype=dtype)
        return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps)

    def meets(self, site: Site) -> None:
        """Record a place of forward where samples meet."""
        if self._observer is not None:
            self._observer.record_site(site)

    def by_itself(self, x: Tensor) -> bool:
        """Say so, and count it; of a single sample, where one of several was."""
        found = super().by_itself(x) or (self.singles > 0 and x.shape[0] == 1)
        self.singles += found
        return found

    def counts(self, counter: Tensor) -> bool:  # noqa: ARG002
        """Return True: momentum may depend on the count. The caller restores the counter."""
        return True
