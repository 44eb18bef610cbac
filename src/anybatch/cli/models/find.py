"""Find a model by name: a built-in one, or any callable of the user's code.

    resnet20  resnet18  resnet34  resnet50  resnet101  cnn[:WIDTH]  unet[:WIDTH]
    amoebanet-d[:LAYERS,FILTERS]            package.module:callable

A callable is called with `num_classes` and `in_channels` where its signature takes them, so that a
constructor that needs neither works unchanged. The module is searched in the working directory too,
which an installed command does not do by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from anybatch.cli.faults import ModelError
from anybatch.cli.models import resnet
from anybatch.cli.models.amoebanet import AmoebaNetD
from anybatch.cli.models.small import cnn
from anybatch.cli.models.unet import UNet

RESNETS = {f"resnet{depth}": depth for depth in resnet.BLOCKS}
PARAMETERS = {"cnn": ("WIDTH",), "unet": ("WIDTH",), "amoebanet-d": ("LAYERS", "FILTERS")}
BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    "cnn": cnn,
    "unet": UNet,
    "amoebanet-d": AmoebaNetD,
    "resnet20": resnet.resnet20,
}
NAMES = ("cnn", "resnet20", *RESNETS, "unet", "amoebanet-d")


def find_model(
    name: str, *, num_classes: int, in_channels: int, image_size: tuple[int, int], norm: str
) -> nn.Module:
    """Return the model called `name`, with fresh weights.

    `image_size` is (height, width) in pixels: up to 64 a ResNet gets its CIFAR stem. `norm` is
    "group" or "batch" and is for the built-in models only.

    Raises:
        ModelError: when the name is unknown, the import fails, or the call gives no module.
    """
    base, _, rest = name.partition(":")
    if base in NAMES:
        common = {"num_classes": num_classes, "in_channels": in_channels, "norm": norm}
        common |= _numbers(name, base, rest)
        if base in RESNETS:
            small = max(image_size) <= resnet.SMALL_IMAGE
            stem = "cifar" if small else "imagenet"
            return resnet.resnet(RESNETS[base], stem=stem, **common)  # type: ignore[arg-type]
        return BUILT_IN[base](**common)
    if not rest:
        raise ModelError(
            f"model must be one of {', '.join(NAMES)}, or package.module:callable; got {name!r}."
        )
    return _build(name, _import(base, rest), num_classes, in_channels)


def _numbers(name: str, base: str, rest: str) -> dict[str, int]:
    """Read the numbers after the colon: "amoebanet-d:6,190" -> {"layers": 6, "filters": 190}."""
    if not rest:
        return {}
    words = PARAMETERS.get(base, ())
    parts = rest.split(",")
    if len(parts) != len(words) or not all(part.strip().isdecimal() for part in parts):
        usage = f"{base}:{','.join(words)}" if words else f"{base}, without parameters"
        raise ModelError(f"model {base} must be given as {usage} in whole numbers; got {name!r}.")
    numbers = {word.lower(): int(part) for word, part in zip(words, parts, strict=True)}
    if min(numbers.values()) < 1:
        raise ModelError(f"model {base} needs numbers of at least 1; got {name!r}.")
    return numbers


@contextlib.contextmanager
def _working_directory_first() -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


def _import(module: str, attribute: str) -> Callable[..., Any]:
    name = f"{module}:{attribute}"
    with _working_directory_first():
        try:
            found: Any = importlib.import_module(module)
        except Exception as error:
            raise ModelError(
                f"model {name!r}: importing {module!r} failed, {type(error).__name__}: {error}. "
                f"It is looked for among installed packages and in {Path.cwd()}."
            ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ModelError(
            f"model {name!r}: {module!r} must have a callable named {attribute!r}; "
            f"got {type(found).__name__}."
        )
    return found  # type: ignore[no-any-return]


def _build(name: str, make: Callable[..., Any], num_classes: int, in_channels: int) -> nn.Module:
    wanted = {"num_classes": num_classes, "in_channels": in_channels}
    try:
        parameters = inspect.signature(make).parameters
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if not any_keyword:
            wanted = {key: value for key, value in wanted.items() if key in parameters}
        with _working_directory_first():
            model = _call(make, wanted, drop=any_keyword)
    except Exception as error:
        raise ModelError(
            f"model {name!r}: calling it with {', '.join(wanted) or 'no argument'} failed with "
            f"{type(error).__name__}: {error}."
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"model {name!r} must return a torch.nn.Module; got {type(model).__name__}."
        )
    return model


def _call(make: Callable[..., Any], wanted: dict[str, int], *, drop: bool) -> object:
    """Call `make`; with `drop`, omit a keyword that a function inside it refuses."""
    try:
        return make(**wanted)
    except TypeError as error:
        refused = [k for k in wanted if f"unexpected keyword argument '{k}'" in str(error)]
        if not drop or not refused:
            raise
    return _call(make, {k: v for k, v in wanted.items() if k not in refused}, drop=drop)
