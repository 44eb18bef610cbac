"""Dtypes of ``fully_shard(mp_policy=...)``, applied while FSDP's own hooks are off.

Parameters are gathered in ``param_dtype``, and inputs and outputs of the sharded modules are cast
as FSDP casts them. Gradients of half precision are summed over micro-batches and ranks in float32,
and reach the sharded parameters so, for any ``reduce_dtype``: it would only lose digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core import tree
from anybatch.core.modules import Modules
from anybatch.errors import NotYetError


def policies_of(modules: Modules) -> dict[str, Any]:
    """Return the policy of each sharded module, by its path.

    Args:
        modules: those that ``fully_shard`` was called on.

    Raises:
        NotYetError: this torch has no such attribute.
    """
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
    found: Any = tree.map_tensors(partial(_cast, dtype), (args, kwargs))
    return found


def _outputs(dtype: torch.dtype, _: nn.Module, __: Any, outputs: Any) -> Any:
    return tree.map_tensors(partial(_cast, dtype), outputs)


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
