from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from anybatch.cli.faults import ModelError
from anybatch.cli.models.amoebanet import AmoebaNetD
from anybatch.cli.models.find import find_model
from anybatch.cli.models.norm import groups_for, make_norm
from anybatch.cli.models.resnet import resnet, resnet20
from anybatch.cli.models.small import cnn
from anybatch.cli.models.unet import UNet


def parameters(make: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


@pytest.mark.parametrize(
    ("depth", "published"),
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160)],
)
def test_a_resnet_has_as_many_parameters_as_published(depth: int, published: int) -> None:
    assert parameters(lambda: resnet(depth, norm="batch")) == published
    assert parameters(lambda: resnet(depth, norm="group")) == published


def test_resnet20_has_the_paper_s_0_27_million() -> None:
    assert parameters(lambda: resnet20(norm="batch")) == 269_722


def test_the_unet_has_as_many_parameters_as_published() -> None:
    assert parameters(lambda: UNet(in_channels=3, num_classes=1, norm="batch")) == 31_037_633


@pytest.mark.parametrize(  # GPipe and torchgpipe, Table 1: millions, to the digits given there
    ("layers", "filters", "millions", "digits"),
    [(18, 208, 81.5, 1), (18, 416, 319.0, 1), (18, 544, 542.7, 1), (36, 544, 1060, -1)],
)
def test_amoebanet_has_as_many_parameters_as_published(
    layers: int, filters: int, millions: float, digits: int
) -> None:
    count = parameters(lambda: AmoebaNetD(layers=layers, filters=filters, norm="batch"))
    assert round(count / 1e6, digits) == millions


@pytest.mark.product
@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("cnn", (8, 8)),
        ("cnn:5", (9, 7)),
        ("resnet20", (13, 9)),
        ("resnet18", (32, 32)),
        ("resnet50", (65, 70)),
        ("amoebanet-d:3,24", (37, 50)),
    ],
)
def test_a_classifier_takes_any_image_and_every_parameter_gets_a_gradient(
    name: str, size: tuple[int, int], norm: str
) -> None:
    model = find_model(name, num_classes=5, in_channels=2, image_size=size, norm=norm)
    logits = model(torch.randn(2, 2, *size))
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert not without


def test_unet_keeps_the_size_of_the_image() -> None:
    model = find_model("unet:4", num_classes=1, in_channels=1, image_size=(32, 48), norm="group")
    logits = model(torch.randn(3, 1, 32, 48))
    assert logits.shape == (3, 1, 32, 48)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_unet_says_which_size_would_do() -> None:
    with pytest.raises(ModelError, match=r"multiples of 16; got 40x33.*such as 32x32"):
        UNet(width=2)(torch.randn(1, 3, 40, 33))


def test_with_groupnorm_a_sample_does_not_depend_on_its_neighbours() -> None:
    for model, size in (
        (cnn(width=8), 8),
        (resnet20(in_channels=1), 8),
        (AmoebaNetD(num_classes=3, in_channels=1, layers=3, filters=16), 32),
        (UNet(in_channels=1, width=4), 16),
    ):
        batch = torch.randn(3, 1, size, size, dtype=torch.float64)
        model.double()
        each = torch.cat([model(batch[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(model(batch), each, rtol=1e-9, atol=1e-9)


def test_groups_divide_the_channels_and_are_of_four_or_more() -> None:
    for channels in range(1, 300):
        groups = groups_for(channels)
        assert channels % groups == 0
        assert groups <= 32
        assert groups == 1 or channels // groups >= 4
    assert groups_for(64) == 16
    assert groups_for(47) == 1


def test_faults_of_a_built_in_model_are_named() -> None:
    def find(name: str) -> nn.Module:
        return find_model(name, num_classes=2, in_channels=1, image_size=(8, 8), norm="group")

    with pytest.raises(ModelError, match=r"model must be one of cnn, .*got 'vgg'"):
        find("vgg")
    with pytest.raises(ModelError, match=r"amoebanet-d:LAYERS,FILTERS in whole numbers; got"):
        find("amoebanet-d:6")
    with pytest.raises(ModelError, match=r"resnet18, without parameters in whole numbers"):
        find("resnet18:3")
    with pytest.raises(ModelError, match=r"needs numbers of at least 1; got 'unet:0'"):
        find("unet:0")
    with pytest.raises(ModelError, match=r"a multiple of 3 .*got 4 layers, 90 filters"):
        find("amoebanet-d:4,90")
    with pytest.raises(ModelError, match=r"depth must be one of .*got 19"):
        resnet(19)
    with pytest.raises(ModelError, match=r"stem must be 'imagenet' or 'cifar'; got 'small'"):
        resnet(18, stem="small")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"norm must be one of group, batch; got 'layer'"):
        make_norm("layer", 8)


OWN = """
from torch import nn
def both(num_classes, in_channels): return nn.Conv2d(in_channels, num_classes, 1)
def classes(num_classes): return nn.Linear(3, num_classes)
def none(): return nn.Linear(1, 1)
def inner(*, weights=None, num_classes=4): return nn.Linear(2, num_classes)
def outer(**options): return inner(**options)
def number(): return 3
def broken(num_classes): raise ValueError("no such size")
constant = 7
class Family:
    class Net(nn.Linear):
        def __init__(self, num_classes): super().__init__(6, num_classes)
"""


def test_a_model_of_one_s_own_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)

    def find(name: str) -> nn.Module:
        return find_model(
            f"own_models:{name}", num_classes=5, in_channels=2, image_size=(8, 8), norm="group"
        )

    shapes = {
        "both": (5, 2, 1, 1),
        "classes": (5, 3),
        "none": (1, 1),
        "outer": (5, 2),
        "Family.Net": (5, 6),
    }
    for name, shape in shapes.items():
        assert find(name).weight.shape == shape
    with pytest.raises(ModelError, match=r"must return a torch.nn.Module; got int"):
        find("number")
    with pytest.raises(ModelError, match=r"num_classes failed with ValueError: no such size"):
        find("broken")
    with pytest.raises(ModelError, match=r"must have a callable named 'constant'; got int"):
        find("constant")
    with pytest.raises(ModelError, match=r"importing 'no_such_module' failed, ModuleNotFound"):
        find_model(
            "no_such_module:net", num_classes=1, in_channels=1, image_size=(8, 8), norm="group"
        )
