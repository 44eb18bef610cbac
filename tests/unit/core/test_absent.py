"""A plan for a device that is not there: its text, its bytes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.oracle import same, snapshot
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import anybatch
from anybatch import Engine, Plan
from anybatch.core.absent import (
    CONTEXT,
    HANDLES,
    NOT_MEASURED,
    SHARE,
    WORKSPACE,
    AbsentDevice,
    absent,
    enough,
    parse_device,
    planned_for,
    type_of,
)
from anybatch.errors import BudgetError

GIB = 1 << 30


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 3))


def rows(n: int = 60) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 12), torch.randint(0, 3, (n,))


def plan(net: nn.Module | None = None, batch: Any = None, **requested: Any) -> Plan:
    requested = {"device": "cuda:2GiB", **requested}
    return anybatch.plan(net or model(), F.cross_entropy, batch or rows(), **requested)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("cuda:24GiB", 24 * GIB),
        ("cuda:1.5GB", 1_500_000_000),
        ("cuda:512 MiB", 512 << 20),
        ("cuda:0", None),
        ("cuda:3", None),
        ("cuda", None),
        ("cpu", None),
        ("xpu:1", None),
    ],
)
def test_a_size_describes_a_device_and_an_index_names_one(text: str, nbytes: int | None) -> None:
    found = parse_device(text)
    assert (None if found is None else found.nbytes) == nbytes


SIZE = 'the size of a device must be bytes such as in "cuda:24GiB", and it is '


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (
            {"device": "cuda:"},
            SIZE
            + "'' in 'cuda:': write it like that; a device of this machine has an index, as in "
            "cuda:0",
        ),
        *(
            (
                {"device": one},
                "device must be a CUDA device with the size of its memory, such as "
                f'"cuda:24GiB", and it is {one!r}: leave it out',
            )
            for one in (torch.device("cuda"), 0, b"cuda:1GiB", "", "tpu", "meta", "cuda:24")
        ),
        ({"device": "cuda:2Gx"}, SIZE + "'2Gx' in 'cuda:2Gx'"),
        ({"device": "cuda:0B"}, SIZE + "'0B' in 'cuda:0B'"),
        (
            {"device": "mps:16GiB"},
            "a device that is not there must be a CUDA device with the size of its memory, such as "
            "\"cuda:24GiB\", and it is 'mps:16GiB': write it like that; for a device of "
            "another type name only the type, and give memory=",
        ),
        (
            {"device": "cuda:0"},
            'device must be a CUDA device with the size of its memory, such as "cuda:24GiB", and '
            "it is 'cuda:0': leave it out to plan for the device that the model is on",
        ),
        (
            {"memory": "2GiB"},
            "memory must be at most what the device leaves, and of 2GiB a context is assumed to "
            "take 600 MiB: got '2GiB'. Give memory=\"1448MiB\" or less, or leave it out",
        ),
        ({"memory": "much"}, "memory must be a number of bytes of at least 1"),
        (
            {"workspace": "1MiB"},
            "the workspace of convolutions is measured on the device, and a device of 2GiB is not "
            "there: leave workspace out",
        ),
        (
            {"net": nn.Linear(12, 3, device="meta")},
            "a model must be on the host to be planned for a device that is not there, and a "
            'parameter is on meta: give model.to("cpu"), or leave device out',
        ),
    ],
)
def test_what_means_nothing_is_refused(requested: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        plan(**requested)
    assert message in str(caught.value)
    assert absent() is None


def test_a_loop_is_not_measured_there() -> None:
    net = model()
    with pytest.raises(ValueError, match="a loop is measured on its device, and a device of 2GiB"):
        plan(
            net,
            loader=DataLoader(TensorDataset(*rows()), 20),
            optimizer=torch.optim.SGD(net.parameters()),
        )


def test_a_plan_says_what_was_assumed_and_what_was_not_measured() -> None:
    found = plan(timed=True)
    lines = str(found).splitlines()
    assert lines[1] == "  device       planned for a CUDA device of 2GiB that is not there"
    assert lines[2] == "    assumed        600 MiB for its context, outside the budget"
    assert lines[3] == "    assumed        64.0 MiB of workspace for cuBLAS, inside it"
    assert [line.removeprefix("    not measured   ") for line in lines[4:7]] == [*NOT_MEASURED]
    assert found.memory is not None
    assert found.memory.budget == int(SHARE * (2 * GIB - CONTEXT))
    assert found.memory.source == "2GiB less 600 MiB for a context, less 5 %"
    assert dict(found.memory.owners)["cuBLAS"] == HANDLES * WORKSPACE
    assert all(one.seconds is None for one in found.memory.candidates)
    assert "not there" in found._repr_html_()


def test_a_plan_goes_through_json_and_is_obeyed_where_it_can_be() -> None:
    found = plan(memory="66MiB")
    reported = json.loads(found.to_json())["device"]
    assert reported["nbytes"] == 2 * GIB
    assert reported["not_measured"] == list(NOT_MEASURED)
    again = Plan.from_json(found.to_json())
    assert again == found
    without = {k: v for k, v in json.loads(found.to_json()).items() if k != "device"}
    assert Plan.from_json(json.dumps(without)).device is None
    x, y = rows()
    trained = Engine(model(), F.cross_entropy, plan=again)
    trained.backward(x, y)
    assert trained.last is not None
    assert trained.last.micro_batch == found.micro_batch


@pytest.mark.parametrize(
    ("requested", "store"), [({"offload": "host"}, "host"), ({"offload": "file"}, "file")]
)
def test_what_leaves_goes_where_it_goes_from_a_gpu(requested: dict[str, Any], store: str) -> None:
    with pytest.raises(ValueError, match='offload must be "file" on cpu'):
        plan(device=None, memory="1MiB", offload="host")
    found = plan(nn.Sequential(nn.Linear(12, 4096), nn.Tanh(), nn.Linear(4096, 3)), **requested)
    assert found.offload is not None
    assert found.offload.store == store
    assert found.offload.stall is None


def test_state_waits_on_the_host() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    found = plan(net, optimizer=optimizer, states="host")
    assert found.states is not None
    assert found.states.store == "host"


def test_a_device_that_is_too_small_is_named_with_one_that_is_not() -> None:
    with pytest.raises(BudgetError) as caught:
        plan(device="cuda:640MiB")
    error = caught.value
    assert error.budget == int(SHARE * (640 * 1024**2 - CONTEXT))
    assert "640MiB less 600 MiB for a context, less 5 %" in str(error)
    named = str(error).split('give device="')[1].split('"')[0]
    assert plan(device=named).device is not None
    smaller = f"cuda:{int(named.removeprefix('cuda:').removesuffix('MiB')) - 2}MiB"
    with pytest.raises(BudgetError):
        plan(device=smaller)
    with pytest.raises(BudgetError, match=r'give memory="\d+KiB" or more'):
        plan(memory="1MiB")


def test_enough_is_named_as_it_is_passed() -> None:
    assert enough(2049) == 'memory="3KiB"'
    with planned_for(AbsentDevice("1GiB", GIB)):
        assert enough(2049) == 'memory="3KiB"'
        assert enough(GIB).startswith('device="cuda:')


def broken(out: Tensor, y: Tensor) -> Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize("loss", [F.cross_entropy, broken])
def test_nothing_is_left_behind(loss: Callable[..., Tensor]) -> None:
    net, (x, y) = model(), rows()
    before, enabled = snapshot(net), torch._C._get_mkldnn_enabled()
    try:
        anybatch.plan(net, loss, (x, y), device="cuda:1GiB")
    except ZeroDivisionError:
        assert loss is broken
    assert same(before, snapshot(net))
    assert torch._C._get_mkldnn_enabled() == enabled
    assert (absent(), type_of(torch.device("cpu"))) == (None, "cpu")


class Reads(nn.Module):
    """Reads a value, which tensors without data have not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x * (2.0 if float(x.abs().max()) > 1e9 else 1.0))
        return found


@pytest.mark.parametrize("net", [Reads(), nn.LSTM(12, 8)], ids=["value", "recurrent"])
def test_models_that_take_another_way_on_the_host_are_planned(net: nn.Module) -> None:
    if isinstance(net, nn.LSTM):
        found = anybatch.plan(
            net, lambda out, y: (out[0] ** 2).mean(), (torch.randn(4, 9, 12), torch.zeros(4)),
            device="cuda:1GiB", batchnorm="local",
        )  # fmt: skip
    else:
        found = plan(net)
    assert found.device is not None
