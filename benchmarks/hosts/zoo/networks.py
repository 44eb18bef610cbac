"""Networks of timm, made small: random weights, few pixels, float64; and what a network is here.

A name is that of the network in its package, and then what is asked of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.mbs.honest.subjects import ROWS, Problem
from benchmarks.mbs.zoos.networks import CLASSES

Options = dict[str, Any]
Make = Callable[[], Problem]


@dataclass(frozen=True)
class Network:
    """One network.

    Attributes:
        family: a row of the summary, behind the name of the package.
        make: the problem.
        draws: it has drop rates above 0, or samples.
    """

    family: str
    make: Make
    draws: bool = False


NETWORKS: dict[str, Network] = {}

BATCHNORM = """
    test_resnet test_byobnet test_efficientnet mobilenetv3_small_050 regnetx_002 ghostnet_050
    ese_vovnet19b_slim_dw fasternet_t0 starnet_s050 hgnetv2_b0 resnest14d skresnet18 resnetv2_18
    inception_next_atto
""".split()
OTHER_NORMS = """
    test_convnext test_convnext3 test_efficientnet_evos test_efficientnet_gn test_efficientnet_ln
    test_nfnet test_mambaout edgenext_xx_small poolformer_s12
""".split()
TRANSFORMERS = """
    test_vit test_vit2 test_vit4 cait_xxs24_224 convit_tiny gmixer_12_224 pit_ti_224
    pvt_v2_b0 swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 sequencer2d_s
""".split()
HYBRIDS = """
    efficientvit_b0 levit_128 mobilevit_xxs shvit_s1 swiftformer_xs visformer_tiny
    vit_tiny_r_s16_p8_224 volo_d1_224 xcit_nano_12_p8_224
""".split()
FAMILIES = {
    "BatchNorm": BATCHNORM,
    "other norms": OTHER_NORMS,
    "transformers": TRANSFORMERS,
    "hybrids": HYBRIDS,
}
CHANGED = [
    ("test_resnet", "split BatchNorm"),
    ("test_resnet", "SyncBatchNorm"),
    ("test_resnet", "frozen BatchNorm"),
    ("test_resnet", "checkpointing"),
    ("test_vit", "checkpointing"),
]
SMALL: Options = {"embed_dim": 48, "depth": 2, "num_heads": 3}
ASKED: list[tuple[str, str, Options]] = [
    ("beit_base_patch16_224", "transformers", SMALL | {"side": 32}),
    ("eva02_tiny_patch14_224", "transformers", SMALL | {"side": 28}),
    ("naflexvit_base_patch16_gap", "transformers", SMALL | {"side": 32}),
    ("deit_tiny_distilled_patch16_224", "transformers", SMALL | {"side": 32}),
    ("vit_relpos_small_patch16_224", "transformers", SMALL | {"side": 32}),
    ("gcvit_xxtiny", "transformers", {"side": 64}),
    ("coatnet_pico_rw_224", "hybrids", {"side": 64}),
]
DRAWING: list[tuple[str, str, Options]] = [
    ("test_resnet", "drop path", {"drop_path_rate": 0.2, "drop_rate": 0.2}),
    ("resnet10t", "drop block", {"side": 96, "drop_block_rate": 0.2}),
    ("test_efficientnet", "drop path", {"drop_path_rate": 0.2, "drop_rate": 0.2}),
    ("test_convnext", "drop path", {"drop_path_rate": 0.2, "drop_rate": 0.2}),
    ("test_nfnet", "drop path", {"drop_path_rate": 0.2}),
    ("test_vit", "drop path", {"drop_path_rate": 0.2, "drop_rate": 0.1, "attn_drop_rate": 0.1}),
    ("test_vit2", "patch dropout", {"patch_drop_rate": 0.25}),
    ("swin_tiny_patch4_window7_224", "drop path", {"side": 32, "drop_path_rate": 0.2}),
    ("xcit_nano_12_p8_224", "drop path", {"side": 32, "drop_path_rate": 0.2}),
]


def without_draws(model: nn.Module) -> nn.Module:
    """A model whose drop rates are 0."""
    for module in model.modules():
        for rate in ("p", "drop_prob", "drop_rate", "drop_block_rate", "prob"):
            named = "drop" in type(module).__name__.lower() or rate.startswith("drop")
            if named and isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return model


def changed(model: nn.Module, what: str) -> nn.Module:
    """A network after a change that timm offers; as it is where there is no such change."""
    from timm import layers  # type: ignore[import-not-found]

    if what == "split BatchNorm":
        model = layers.convert_splitbn_model(model, 2)
    if what == "SyncBatchNorm":
        model = layers.convert_sync_batchnorm(model)
    if what == "frozen BatchNorm":
        model = layers.freeze_batch_norm_2d(model)
    if what == "checkpointing":
        model.set_grad_checkpointing(enable=True)  # type: ignore[operator]
    return model


def image_classes(model: nn.Module, *shape: int) -> Problem:
    """Images of a shape [n, ...] with a class each."""
    labels = torch.randint(CLASSES, shape[:1])
    return Problem(model, torch.randn(shape), labels, F.cross_entropy)


def of_timm(name: str, what: str, options: Options) -> Problem:
    """A network of timm for images of 32 pixels where it takes them, else of 64 or 96."""
    import timm

    asked = {key: value for key, value in options.items() if key != "side"}
    for side in (options["side"],) if "side" in options else (32, 64, 96):
        try:
            try:
                model = timm.create_model(name, num_classes=CLASSES, img_size=side, **asked)
            except TypeError:
                model = timm.create_model(name, num_classes=CLASSES, **asked)
            with torch.no_grad():
                model.double().eval()(torch.zeros(2, 3, side, side))
        except (AssertionError, RuntimeError, ValueError) as error:
            last = error
            continue
        rows = ROWS + 1 if what == "split BatchNorm" else ROWS  # it takes an even number
        return image_classes(changed(model, what).train(), rows, 3, side, side)
    raise ValueError(f"no side fits: {last}")


def register() -> None:
    """Register the networks of timm, where it is installed."""
    if find_spec("timm") is None:
        return
    for family, names in FAMILIES.items():
        for name in names:
            _add(name, "", family, {})
    for name, family, options in ASKED:
        _add(name, "", family, options)
    for name, what, options in DRAWING:
        _add(name, what, "random draws", options, draws=True)
    for name, what in CHANGED:
        _add(name, what, "changed", {})


def _add(name: str, what: str, family: str, options: Options, *, draws: bool = False) -> None:
    make = partial(of_timm, name, what, options)
    full = f"timm: {name}{what and ', '}{what}"
    assert full not in NETWORKS, full
    NETWORKS[full] = Network(f"timm, {family}", make, draws)
