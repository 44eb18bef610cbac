"""Networks of MONAI, made small: classifiers, U-Nets and their kin, of images and of volumes."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.hosts.zoo.networks import NETWORKS, Network, Options, image_classes
from benchmarks.mbs.honest.subjects import ROWS, Problem
from benchmarks.mbs.zoos.networks import CLASSES

STEPS: Options = {"channels": (4, 8, 16), "strides": (2, 2)}
BLOCKS = (4, 4, 8, 8, 8, 4)
"""Features of the levels of a basic U-Net."""

LEVELS: Options = {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2)}
SWIN: Options = {"feature_size": 12, "depths": (1, 1, 1, 1), "window_size": 2}
TOKENS: Options = {"hidden_size": 16, "mlp_dim": 32, "num_heads": 2}
DIFFUSION: Options = {"channels": (8, 8), "num_res_blocks": 1, "norm_num_groups": 4}
"""Levels of the networks of a diffusion model, and of its autoencoders."""

SEGMENTERS: list[tuple[str, str, int, int, Options]] = [
    ("UNet", "", 2, 16, STEPS | {"num_res_units": 2}),
    ("UNet", "BatchNorm", 2, 16, STEPS | {"num_res_units": 1, "norm": "batch"}),
    ("UNet", "BatchNorm", 3, 8, STEPS | {"norm": "batch"}),
    ("UNet", "", 3, 8, STEPS),
    ("BasicUNet", "", 2, 32, {"features": BLOCKS}),
    ("BasicUNet", "BatchNorm", 3, 16, {"features": BLOCKS, "norm": "batch"}),
    ("BasicUNetPlusPlus", "BatchNorm", 2, 32, {"features": BLOCKS, "norm": "batch"}),
    ("AttentionUnet", "", 2, 16, STEPS),
    ("DynUNet", "", 2, 16, LEVELS | {"filters": (4, 8, 8)}),
    ("DynUNet", "BatchNorm", 3, 8, LEVELS | {"filters": (4, 8, 8), "norm_name": "batch"}),
    ("DynUNet", "supervised deeply", 3, 16, {
        "kernel_size": (3, 3, 3, 3), "strides": (1, 2, 2, 2), "upsample_kernel_size": (2, 2, 2),
        "filters": (4, 4, 8, 8), "deep_supervision": True, "deep_supr_num": 2}),
    ("SegResNet", "", 2, 16, {"init_filters": 8}),
    ("SegResNet", "BatchNorm", 3, 16, {"init_filters": 8, "norm": "batch"}),
    ("SegResNetDS", "", 3, 16, {"init_filters": 4, "blocks_down": (1, 1, 1), "dsdepth": 2}),
    ("HighResNet", "", 3, 8, {}),
    ("RegUNet", "", 2, 16, {"num_channel_initial": 4, "depth": 2}),
    ("AHNet", "", 2, 64, {"psp_block_num": 0, "layers": (1, 1, 1, 1)}),
    ("AttentionUnet", "", 3, 8, STEPS),
    ("UNETR", "", 2, 32, TOKENS | {"img_size": 32, "feature_size": 4}),
    ("UNETR", "", 3, 32, TOKENS | {"img_size": 32, "feature_size": 4}),
    ("SwinUNETR", "", 2, 64, SWIN),
    ("SwinUNETR", "BatchNorm", 3, 32, SWIN | {"norm_name": "batch"}),
    ("SwinUNETR", "BatchNorm", 2, 64, SWIN | {"norm_name": "batch"}),
    ("MedNeXt", "", 2, 32, {"init_filters": 4, "encoder_expansion_ratio": 2,
                           "decoder_expansion_ratio": 2}),
    ("AutoEncoder", "BatchNorm", 2, 16, {"channels": (4, 8), "strides": (2, 2), "norm": "batch"}),
    ("ViTAutoEnc", "", 2, 16, TOKENS | {"img_size": 16, "patch_size": 4, "num_layers": 2}),
    ("VNet", "drop rates 0", 2, 16, {"dropout_prob_down": None, "dropout_prob_up": (0.0, 0.0)}),
    ("VNet", "drop rates 0", 3, 16, {"dropout_prob_down": None, "dropout_prob_up": (0.0, 0.0)}),
    ("FlexibleUNet", "BatchNorm", 2, 32, {"backbone": "resnet18"}),
]  # fmt: skip
CLASSIFIERS: list[tuple[str, str, int, int, Options]] = [
    ("DenseNet121", "", 2, 32, {"init_features": 8, "growth_rate": 4}),
    ("DenseNet", "", 3, 16, {"init_features": 8, "growth_rate": 4, "block_config": (2, 2)}),
    ("SEResNet50", "", 2, 32, {"layers": (1, 1, 1, 1), "dropout_prob": None}),
    ("ResNet", "", 3, 16, {"block": "basic", "layers": (1, 1, 1, 1),
                           "block_inplanes": (4, 8, 8, 16)}),
    ("ViT", "", 3, 8, TOKENS | {"img_size": 8, "patch_size": 4, "num_layers": 2,
                               "classification": True, "post_activation": None}),
]  # fmt: skip
DRAWING: list[tuple[str, str, int, int, Options]] = [
    ("UNet", "dropout", 2, 16, STEPS | {"dropout": 0.2}),
    ("UNet", "BatchNorm and dropout", 3, 8, STEPS | {"norm": "batch", "dropout": 0.2}),
    ("VNet", "dropout of channels", 2, 16, {}),
    ("SegResNet", "dropout", 3, 16, {"init_filters": 8, "dropout_prob": 0.2}),
    ("DynUNet", "dropout", 2, 16, LEVELS | {"filters": (4, 8, 8), "dropout": 0.2}),
    ("SwinUNETR", "drop path", 2, 64, SWIN | {"dropout_path_rate": 0.2}),
    ("UNETR", "dropout", 2, 32, TOKENS | {"img_size": 32, "feature_size": 4, "dropout_rate": 0.1}),
]  # fmt: skip
EFFICIENT: Options = {"model_name": "efficientnet-b0", "pretrained": False}
DRAWING_CLASSES: list[tuple[str, str, int, int, Options]] = [
    ("EfficientNetBN", "drop connect", 2, 32, EFFICIENT),
    ("DenseNet", "dropout", 2, 16, {"block_config": (2, 2), "dropout_prob": 0.2}),
]


class First(nn.Module):
    """A network that answers with its first output: that of the finest scale."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Any:
        """[n, 1, *sides] -> [n, ...]."""
        found = self.inner(images)
        return found[0] if isinstance(found, tuple | list) else found


