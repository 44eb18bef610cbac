"""Encoders that do not meet before the loss, as one module (CLIP, sentence embeddings, two towers).

In a module with a custom forward any input may affect any output. Here the encoder of every input
is known, so with a loss of all embeddings an engine can run them one after the other: the graph of
each is freed before the next one makes its own (`anybatch.execution.streaming`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anybatch.core.modules import call_model
from anybatch.errors import BatchError

SCALE = "scale"
"""The name of the learned scale among the outputs."""


class Encoders(nn.Module):
    """Make one module of encoders that are compared by a loss of all embeddings.

    The outputs are a mapping with the names of the encoders, for `contrastive` or any other loss. A
    micro-batch holds the saved tensors (tensors that autograd saves for backward) of one encoder at
    a time, not of all. One module under several names is one encoder of several inputs.

    Args:
        encoders: name -> encoder. A tensor is passed as ``encoder(x)``, a tuple or list as
            ``encoder(*x)``, a mapping as ``encoder(**x)``.
        unnamed: encoders without names, which are refused.
        scale: start of a learned scale, above 0, such as CLIP's 1 / 0.07. The parameter
            ``logit_scale`` is its logarithm, and the outputs hold its value under "scale", by
            which `contrastive` multiplies similarities. Default None: there is no scale.

    Raises:
        TypeError: encoders are passed one by one, without names.
        ValueError: `encoders` is empty, `scale` is not above 0 or a tensor, or an encoder is named
            "scale" too.
        BatchError: in forward, an input has the name of no encoder, or there is no input.

    Example:
        >>> clip = anybatch.Encoders({"image": vision, "text": language}, scale=1 / 0.07)
        >>> engine = anybatch.Engine(clip, anybatch.contrastive(symmetric=True), memory="8GiB")
        >>> engine.backward({"image": images, "text": texts})
        >>> clip(text=queries)["text"]  # one of them alone

    Source: Gao et al. 2021, section 3 (two encoders, one after the other); Radford et al. 2021,
    Figure 3 (the scale).
    """

    def __init__(
        self, encoders: Mapping[str, nn.Module], *unnamed: nn.Module, scale: float | None = None
    ) -> None:
        super().__init__()
        if unnamed or not isinstance(encoders, Mapping | nn.ModuleDict):
            raise TypeError(
                "encoders must be one mapping of names to modules, and they were passed without "
                'names: write anybatch.Encoders({"image": image, "text": text}), and the inputs go '
                'by these names, engine.backward({"image": images, "text": texts})'
            )
        if not encoders:
            raise ValueError("encoders must name at least one module, and it is empty")
        if isinstance(scale, Tensor):
            raise ValueError(
                "scale must be a number, and it is a tensor, of which a copy would be trained: the "
                "loss multiplies by a scale that a model has already, "
                "lambda found: loss_fn(**found, logit_scale=model.logit_scale.exp())"
            )
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(
                f"scale must be above 0, and is {scale}: its logarithm is the parameter"
            )
        if scale is not None and SCALE in encoders:
            raise ValueError(
                f"no encoder may be named {SCALE!r} where there is a learned scale, which has that "
                "name among the outputs: give the encoder another one"
            )
        self.encoders = nn.ModuleDict(encoders)
        start = None if scale is None else nn.Parameter(torch.tensor(math.log(scale)))
        self.logit_scale = start

    def forward(self, **inputs: Any) -> dict[str, Tensor | Any]:
        """Return ``{name: encoder(input)}`` for the names among the inputs, and the scale.

        Args:
            inputs: name -> argument of its encoder.
        """
        encoders, scale = self.encoders, self.logit_scale
        named = [name for name in encoders if name in inputs]
        if not named or len(named) < len(inputs):
            raise self._unknown(inputs)
        found = {} if scale is None else {SCALE: scale.exp()}
        for name in named:
            found[name] = call_model(encoders[name], inputs[name])
        return found

    def _unknown(self, inputs: Mapping[str, Any]) -> BatchError:
        names = list(self.encoders)
        came = ", ".join(map(repr, inputs)) or "nothing"
        return BatchError(
            f"inputs must go by the names of the encoders, {', '.join(map(repr, names))}, and the "
            f"inputs are {came}: engine.backward({{{names[0]!r}: ...}})"
        )


# Several models as one module, for a loss that runs through all of them (a GAN, two encoders).


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
