"""Every verb of every type of accelerator, over modules made up after those of torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.oracle import error_of, tolerance
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch import Engine
from anybatch.core import accelerator, accelerators, moments
from anybatch.core.accelerator import of
from anybatch.core.moments import merged, moments_of
from anybatch.devices import RNGState, available_memory, segments_of
from anybatch.errors import NotYetError, StoreError
from anybatch.execution.prefetch import HostLink, StreamLink, link_to
from anybatch.lockstep.lockstep import Surroundings
from anybatch.lockstep.scheduler import LaneTurns
from anybatch.memory.limits import SHARE_THERE
from anybatch.memory.page_table import Copier
from anybatch.memory.spill import maker, takes
from anybatch.memory.stores import FileStore, HostStore, StagedStore, store_on

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src/anybatch"
MIB = 1 << 20


class Generators:
    """The generators of a made-up module, a number each."""

    def __init__(self, count: int) -> None:
        self.now = [torch.tensor([i], dtype=torch.uint8) for i in range(count)]

    def get_rng_state(self, device: Any) -> Tensor:
        return self.now[torch.device(device).index or 0].clone()

    def set_rng_state(self, state: Tensor, device: Any) -> None:
        self.now[torch.device(device).index or 0] = state.clone()

    def get_rng_state_all(self) -> list[Tensor]:
        return [state.clone() for state in self.now]

    def manual_seed(self, seed: int) -> None:
        self.now = [torch.tensor([seed % 251], dtype=torch.uint8) for _ in self.now]


class Stream(SimpleNamespace):
    """A stream that does everything at once."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def xpu(*, has_fp64: bool = True, tells: bool = True) -> SimpleNamespace:
    """``torch.xpu``, as far as it is asked."""
    draws = Generators(2)

    def mem_get_info(_device: torch.device) -> tuple[int, int]:
        if not tells:
            raise RuntimeError(
                "The device (Arc) doesn't support querying the available free memory"
            )
        return 96 * MIB, 128 * MIB

    return SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        Stream=lambda device: Stream(device=device),
        Event=SimpleNamespace,
        stream=lambda stream: stream,
        current_stream=lambda device=None: Stream(device=device),
        synchronize=lambda device: None,
        memory_allocated=lambda device: 3 * MIB,
        memory_reserved=lambda device: 7 * MIB,
        max_memory_allocated=lambda device: 5 * MIB,
        reset_peak_memory_stats=lambda device: None,
        mem_get_info=mem_get_info,
        get_device_properties=lambda device: SimpleNamespace(
            has_fp64=has_fp64, total_memory=128 * MIB
        ),
        get_device_name=lambda device=None: "Arc",
        get_rng_state=draws.get_rng_state,
        set_rng_state=draws.set_rng_state,
        get_rng_state_all=draws.get_rng_state_all,
        manual_seed_all=draws.manual_seed,
    )


def mps() -> SimpleNamespace:
    """``torch.mps``: one device, no stream, no peak, and functions that take no device."""
    draws = Generators(1)
    return SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        Event=SimpleNamespace,
        synchronize=lambda: None,
        current_allocated_memory=lambda: 3 * MIB,
        driver_allocated_memory=lambda: 7 * MIB,
        recommended_max_memory=lambda: 100 * MIB,
        get_rng_state=draws.get_rng_state,
        set_rng_state=draws.set_rng_state,
        manual_seed=draws.manual_seed,
    )


def hpu() -> SimpleNamespace:
    """A type that nobody has heard of, whose module says little."""
    return SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 2
    )


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimpleNamespace]:
    found = {"xpu": xpu(), "mps": mps(), "hpu": hpu()}
    real = torch.get_device_module
    made = cache(accelerator._of.__wrapped__)  # what was tried of torch's own is not known of these
    monkeypatch.setattr(accelerator, "_of", made)

    def module(device_type: Any) -> Any:
        return found[str(device_type)] if str(device_type) in found else real(device_type)

    monkeypatch.setattr(torch, "get_device_module", module)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *_: torch.device("hpu"), raising=True
    )
    for name in accelerator.GENERIC.values():
        monkeypatch.delattr(torch.accelerator, name)
    return found


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
    assert free == int(SHARE_THERE * (96 + 7 - 3) * MIB)
    assert words == "free on xpu, less 5 %"
    assert available_memory(torch.device("mps"))[0] == int(SHARE_THERE * (100 - 3) * MIB)
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

