"""Networks of timm and torchvision as honest networks: one of each of timm's families, made small.

Of a family it is the smallest network that timm lists; what has more weights than `LARGEST` is
named. Weights are random, and drop rates are 0: what is drawn would be other for other splits.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.mbs.honest.subjects import ROWS, SUBJECTS, Problem, Subject

PACKAGES = ("timm", "torchvision")
SIDES = (64, 96, 128, 224, 240, 299)
"""Sides of an image in pixels: the first that a network takes."""

LARGEST = 40_000_000
"""Weights in float64, their gradients and three copies take 2 GB at this many."""

CLASSES = 5
VIDEOS = frozenset(("r3d_18", "mc3_18"))
"""Networks of clips of 8 images."""

TIMM = """
    eca_botnext26ts_256 test_byobnet cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32
    test_convnext cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny
    deit_tiny_patch16_224 densenet121 dla34 dpn48b edgenext_xx_small efficientformer_l1
    efficientformerv2_s0 test_efficientnet efficientvim_m1 efficientvit_b0 efficientvit_m0
    vit_tiny_patch16_dinov3_qkvb fasternet_t0 fastvit_t8 focalnet_tiny_srf gcvit_xxtiny
    ghostnet_050 hardcorenas_b hgnetv2_b0 hiera_tiny_224 sam2_hiera_tiny hrnet_w18_small
    iformer_t inception_next_atto inception_v3 lcnetv2_small levit_128 lowformer_b0 test_mambaout
    test_coatnet poolformer_s12 gmixer_12_224 mobilenetv3_small_050 mobilevit_xxs mvitv2_tiny
    nest_tiny nextvit_small test_nfnet pit_ti_224 pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050
    repvit_m1 res2net50_14w_8s resnest14d test_resnet resnetv2_18 rexnet_100 selecsls42
    legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs
    swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 swinv2_cr_tiny_224 tiny_vit_5m_224
    tnt_s_legacy_patch16_224 tresnet_m twins_svt_small visformer_tiny test_vit
    vit_tiny_r_s16_p8_224 test_vit_relpos vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw
    legacy_xception xception41p xcit_nano_12_p8_224 beit_base_patch16_224 deepseek_vit_412m
    gemma4_vit_167m inception_resnet_v2 inception_v4 mobilenetv5_base naflexvit_base_patch16_gap
    nasnetalarge pnasnet5large qwen3_vit_88m vgg11 samvit_base_patch16_224
""".split()
TORCHVISION = """
    resnet18 wide_resnet50_2 resnext50_32x4d densenet121 googlenet inception_v3 mnasnet0_5
    mobilenet_v2 mobilenet_v3_small shufflenet_v2_x0_5 squeezenet1_1 efficientnet_b0
    efficientnet_v2_s regnet_y_400mf convnext_tiny swin_t swin_v2_t maxvit_t
    lraspp_mobilenet_v3_large deeplabv3_mobilenet_v3_large fcn_resnet50 r3d_18 mc3_18
    vit_b_16 alexnet vgg11_bn
""".split()


class SingleOutput(nn.Module):
    """A network whose answer is one tensor: the first of a tuple, that named "out" of a mapping.

    Its drop rates are set to 0.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        for module in inner.modules():
            class_name = type(module).__name__
            draws = "Drop" in class_name or "StochasticDepth" in class_name
            for rate in ("p", "drop_prob") if draws else ("drop_rate",):
                if hasattr(module, rate):
                    setattr(module, rate, 0.0)

    def forward(self, images: Tensor) -> Tensor:
        """[n, 3, side, side] -> [n, classes] or [n, classes, side, side]."""
        found: Any = self.inner(images)
        if isinstance(found, dict):
            found = found["out"]
        answer: Tensor = found if isinstance(found, Tensor) else found[0]
        return answer


def of_timm(name: str, side: int) -> nn.Module:
    """A network for images of a side, where it takes one."""
    import timm  # type: ignore[import-not-found]

    try:
        made: nn.Module = timm.create_model(name, num_classes=CLASSES, img_size=side)
    except TypeError:
        made = timm.create_model(name, num_classes=CLASSES)
    return made


def of_torchvision(name: str, side: int) -> nn.Module:
    """A network for images of a side, where it takes one; nothing is downloaded."""
    from torchvision import models  # type: ignore[import-not-found]

    options: dict[str, Any] = {"weights": None, "num_classes": CLASSES}
    if name.startswith(("fcn", "deeplab", "lraspp")):
        options["weights_backbone"] = None
    if name.startswith("maxvit"):
        options["input_size"] = (side, side)
    if name.startswith("vit"):
        options["image_size"] = side
    made: nn.Module = models.get_model(name, **options)
    return made


def problem(build: Callable[[str, int], nn.Module], name: str) -> Problem:
    """A network, images of the smallest side that it takes, and a class of each (pixel)."""
    try:
        with torch.device("meta"):
            weights = sum(p.numel() for p in build(name, 224).parameters())
    except NotImplementedError:  # it reads numbers while it is made
        weights = 0
    if weights > LARGEST:
        raise ValueError(f"{weights // 10**6} million weights, more than {LARGEST // 10**6}")
    model, images, shape = sized(build, name)
    labels = torch.randint(CLASSES, (ROWS, *shape[2:]))
    return Problem(model, images, labels, F.cross_entropy)


def sized(
    build: Callable[[str, int], nn.Module], name: str
) -> tuple[nn.Module, Tensor, torch.Size]:
    """A network, its images and the shape of its answer.

    Raises:
        ValueError: it takes images of no side that was tried.
    """
    for side in SIDES:
        clip = (8,) if name in VIDEOS else ()
        images = torch.randn(ROWS, 3, *clip, side, side)
        try:
            model = SingleOutput(build(name, side))
            with torch.no_grad():
                shape = model.eval()(images[:1]).shape
            return model.train(), images, shape
        except (AssertionError, RuntimeError, ValueError) as error:
            last = error
    raise ValueError(f"no side of {SIDES} fits: {last}")


def register() -> None:
    """Register every network of the packages that are installed."""
    for package, build, names in (
        ("timm", of_timm, TIMM), ("torchvision", of_torchvision, TORCHVISION)
    ):  # fmt: skip
        for name in names if find_spec(package) else ():
            full = f"{package}: {name}"
            SUBJECTS[full] = Subject(full, package, partial(problem, build, name))
