"""Several models as one module, for a loss that runs through all of them (a GAN, two encoders)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class joint(nn.Module):  # noqa: N801 it is called like a function
    """Make one module of several models and a function that calls them.

    Args:
        fn: ``fn(*models, *inputs)`` -> outputs; keyword inputs are passed by name.
        models: the models, in the order in which `fn` takes them.

    Example:
        >>> pair = anybatch.joint(lambda G, D, z, x: (D(G(z).detach()), D(x)), G, D)
        >>> engine = anybatch.Engine(pair, loss_fn, micro_batch=16)
        >>> engine.backward((z, x))
    """

    def __init__(self, fn: Callable[..., Any], *models: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        self.models = nn.ModuleList(models)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return ``fn(*models, *inputs)``."""
        return self.fn(*self.models, *inputs, **named)