MADE = {"xpu": xpu, "mps": mps, "hpu": xpu}
"""Modules with all that is asked of their type; the type that nobody knows has what XPU has."""


def fails(*_args: object, **_named: object) -> Any:
    raise RuntimeError("PyTorch is not linked with support for such devices")


def broken() -> Iterator[tuple[str, str, bool]]:
    """Each function of each module, once missing and once failing, and the module itself."""
    for device_type, make in MADE.items():
        yield device_type, "", False
        for name in vars(make()):
            yield from ((device_type, name, missing) for missing in (True, False))


@pytest.fixture(params=list(broken()), ids=lambda one: "-".join(map(str, one)))
def half(
    request: pytest.FixtureRequest,
    modules: dict[str, SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, str]:
    """A type of device whose module lacks a function, or has one that fails; or that has none."""
    device_type, name, missing = request.param
    modules.update((each, make()) for each, make in MADE.items())
    if not name:
        modules.pop(device_type)
        monkeypatch.setattr(torch, "get_device_module", partial(_module, modules))
    elif missing:
        delattr(modules[device_type], name)
    else:
        setattr(modules[device_type], name, fails)
    return device_type, name


def _module(modules: dict[str, SimpleNamespace], device_type: Any) -> Any:
    if str(device_type) not in modules:
        raise RuntimeError(
            f"Device '{device_type}' does not have a corresponding module registered"
        )
    return modules[str(device_type)]


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
    accelerators.seed(3)
    assert accelerators.with_plans()[0] == "cpu"


def test_a_step_is_refused_on_a_device_whose_generators_cannot_be_saved(
    modules: dict[str, SimpleNamespace],
) -> None:
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        modules["mps"] = mps()
        delattr(modules["mps"], name)
        verbs = "manual_seed_all" if name == "manual_seed" else name
        with pytest.raises(NotYetError, match=f"a device of type mps must have {verbs}, and"):
            accelerators.require_generators(torch.device("mps"))
    for name in ("cpu", "xpu"):
        accelerators.require_generators(torch.device(name))


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


def test_generators_of_all_devices_in_use_are_held(modules: dict[str, SimpleNamespace]) -> None:
    modules["hpu"].is_initialized = lambda: False
    before = RNGState.now()
    assert [name for name, _ in before.devices] == ["xpu:0", "xpu:1", "mps:0"]
    accelerators.seed(7)
    assert not before.same_as(RNGState.now())
    before.put_back()
    assert before.same_as(RNGState.now())


def test_lanes_have_generators_of_their_own_there(modules: dict[str, SimpleNamespace]) -> None:
    modules["hpu"].is_initialized = lambda: False
    state = torch.get_rng_state()
    turns = LaneTurns(2)
    turns.begin(0)
    modules["xpu"].set_rng_state(torch.tensor([99], dtype=torch.uint8), "xpu:1")
    turns.pass_token(0, [])
    turns.begin(1)
    other = modules["xpu"].get_rng_state("xpu:1")
    assert int(other) != 99
    assert torch.equal(modules["mps"].get_rng_state("mps"), other)  # seeded alike
    turns.pass_token(1, [])
    turns.finish()
    assert int(modules["xpu"].get_rng_state("xpu:1")) == 99
    torch.set_rng_state(state)


def test_autocast_of_every_type_is_carried(modules: dict[str, SimpleNamespace]) -> None:
    modules["hpu"].is_initialized = lambda: False
    assert accelerators.autocast_types() == ("cpu", "cuda", "xpu", "mps", "hpu")
    torch.set_autocast_enabled("xpu", True)
    try:
        now = {device_type: enabled for device_type, enabled, _ in Surroundings.now().autocast}
    finally:
        torch.set_autocast_enabled("xpu", False)
    assert now == {"cpu": False, "cuda": False, "xpu": True, "mps": False, "hpu": False}
    assert [one.type for one, _ in Surroundings.now().streams] == ["xpu"]


def test_copies_overlap_kernels_where_there_are_streams(
    modules: dict[str, SimpleNamespace],
) -> None:
    del modules
    links = {
        device_type: type(link_to(torch.device(device_type)))
        for device_type in ("cpu", "xpu", "mps", "hpu")
    }
    assert links == {"cpu": HostLink, "xpu": StreamLink, "mps": HostLink, "hpu": HostLink}
    copier, done = Copier(torch.device("mps")), []
    copier.wait(copier.start(lambda: done.append(1)))
    copier.close()
    assert done == [1]
    segments = segments_of(torch.device("xpu"))
    assert (segments.ask(), segments.in_words()) == ("", "")


@pytest.mark.parametrize("device_type", ["xpu", "mps", "hpu"])
def test_a_file_is_never_made_of_memory_that_is_not_the_hosts(
    modules: dict[str, SimpleNamespace], device_type: str, tmp_path: Path
) -> None:
    del modules
    device = torch.device(device_type)
    assert type(store_on(device)) is HostStore
    assert type(store_on(device, "file")) is StagedStore
    assert type(maker(tmp_path, device)()) is StagedStore
    assert takes(device) == ("host", "file")
    store, there = FileStore(), SimpleNamespace(device=device, nbytes=lambda: 8)
    for begin in (store.writing, store.reading):
        with pytest.raises(
            StoreError, match=f"memory of the host, and the storage is on {device_type}"
        ):
            begin(0, there)
    store.close()


class NoFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note kernels that make float64 on MPS."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.found += [
            str(func)
            for one in made
            if isinstance(one, Tensor) and one.device.type == "mps" and one.dtype == torch.float64
        ]
        return result