def supervised(found: Any, masks: Tensor) -> Tensor:
    """Dice and cross-entropy of MONAI for each scale of a network, the coarser ones for less."""
    from monai.losses import DiceCELoss  # type: ignore[import-not-found]

    loss_fn = DiceCELoss(softmax=True, to_onehot_y=True)
    scales = found.unbind(1) if isinstance(found, Tensor) and found.dim() > masks.dim() else [found]
    scales = list(found) if isinstance(found, list | tuple) else list(scales)
    losses = []
    for index, one in enumerate(scales):
        fitting = F.interpolate(masks, one.shape[2:])
        losses.append(0.5**index * loss_fn(one, fitting))
    return torch.stack(losses).sum()


def segmenter(name: str, dims: int, side: int, options: Options) -> Problem:
    """A network of masks with two classes, and MONAI's loss of Dice and cross-entropy."""
    from monai.networks import nets  # type: ignore[import-not-found]

    channels = {"in_channels": 1, "out_channels": 2}
    model = getattr(nets, name)(spatial_dims=dims, **channels, **options)
    images = torch.randn(ROWS, 1, *[side] * dims)
    masks = (images + torch.randn(images.shape) > 0).to(images.dtype)
    single = name in ("ViTAutoEnc", "BasicUNetPlusPlus")
    return Problem(First(model) if single else model, images, masks, supervised)


def classifier(name: str, dims: int, side: int, options: Options) -> Problem:
    """A network of one class an image."""
    from monai.networks import nets

    if name == "ResNet":
        options = options | {"n_input_channels": 1, "num_classes": CLASSES}
    elif name in ("SEResNet50", "EfficientNetBN", "ViT"):
        options = options | {"in_channels": 1, "num_classes": CLASSES}
    else:
        options = options | {"in_channels": 1, "out_channels": CLASSES}
    model = getattr(nets, name)(spatial_dims=dims, **options)
    return image_classes(First(model), ROWS, 1, *[side] * dims)


