"""Model sharded by ``fully_shard``, gathered for a step and sharded again after it.

FSDP2 gathers and frees parameters around every module, so all ranks must run it equally often: with
3 micro-batches here and 2 there it waits for ever, and the threads of lockstep confuse its hooks.
For a step all of that is removed. The parameters are gathered once, the classes and hooks of FSDP
detached, and the rest is the user's plain model: micro-batches, lanes and ranks without samples run
as without FSDP. The sums are cut: each rank retains its part of the gradient.

    DTensor [n/N, ...] ──gather──> Parameter [n, ...] ──step──> .grad, summed over ranks
       ^ .grad += its part  <───────────────cut────────────────────┘

The price is memory: parameters and gradients of the full model are resident during a step, and are
counted; tensors that live between steps, optimizer state included, are sharded.

Source: torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anybatch.core import pytree
from anybatch.core.modules import Modules, is_spread, local, walk
from anybatch.core.optimizers import allocated, rounded
from anybatch.core.transaction import uninterrupted
from anybatch.distributed.local_batch import Amended
from anybatch.distributed.process_group import Group
from anybatch.errors import LossError, NotExactError, NotYetError

T = TypeVar("T")
Owners = list[tuple[str, nn.Module, str, Any]]
"""(path, module, name, parameter)."""

FSDP = "torch.distributed.fsdp"
"""Where the classes, states and hooks of FSDP are defined."""


def sharded_of(model: nn.Module) -> Sharded | None:
    """Return the `Sharded` that gathers a model for a step; None for an unsharded model."""
    fsdp = sys.modules.get(FSDP)  # whoever has sharded a model has imported it
    modules = walk(model)
    if fsdp is not None:
        for path, module in modules:
            if isinstance(module, fsdp.FullyShardedDataParallel):
                raise NotYetError(
                    "parameters must be sharded by torch.distributed.fsdp.fully_shard, and "
                    f"{path or 'the model'} is in FullyShardedDataParallel: use fully_shard"
                )
        if any(isinstance(module, fsdp.FSDPModule) for _, module in modules):
            return Sharded(model)
    for path, module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if is_spread(tensor):
                raise NotYetError(
                    "parameters must be unsharded on every rank or sharded by fully_shard, and "
                    f"{_name(path, name)} is a DTensor that fully_shard has not made: tensor "
                    "parallel models are not supported yet"
                )
    return None


class Sharded:
    """The parameters of a model that ``fully_shard`` has spread.

    Attributes:
        shards: during a step, the parameters as they are spread; each once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.shards: list[Tensor] = []
        self._gathered: dict[int, nn.Parameter] = {}
        self._spread: dict[int, Tensor] = {}
        self._undo: list[Callable[[], None]] = []

    def around(
        self,
        run: Callable[[], T],
        group: Group | None,
        agreed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> T:
        """Run a step, or its forecast, on the gathered model.

        Args:
            run: the step.
            group: the ranks; None is one.
            agreed: context of the collectives, once all ranks will reach them.

        Raises:
            NotYetError: a parameter is sharded in an unsupported way.
            NotExactError: a hook of a parameter would not be called.
        """
        self._spread_again()  # an interrupt may have come at the wrong instruction
        modules = walk(self._model)
        wrapped: list[tuple[str, Any]] = [pair for pair in modules if _is_fsdp(pair[1])]
        policies = policies_of(wrapped)
        for _, module in wrapped:
            module.reshard()  # an evaluation outside may have left the root gathered
        owners = _owners(modules)
        for path, _, name, shard in owners:
            refuse_unknown(_name(path, name), shard, group)
        try:
            with agreed():
                self._gather(owners, policies, group)
            with uninterrupted():
                for path, module in wrapped:
                    self._undo += _plainly(module)
                    self._undo += casting(module, policies[path])
                for _, module, name, shard in owners:
                    self._undo.append(partial(setattr, module, name, shard))
                    setattr(module, name, self._gathered[id(shard)])
            return run()
        finally:
            with uninterrupted():
                self._spread_again()

    def _spread_again(self) -> None:
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        self.shards, self._gathered, self._spread = [], {}, {}

    def _gather(self, owners: Owners, policies: dict[str, Any], group: Group | None) -> None:
        once: dict[int, tuple[Any, torch.dtype]] = {}
        for path, _, _, shard in owners:
            once.setdefault(id(shard), (shard, dtype_in(policies, path, shard)))
        self._gathered = gathered([*once.values()], group)
        self.shards = [shard for shard, _ in once.values()]
        self._spread = {id(self._gathered[id(shard)]): shard for shard in self.shards}

    def holds(self, parameter: Tensor) -> bool:
        """Say whether a parameter was gathered for the step."""
        return id(parameter) in self._spread

    @property
    def bytes(self) -> int:
        """Bytes of this rank's parts of parameters, which exist next to the gathered ones."""
        return sum(rounded(p.untyped_storage().nbytes(), p.device) for p, _ in self._parts())

    @property
    def bytes_of_gradients(self) -> int:
        """Bytes of the parts of the gradients."""
        trained = [part for part, trained in self._parts() if trained]
        return sum(map(allocated, trained))

    def _parts(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield each part that has memory of its own, and whether it is trained."""
        for shard in self.shards:
            part, full = local(shard), self._gathered[id(shard)]
            if part.untyped_storage().data_ptr() != full.untyped_storage().data_ptr():
                yield part, shard.requires_grad

    def cut(
        self, sums: Sequence[tuple[Tensor, Tensor | None]], totals: list[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of the sharded parameters in place of the gathered ones'.

        Args:
            sums: (parameter, this rank's sum) of all parameters, sharded and not.
            totals: the sums over all ranks; those of unsharded parameters are freed one by one.

        Returns:
            The totals; None for an unsharded parameter, this rank's part for a sharded one.
        """
        place = {id(parameter): at for at, (parameter, _) in enumerate(sums)}
        for at, (parameter, _) in enumerate(sums):
            shard = self._spread.get(id(parameter))
            if shard is None:
                continue
            to, total = place[id(shard)], totals[at]
            if sums[to][1] is not None:
                raise LossError(
                    "a loss must read parameters from the model, where they are gathered during a "
                    "step, and it used a sharded one that it held from before: write "
                    "model.layer.weight inside of the loss"
                )
            totals[at] = None
            if total is not None:
                totals[to] = part_of(total, shard)
        return totals

    def parts(self, sums: Amended) -> Amended:
        """Return this rank's parts in place of the sums of gathered parameters."""
        found: Amended = []
        for parameter, total in sums:
            shard = self._spread.get(id(parameter))
            if shard is not None and total is not None:
                found.append((shard, part_of(total, shard)))
            else:
                found.append((parameter if shard is None else shard, total))
        return found


def _owners(modules: Modules) -> Owners:
    """Return every parameter that is spread, tied ones as often as they are tied."""
    return [
        (path, module, name, parameter)
        for path, module in modules
        for name, parameter in module._parameters.items()
        if is_spread(parameter)
    ]


def refuse_unknown(name: str, shard: Any, group: Group | None) -> None:
    """Refuse a parameter that could not be gathered and cut correctly."""
    kinds = [type(placement).__name__ for placement in shard.placements]
    if kinds not in (["Shard"], ["Replicate"], ["Replicate", "Shard"]):
        raise NotYetError(
            "a parameter must be sharded over one dimension of a mesh, and replicated over "
            f"another at most, and {name} is {shard.placements}: tensor parallel models are not "
            "supported yet"
        )
    ranks = sorted(shard.device_mesh.mesh.flatten().tolist())
    every = [0] if group is None else dist.get_process_group_ranks(group.handle)
    if ranks != sorted(every):
        raise NotYetError(
            f"a model must be sharded over the ranks that share the batch, {sorted(every)}, and "
            f"{name} is over {ranks}: give fully_shard a mesh of all of them"
        )
    if local(shard).device.type != shard.device_mesh.device_type:
        raise NotYetError(
            f"parameters must be where the model runs, and {name} is on the "
            f"{local(shard).device.type}: leave CPUOffloadPolicy out"
        )
    if shard._backward_hooks or getattr(shard, "_post_accumulate_grad_hooks", None):
        raise NotExactError(
            f"a sharded parameter must have no hooks, and {name} has one, which the gathered "
            "parameter of a step would not call: remove it, and do its work after engine.backward"
        )
    before = shard.grad
    if before is not None and getattr(before, "placements", None) != shard.placements:
        raise NotExactError(
            f"a gradient must be sharded as its parameter is, and that of {name} is not: call "
            "optimizer.zero_grad()"
        )


def _is_fsdp(module: nn.Module) -> bool:
    return isinstance(module, sys.modules[FSDP].FSDPModule)


def _plainly(module: nn.Module) -> list[Callable[[], None]]:
    """Remove FSDP from a module: class, hooks, state, methods; return functions to undo it."""
    class_ = type(module)
    plain = next(cls for cls in class_.__mro__ if not issubclass(cls, sys.modules[FSDP].FSDPModule))
    undo: list[Callable[[], None]] = [partial(setattr, module, "__class__", class_)]
    inside = vars(module)
    for name, held in [*inside.items()]:
        if isinstance(held, dict) and any(map(_of_fsdp, held.values())):
            undo.append(partial(_put_back, held, dict(held)))
            for key in [key for key, value in held.items() if _of_fsdp(value)]:
                del held[key]
        elif _patched(held):
            undo.append(partial(inside.__setitem__, name, held))
            del inside[name]
    module.__class__ = plain
    return undo


def _put_back(held: dict[Any, Any], was: dict[Any, Any]) -> None:
    """Restore the entries of FSDP at their positions, and preserve changes of the step."""
    now = dict(held)
    held.clear()
    held.update({k: now.get(k, v) for k, v in was.items() if k in now or _of_fsdp(v)})
    held.update(now)


def _of_fsdp(value: Any) -> bool:
    """Say whether a hook or a state is FSDP's."""
    if isinstance(value, nn.Module | Tensor):
        return False
    return str(getattr(value, "__module__", "")).startswith(FSDP)


def _patched(value: Any) -> bool:
    """Say whether a method was replaced by ``register_fsdp_forward_method``."""
    inner = getattr(getattr(value, "__func__", None), "__globals__", {})
    return str(inner.get("__name__", "")).startswith(FSDP)


def _name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@contextmanager
def coordinated(coordinator: Any) -> Iterator[None]:
    """Run collectives that all ranks are sure to reach."""
    with coordinator.shielded():
        coordinator.call("the parameters")
        with coordinator.raw():
            yield


# Parameters gathered from their parts on all ranks, and parts cut from full gradients.
#
# ``DTensor.full_tensor`` makes one collective a parameter, and waits for a rank that is gone until
# the process group gives up. Here many parameters are gathered at once, by a wait that ends. Parts
# are as `torch.chunk` makes them: the last ranks may have fewer rows, or none.
#
#     rank 0  [w0 b0] ─┐             ┌─> w = [w0 w1]
#     rank 1  [w1 b1] ─┴─> gather ───┴─> b = [b0 b1]

PIECE = 2**20
"""Elements that are gathered together; a parameter with more is gathered by itself."""


Shards = list[tuple[Any, torch.dtype]]
"""DTensors, and the dtype in which each is gathered."""


def gathered(shards: Shards, group: Group | None) -> dict[int, nn.Parameter]:
    """Return the full parameter of each sharded one, by the id of the shard.

    Args:
        shards: in the same order on every rank.
        group: waits for collectives; None where there is one rank.
    """
    found: dict[int, nn.Parameter] = {}
    with torch.inference_mode(mode=False), torch.no_grad():
        pieces: dict[Any, Shards] = {}
        for shard, dtype in shards:
            axis, handle = axis_of(shard)
            if group is None or axis is None or dist.get_world_size(handle) == 1:
                found[id(shard)] = _parameter(local(shard).to(dtype), shard)
                continue
            key = dtype, shard.device, id(handle)
            waiting = pieces.setdefault(key, [])
            if sum(one.numel() for one, _ in waiting) + shard.numel() > PIECE:
                found.update(_gather(waiting, group))
                waiting.clear()
            waiting.append((shard, dtype))
        for waiting in pieces.values():
            assert group is not None
            found.update(_gather(waiting, group))
    return found


def _gather(shards: Shards, group: Group) -> Iterator[tuple[int, nn.Parameter]]:
    """Gather parameters of one dtype in one collective, [N, elements of a rank]."""
    if not shards:
        return
    _, handle = axis_of(shards[0][0])
    size = dist.get_world_size(handle)
    rows = [_rows(shard, dtype, size) for shard, dtype in shards]
    mine = torch.cat([row.reshape(-1) for row in rows]) if len(rows) > 1 else rows[0].reshape(-1)
    mine = mine.contiguous()
    flat = mine.new_empty(size * mine.numel())  # as bytes, because gloo knows few dtypes
    group.wait(group.start_gather(flat.view(torch.uint8), mine.view(torch.uint8), handle))
    every = flat.view(size, -1)
    counts = [row.numel() for row in rows]
    for (shard, _), row, part in zip(shards, rows, torch.split(every, counts, 1), strict=True):
        axis, _ = axis_of(shard)
        length = shard.shape[axis]
        full = part.reshape(size * len(row), *row.shape[1:])[:length].movedim(0, axis)
        exclusive = len(shards) == 1 and full.numel() == every.numel() and full.is_contiguous()
        data = full if exclusive else full.clone(memory_format=torch.contiguous_format)
        yield id(shard), _parameter(data, shard)


def _rows(shard: Any, dtype: torch.dtype, size: int) -> Tensor:
    """Return this rank's rows, the sharded dimension first, filled up to as many as any has."""
    axis, _ = axis_of(shard)
    mine = local(shard).to(dtype).movedim(axis, 0)
    most = -(-shard.shape[axis] // size)
    if len(mine) == most:
        return mine
    filled = mine.new_zeros((most, *mine.shape[1:]))
    filled[: len(mine)] = mine
    return filled


def _parameter(full: Tensor, shard: Tensor) -> nn.Parameter:
    return nn.Parameter(full, requires_grad=shard.requires_grad)


def part_of(total: Tensor, shard: Any) -> Tensor:
    """Return this rank's part of a full gradient, without memory of other parts."""
    total = total.to_dense() if total.is_sparse else total
    tensor = sys.modules["torch.distributed.tensor"]
    found: Tensor = tensor.distribute_tensor(
        total, shard.device_mesh, shard.placements, src_data_rank=None
    )
    part = local(found)
    exclusive = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return found if exclusive else found.clone()


def axis_of(shard: Any) -> tuple[Any, Any]:
    """Return the dimension that is sharded, and the process group over which; None if none is."""
    for dim, placement in enumerate(shard.placements):
        if placement.is_shard():
            return placement.dim, shard.device_mesh.get_group(dim)
    return None, None


# Dtypes of ``fully_shard(mp_policy=...)``, applied while FSDP's own hooks are off.
#
# Parameters are gathered in ``param_dtype``, and inputs and outputs of the sharded modules are cast
# as FSDP casts them. Gradients of half precision are summed over micro-batches and ranks in
# float32, and reach the sharded parameters so, for any ``reduce_dtype``: it would only lose digits.


def policies_of(modules: Modules) -> dict[str, Any]:
    """Return the policy of each sharded module, by its path."""
    try:
        return {path: _state(module)._mp_policy for path, module in modules}
    except AttributeError as error:
        raise NotYetError(
            "the precision policy of a sharded model must be readable, and in this version of "
            f"torch it is not ({error}): use one from 2.11 to 2.13"
        ) from error


def _state(module: Any) -> Any:
    return module._get_fsdp_state()  # there is no public way


def dtype_in(policies: Mapping[str, Any], path: str, parameter: Tensor) -> torch.dtype:
    """Return the dtype that a parameter of the module at `path` is gathered in."""
    above = [one for one in policies if not one or path == one or path.startswith(f"{one}.")]
    wanted = policies[max(above, key=len)].param_dtype if above else None
    return wanted if wanted is not None and parameter.is_floating_point() else parameter.dtype


def casting(module: nn.Module, policy: Any) -> list[Callable[[], None]]:
    """Add hooks that cast a module's inputs and outputs; return functions that remove them."""
    undo: list[Callable[[], None]] = []
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        hook = partial(_inputs, policy.param_dtype)
        undo.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True).remove)
    if policy.output_dtype is not None:
        undo.append(module.register_forward_hook(partial(_outputs, policy.output_dtype)).remove)
    return undo


def _inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    found: Any = pytree.map_tensors(partial(_cast, dtype), (args, kwargs))
    return found


def _outputs(dtype: torch.dtype, _: nn.Module, __: Any, outputs: Any) -> Any:
    return pytree.map_tensors(partial(_cast, dtype), outputs)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
