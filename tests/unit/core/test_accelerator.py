"""Every verb of every type of accelerator, over modules made up after those of torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.core.made_up import MIB, Stream, half, modules, mps, xpu
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from anybatch import Engine
from anybatch.core import accelerator
from anybatch.core.accelerator import of
from anybatch.devices import available_memory
from anybatch.errors import NotYetError

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src/anybatch"
__all__ = ["half", "modules"]


@pytest.mark.parametrize("device_type", ["xpu", "mps"])
def test_torch_has_what_the_made_up_modules_have(device_type: str) -> None:
    made = {"xpu": xpu, "mps": mps}[device_type]()
    assert [name for name in vars(made) if not hasattr(getattr(torch, device_type), name)] == []


VERBS: dict[str, Callable[[Any, torch.device], Any]] = {
    "copies beside kernels": lambda one, device: one.current_stream(device) if one.streams else ...,
    "synchronise": lambda one, device: one.synchronise(device),
    "allocated": lambda one, device: one.allocated(device),
    "peak": lambda one, device: one.peak(device) if one.peaks else ...,
    "free and total": lambda one, device: one.memory(device),
    "random states": lambda one, device: one.random_states(),
    "seed": lambda one, device: one.seed(3),
    "pinned memory": lambda one, device: None if one.facts.pins else ...,
    "float64": lambda one, device: None if one.has_float64(device) else ...,
}
"""What is done; it returns an ellipsis where something else takes its place."""

INSTEAD = {("random states", "mps"), ("seed", "mps"), ("free and total", "mps")}
"""Made of other functions of the module."""


def outcome(verb: str, device_type: str) -> str:
    """What becomes of a verb: works, emulated or refused."""
    try:
        found = VERBS[verb](of(device_type), torch.device(device_type))
    except NotYetError:
        return "refused"
    return "emulated" if found is ... or (verb, device_type) in INSTEAD else "works"


def rows() -> Iterator[tuple[str, dict[str, str]]]:
    """The table of the page, its cells by type."""
    page = (ROOT / "docs/platforms.md").read_text()
    section = page[page.index("| verb | CUDA") :].split("\n\n")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    for verb, *cells in (list(map(str.strip, line)) for line in lines[2:]):
        yield verb, dict(zip(("cuda", "xpu", "mps", "hpu"), cells, strict=True))


def test_the_page_says_what_becomes_of_each_verb(modules: dict[str, SimpleNamespace]) -> None:
    del modules
    table = dict(rows())
    assert list(table) == [*VERBS, "autocast", "a file"]
    for verb in VERBS:
        for device_type in ("xpu", "mps", "hpu"):
            words = re.split(r"\W", table[verb][device_type])[0]
            assert words == outcome(verb, device_type), (verb, device_type)
        assert table[verb]["cuda"].startswith("works")


def test_memory_is_that_of_the_device(modules: dict[str, SimpleNamespace]) -> None:
    free, words = available_memory(torch.device("xpu"))
    assert free == int(0.95 * (96 + 7 - 3) * MIB)
    assert words == "free on xpu, less 5 %"
    assert available_memory(torch.device("mps"))[0] == int(0.95 * (100 - 3) * MIB)
    modules["xpu"].__dict__.update(vars(xpu(tells=False)))
    for device_type in ("xpu", "hpu"):
        with pytest.raises(
            NotYetError, match=rf"memory= must be given .* on {device_type}: give memory"
        ):
            available_memory(torch.device(device_type))


def test_a_tensor_on_metal_takes_a_page(modules: dict[str, SimpleNamespace]) -> None:
    del modules
    grains = {type_: of(type_).facts.rounding for type_ in ("cuda", "xpu", "mps", "hpu")}
    assert grains == {"cuda": 512, "xpu": 512, "mps": 16 << 10, "hpu": 512}


def test_what_a_module_has_not_is_refused_by_name(modules: dict[str, SimpleNamespace]) -> None:
    del modules
    with pytest.raises(
        NotYetError,
        match="a device of type hpu must have memory_allocated, and torch.hpu has not: train on",
    ):
        of("hpu").allocated(torch.device("hpu"))
    with pytest.raises(NotYetError, match="a device of type ipu must have a module in torch"):
        of("ipu").synchronise(torch.device("cpu"))


PUBLIC: dict[str, Callable[[Any, torch.device], Any]] = {
    "available": lambda one, _: one.available,
    "in_use": lambda one, _: one.in_use,
    "count": lambda one, _: one.count,
    "choose": lambda one, device: one.choose(device),
    "describe": lambda one, device: one.describe(device),
    "streams": lambda one, _: one.streams,
    "stream": lambda one, device: one.stream(device),
    "current_stream": lambda one, device: one.current_stream(device),
    "on": lambda one, _: one.on(Stream()),
    "event": lambda one, _: one.event(),
    "synchronise": lambda one, device: one.synchronise(device),
    "capturing": lambda one, _: one.capturing,
    "allocator": lambda one, _: one.allocator,
    "allocated": lambda one, device: one.allocated(device),
    "reserved": lambda one, device: one.reserved(device),
    "peaks": lambda one, _: one.peaks,
    "peak": lambda one, device: one.peak(device),
    "reset_peak": lambda one, device: one.reset_peak(device),
    "memory": lambda one, device: one.memory(device),
    "left": lambda one, device: one.left(device),
    "limit": lambda one, device: one.limit(MIB, device),
    "random_state": lambda one, device: one.random_state(device),
    "put_random_state": lambda one, device: one.put_random_state(torch.zeros(1), device),
    "random_states": lambda one, _: one.random_states(),
    "generators": lambda one, _: one.generators(),
    "seed": lambda one, _: one.seed(3),
    "has_float64": lambda one, device: one.has_float64(device),
    "clear_workspaces": lambda one, _: one.clear_workspaces(),
    "cudnn": lambda one, _: one.cudnn,
}
"""Every verb of an accelerator that asks its module."""


def test_every_verb_is_in_the_table() -> None:
    verbs = {name for name in vars(accelerator.Accelerator) if not name.startswith("_")}
    others = {"module", "call", "has", "host", "facts", "type", "backend", "indexed"}
    assert verbs - others == set(PUBLIC)


def test_each_verb_works_or_is_refused_by_name(half: tuple[str, str]) -> None:
    device_type, _ = half
    for verb, do in PUBLIC.items():
        try:
            do(of(device_type), torch.device(device_type))
        except NotYetError as error:
            said = str(error)
            missing, unlimited = (
                rf"{device_type} must have \w+.*train on",
                f"on {device_type}: give memory=",
            )
            named = rf"a device of type {missing}|{unlimited}"
            assert re.search(named, said), verb


def test_a_step_on_the_host_does_not_care(half: tuple[str, str]) -> None:
    del half
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    x, y = torch.randn(12, 6), torch.randint(3, (12,))
    engine = Engine(model, F.cross_entropy, micro_batch=4)
    engine.backward(x, y)
    assert engine.last is not None
    assert engine.last.micro_batch == 4


def test_a_limit_is_a_share_of_what_the_device_has(modules: dict[str, SimpleNamespace]) -> None:
    shares: dict[str, tuple[Any, ...]] = {}
    for device_type, total in (("xpu", 128), ("mps", 100)):
        modules[device_type].set_per_process_memory_fraction = (
            lambda *arguments, device_type=device_type: shares.update({device_type: arguments})
        )
        of(device_type).limit(total * MIB // 4, torch.device(device_type))
    assert shares == {"xpu": (0.25, torch.device("xpu")), "mps": (0.25,)}
    with pytest.raises(NotYetError, match="memory= must be given"):
        of("hpu").limit(MIB, torch.device("hpu"))


def test_memory_that_runs_out_is_not_a_missing_verb(modules: dict[str, SimpleNamespace]) -> None:
    def full(_device: Any) -> None:
        raise RuntimeError("XPU out of memory. Tried to allocate 2 GiB")

    modules["xpu"].synchronize = full
    with pytest.raises(RuntimeError, match="XPU out of memory") as caught:
        of("xpu").synchronise(torch.device("xpu"))
    assert type(caught.value) is RuntimeError


def test_what_torch_has_for_all_types_is_queried(
    modules: dict[str, SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    del modules
    device = torch.device("hpu")
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 11, raising=False)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (5, 9), raising=False)
    assert of(device).allocated(device) == 11
    assert of(device).memory(device) == (5, 9)


def test_an_xpu_says_whether_it_has_float64(modules: dict[str, SimpleNamespace]) -> None:
    device = torch.device("xpu")
    assert accelerator.home(device) == device
    modules["xpu"].__dict__.update(vars(xpu(has_fp64=False)))
    assert accelerator.home(device) == torch.device("cpu")


def test_each_type_has_a_backend() -> None:
    backends = {
        device_type: of(device_type).backend for device_type in ("cpu", "cuda", "xpu", "mps")
    }
    assert backends == {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "mps": "gloo"}


TYPES = {"cuda", "mps", "xpu", "hpu"}
ATTRIBUTES = {"is_cuda", "is_mps", "is_xpu", "is_cpu"}
OWN = "core/accelerator.py"
SPARED = {"core/absent.py", "cli/allocator.py"}
"""A part of plans, without torch, that reads the word of an option; and what runs before torch."""


def named(tree: ast.AST) -> list[str]:
    """Each place where a file decides by the type of a device."""
    found = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and node.value in TYPES:
            found.append(f"{line}: {node.value!r}")
        if isinstance(node, ast.Compare) and any(
            isinstance(one, ast.Constant) and one.value == "cpu"
            for one in (node.left, *node.comparators)
        ):
            found.append(f"{line}: a comparison with 'cpu'")
        if isinstance(node, ast.Attribute):
            of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if node.attr in ATTRIBUTES or (of_torch and node.attr in TYPES):
                found.append(f"{line}: .{node.attr}")
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(one.name for one in node.names)]
            if any(re.match(r"torch\.(cuda|mps|xpu|hpu)\b", name) for name in names):
                found.append(f"{line}: an import")
    return found


def test_no_other_file_names_a_type_of_device() -> None:
    places = {
        str(path.relative_to(SOURCE)): named(ast.parse(path.read_text()))
        for path in sorted(SOURCE.rglob("*.py"))
    }
    assert places.pop(OWN)
    assert all(places.pop(name) for name in SPARED)
    assert {name: found for name, found in places.items() if found} == {}


@pytest.mark.parametrize(
    "line",
    [
        'device.type == "cuda"',
        "x.is_cuda",
        "torch.cuda.synchronize()",
        'kind in ("cpu", "mps")',
        "import torch.xpu",
        'device.type != "cpu"',
    ],
)
def test_a_named_type_is_found(line: str) -> None:
    assert named(ast.parse(line))


def test_where_there_is_no_float64_the_host_has_it(modules: dict[str, SimpleNamespace]) -> None:
    del modules
    with FakeTensorMode():
        assert accelerator.wide(torch.empty(2, device="mps")).device.type == "cpu"