def register() -> None:
    """Register the networks of MONAI, where it is installed."""
    if find_spec("monai") is None:
        return
    for table, make, family in (
        (SEGMENTERS, segmenter, "segmentation"),
        (CLASSIFIERS, classifier, "classification"),
        (DRAWING, segmenter, "random draws"),
        (DRAWING_CLASSES, classifier, "random draws"),
    ):
        for name, what, dims, side, options in table:
            problem: Callable[[], Problem] = partial(make, name, dims, side, options)
            full = f"monai: {name} {dims}D{what and ', '}{what}"
            assert full not in NETWORKS, full
            NETWORKS[full] = Network(f"MONAI, {family}", problem, family == "random draws")
    for name, problem in MORE.items():
        draws = "draws" in name
        family = "random draws" if draws else "losses inside, other inputs"
        NETWORKS[f"monai: {name}"] = Network(f"MONAI, {family}", problem, draws)


def diffusion() -> Problem:
    """Noise at a step of a diffusion, which the network finds."""
    from monai.networks import nets

    model = nets.DiffusionModelUNet(
        spatial_dims=2, in_channels=1, out_channels=1, attention_levels=(False, True),
        num_head_channels=4, **DIFFUSION,
    )  # fmt: skip
    inputs = torch.randn(ROWS, 1, 16, 16), torch.arange(ROWS)
    return Problem(model, inputs, torch.randn(ROWS, 1, 16, 16), F.mse_loss)


def autoencoder() -> Problem:
    """An autoencoder that samples, with the loss of a variational one."""
    from monai.networks import nets

    def loss_fn(found: Any, images: Tensor) -> Tensor:
        image, mean, deviation = found
        square = mean.square() + deviation.square()
        kl = 0.5 * (square - deviation.square().log() - 1).flatten(1).sum(1).mean()
        total: Tensor = F.l1_loss(image, images) + 1e-3 * kl
        return total

    model = nets.AutoencoderKL(
        spatial_dims=2, in_channels=1, out_channels=1, attention_levels=(False, False),
        latent_channels=2, **DIFFUSION,
    )  # fmt: skip
    images = torch.randn(ROWS, 1, 16, 16)
    return Problem(model, images, images.clone(), loss_fn)


def variational() -> Problem:
    """A segmentation network whose second output is a loss of its own, of the samples there."""
    from monai.networks import nets

    def loss_fn(found: Any, masks: Tensor) -> Tensor:
        logits, loss = found
        total: Tensor = supervised(logits, masks) + 0.1 * loss
        return total

    model = nets.SegResNetVAE(
        (16, 16), spatial_dims=2, init_filters=8, vae_nz=4, blocks_down=(1, 1), blocks_up=(1,)
    )
    images = torch.randn(ROWS, 1, 16, 16)
    return Problem(model, images, (images > 0).to(images.dtype), loss_fn)


def bags() -> Problem:
    """Bags of eight images with a class each."""
    from monai.networks import nets

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )  # fmt: skip

        def forward(self, images: Tensor) -> Tensor:
            found: Tensor = self.body(images)
            return found

    model = nets.MILModel(CLASSES, "att_trans", backbone=Features(), backbone_num_features=8)
    return image_classes(model, ROWS, 4, 3, 16, 16)


def patches() -> Problem:
    """A discriminator of patches, whose last output is compared with 1."""
    from monai.networks import nets

    def loss_fn(found: Any, ones: Tensor) -> Tensor:
        return F.mse_loss(found[-1], ones[:, None, None, None].expand_as(found[-1]))

    model = nets.PatchDiscriminator(2, 4, 1, num_layers_d=2)
    return Problem(model, torch.randn(ROWS, 1, 32, 32), torch.ones(ROWS), loss_fn)


MORE: dict[str, Callable[[], Problem]] = {
    "DiffusionModelUNet 2D": diffusion,
    "AutoencoderKL 2D, draws": autoencoder,
    "SegResNetVAE 2D, draws": variational,
    "MILModel": bags,
    "PatchDiscriminator 2D": patches,
}
