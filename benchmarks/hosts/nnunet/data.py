"""A tiny data set in nnU-Net's raw format, with nnU-Net's own fingerprint, plan and preprocessing.

The plan is then edited as people edit plans: few features, small patches, another batch size.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

CASES = 5
LABELS = {"background": 0, "organ": 1, "tumour": 2, "ignore": 3}
SETTINGS = {"nnUNet_n_proc_DA": "0", "nnUNet_def_n_proc": "1", "nnUNet_compile": "f"}
FOLDERS = "nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"
SIDE = {"2d": 48, "3d_fullres": 24}
PATCH = {"2d": 32, "3d_fullres": 16}


@contextmanager
def places(folder: Path) -> Iterator[None]:
    """Set nnU-Net's folders to those below `folder`, and no processes for augmentation."""
    before = dict(os.environ)
    os.environ.update(SETTINGS, **{name: str(folder / name) for name in FOLDERS})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Wide:
    """torch, in which float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def float64() -> Iterator[None]:
    """Let nnU-Net's losses compute in float64: they name float32, and BCE gets float32 targets."""
    from nnunetv2.training.loss import dice

    plain = nn.BCEWithLogitsLoss.forward

    def forward(self: Any, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return plain(self, outputs, target.to(outputs.dtype))

    with (
        patch.object(dice, "torch", Wide()),
        patch.object(nn.BCEWithLogitsLoss, "forward", forward),
    ):
        yield


def blobs(generator: np.random.Generator, side: int, dim: int) -> tuple[Any, Any]:
    """Return an image and a map of labels: two balls, and a corner that nobody has annotated."""
    grid = np.stack(np.meshgrid(*[np.arange(side)] * dim, indexing="ij"))
    labels = np.zeros([side] * dim, dtype=np.uint8)
    for label, radius in ((1, 0.3), (2, 0.15)):
        centre = generator.uniform(0.3, 0.7, dim) * side
        distance = ((grid - centre.reshape(-1, *[1] * dim)) ** 2).sum(0)
        labels[distance < (radius * side) ** 2] = label
    image = labels * 60.0 + generator.normal(60, 20, labels.shape)
    corner = tuple(slice(0, int(side * generator.uniform(0.1, 0.4))) for _ in range(dim))
    labels[corner] = LABELS["ignore"]
    return np.clip(image, 0, 255), labels


def save(path: Path, array: Any, dim: int) -> None:
    if dim == 2:
        from skimage import io

        io.imsave(path, array.astype(np.uint8), check_contrast=False)
    else:
        import SimpleITK

        SimpleITK.WriteImage(SimpleITK.GetImageFromArray(array.astype(np.float32)), str(path))


def prepare(folder: Path, configuration: str) -> None:
    """Write the raw data, and let nnU-Net preprocess it; call it within `places`."""
    from batchgenerators.utilities.file_and_folder_operations import save_json
    from nnunetv2.experiment_planning import plan_and_preprocess_api as api

    dim = 2 if configuration == "2d" else 3
    raw = folder / "nnUNet_raw" / "Dataset001_Balls"
    for part in ("imagesTr", "labelsTr"):
        (raw / part).mkdir(parents=True)
    for name in FOLDERS[1:]:
        (folder / name).mkdir()
    ending = ".png" if dim == 2 else ".nii.gz"
    generator = np.random.default_rng(0)
    for case in range(CASES):
        image, labels = blobs(generator, SIDE[configuration], dim)
        save(raw / "imagesTr" / f"ball_{case:03}_0000{ending}", image, dim)
        save(raw / "labelsTr" / f"ball_{case:03}{ending}", labels, dim)
    described = {"channel_names": {"0": "MR"}, "labels": LABELS, "numTraining": CASES}
    save_json({**described, "file_ending": ending}, raw / "dataset.json")
    api.extract_fingerprint_dataset(1, num_processes=1, verbose=False, show_progress_bar=False)
    os.environ.update({"nnUNet_n_proc_DA": "1"})  # the planner takes it for torch's threads
    api.plan_experiment_dataset(1, gpu_memory_target_in_gb=8)
    os.environ.update(SETTINGS)
    api.preprocess_dataset(
        1, configurations=(configuration,), num_processes=(1,), show_progress_bar=False
    )


def described(folder: Path, labels: str) -> dict[str, Any]:
    """Return the description of the data set: all `classes`, `ignore`, or `regions`."""
    from batchgenerators.utilities.file_and_folder_operations import load_json

    found = load_json(folder / "nnUNet_preprocessed" / "Dataset001_Balls" / "dataset.json")
    classes = {"background": 0, "organ": 1, "tumour": 2}
    regions = {"background": 0, "all": [1, 2], "tumour": [2]}
    kinds: dict[str, dict[str, Any]] = {
        "classes": {**classes, "corner": 3},
        "ignore": {**classes, "ignore": 3},
        "regions": {"background": 0, "all": [1, 2, 3], "tumour": [2]},
        "regions, ignore": {**regions, "ignore": 3},
    }
    found["labels"] = kinds[labels]
    if labels.startswith("regions"):
        found["regions_class_order"] = [1, 2]
    return dict(found)


def plans_of(
    folder: Path, configuration: str, *, batch_size: int, batch_dice: bool
) -> dict[str, Any]:
    """Return nnU-Net's plan with a small network and patch, and the batch that is wanted."""
    from batchgenerators.utilities.file_and_folder_operations import load_json

    found = load_json(folder / "nnUNet_preprocessed" / "Dataset001_Balls" / "nnUNetPlans.json")
    dim = 2 if configuration == "2d" else 3
    plan = found["configurations"][configuration]
    plan |= {"batch_size": batch_size, "batch_dice": batch_dice}
    plan["patch_size"] = [PATCH[configuration]] * dim
    made = plan["architecture"]["arch_kwargs"]
    made |= {"n_stages": 4, "features_per_stage": [4, 8, 8, 8]}
    made |= {"kernel_sizes": [[3] * dim] * 4, "strides": [[1] * dim, *[[2] * dim] * 3]}
    made |= {"n_conv_per_stage": [1] * 4, "n_conv_per_stage_decoder": [1] * 3}
    return dict(found)


def trainer_of(
    trainer: type, folder: Path, configuration: str, labels: str = "classes", **plan: Any
) -> Any:
    """Return an initialized trainer on the CPU; equal calls have equal weights."""
    plans = deepcopy(plans_of(folder, configuration, **plan))
    plans["continue_training"] = False
    made = trainer(plans, configuration, 0, described(folder, labels), torch.device("cpu"))
    torch.manual_seed(0)
    made.initialize()
    return made


def batches_of(trainer: Any, count: int) -> list[dict[str, Any]]:
    """Return batches of the trainer's own loader."""
    np.random.seed(0)  # batchgenerators draws from the global generator
    torch.manual_seed(0)
    loader = trainer.get_dataloaders()[0]
    return [next(loader) for _ in range(count)]