def test_sums_are_float64_where_the_device_has_none() -> None:
    device = torch.device("mps")
    with FakeTensorMode(), NoFloat64() as observed:
        parts = [moments_of(torch.empty(n, 3, 4, device=device)) for n in (5, 2)]
        total = merged(*parts)
        assert total.mean.dtype == total.squares.dtype == torch.float64
        assert total.mean.device.type == "cpu"
        assert parts[0].packed().device.type == "cpu"
        assert accelerator.wide(torch.empty(2, device=device)).device.type == "cpu"
        assert observed.found == []
        torch.empty(2, device=device).double()
        assert observed.found == ["aten._to_copy.default"]  # it would be noted


def test_moments_of_parts_in_float32_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of an accelerator, on the host: parts by its kernel, merged in float64."""
    monkeypatch.setattr(moments, "of", lambda _: SimpleNamespace(host=False))
    torch.manual_seed(0)
    x = torch.randn(23, 3, 8)
    total = moments_of(x[:0])
    for part in (x[:7], x[7:8], x[8:]):
        total = merged(total, moments_of(part))
    variance, mean = torch.var_mean(x.double(), [0, 2], correction=0)
    own_variance, own_mean = torch.var_mean(x, [0, 2], correction=0)
    want = {"mean": mean, "variance": variance}
    noise = error_of({"mean": own_mean, "variance": own_variance}, want)
    assert total.count == 23 * 8
    got = error_of({"mean": total.mean, "variance": total.variance}, want)
    assert max(got.values()) <= tolerance(noise)


def test_an_xpu_says_whether_it_has_float64(modules: dict[str, SimpleNamespace]) -> None:
    device = torch.device("xpu")
    assert accelerator.home(device) == device
    modules["xpu"].__dict__.update(vars(xpu(has_fp64=False)))
    assert accelerator.home(device) == torch.device("cpu")


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl", "cuda"),
        ("cpu:xccl,xpu:xccl", "xpu"),
    ],
)
def test_collectives_carry_tensors_of_their_device(config: str, device: str) -> None:
    assert accelerators.carrier(config) == torch.device(device)


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
