"""Convolutions by other algorithms, beside torch's own: whole models, every mode, and no trace."""

from __future__ import annotations

import copy
import io
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.busy import busy
from tests.kernels import measured_as
from tests.unit.conv.problems import KINDS, distance, problem
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch
from anybatch.conv import convolutions
from anybatch.conv.convolutions import Chooser, Problem, Telling

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything be measured as fastest by FFT, two samples at a time."""

    def made(one: Problem, size: int, name: str) -> tuple[float, int, float]:
        return (0.1 if name == "fft" and size <= 2 else 1.0) * size**0.9, 100 * size, 0.0

    measured_as(monkeypatch, made, held=True)


def alive() -> int:
    """Threads with work, without one that a progress bar of torch.compile begins."""
    return busy() - sum(thread.name == "tqdm_monitor" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _torchs_own_is_back() -> Iterator[None]:
    x, w = torch.randn(2, 3, 5), torch.randn(4, 3, 3)
    before, threads = F.conv1d(x, w), alive()
    yield
    assert alive() == threads
    assert torch.equal(F.conv1d(x, w), before)


def own(one: Problem, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, filters and a bias that want gradients."""
    torch.manual_seed(0)
    inputs = torch.randn(5, one.channels, *one.image), torch.randn(one.weight)
    rows, filters = (t.to(dtype).requires_grad_() for t in inputs)
    return rows, filters, torch.randn(one.filters, dtype=dtype, requires_grad=True)


def computed(one: Problem, x: Tensor, w: Tensor, b: Tensor | None) -> list[Tensor]:
    """The output and all gradients."""
    place = one.stride, one.padding, one.dilation, one.groups
    y = CONV[len(one.image)](x, w, b, *place)
    leaves = [t for t in (x, w, b) if t is not None]
    aim = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y * aim).sum(), leaves)]


@pytest.mark.product
@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_layer_and_its_gradients_are_torchs(dims: int, variant: str) -> None:
    one = problem("forward", dims, variant)
    x, w, b = own(one)
    true = computed(one, x, w, b)
    with anybatch.convolutions() as found:
        ours = computed(one, x, w, b)
        single = computed(one, x, w, None)
    assert [str(c) for c in found.configurations] == ["fft@2 x 2, fft@1"] * 3
    for mine, its in zip(ours, true, strict=True):
        assert distance(mine, its) <= 1e-12
        assert mine.stride() == its.stride()
    assert distance(single[1], true[1]) <= 1e-12
    assert "times as fast" in str(found)


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize(
    "form", ["channels_last", "sliced", "turned", "one sample", "last filters"]
)
def test_the_format_of_a_result_is_torchs(form: str) -> None:
    one = problem("forward", 2, "padded")
    x, w, b = own(one)
    x, w = x.detach(), w.detach()
    if form == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif form == "sliced":
        x = torch.randn(5, 4, 13, 22, dtype=x.dtype)[..., ::2]
    elif form == "turned":
        x = torch.randn(5, 4, 11, 13, dtype=x.dtype).transpose(2, 3)
    elif form == "last filters":
        w = w.contiguous(memory_format=torch.channels_last)
    else:
        x = x[:1]
    x, w = x.requires_grad_(), w.requires_grad_()
    true = computed(one, x, w, b)
    with anybatch.convolutions():
        ours = computed(one, x, w, b)
    for mine, its in zip(ours, true, strict=True):
        assert distance(mine, its) <= 1e-12
        assert mine.stride() == its.stride()


@pytest.mark.large(few=1)
@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("variant", ["plain", "all", "depthwise"])
@pytest.mark.parametrize("dims", [1, 2])
def test_derivatives_of_first_and_second_order(dims: int, variant: str) -> None:
    one = problem("forward", dims, variant)
    small = [5, 4] if variant != "all" else [7, 6]
    torch.manual_seed(0)
    x = torch.randn(3, one.channels, *small[:dims], dtype=torch.float64, requires_grad=True)
    w = torch.randn(one.filters, one.channels // one.groups, *(2, 3)[:dims], dtype=torch.float64)
    w.requires_grad_()
    place = one.stride, one.padding, one.dilation, one.groups

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return CONV[dims](x, w, None, *place)

    with anybatch.convolutions() as found:
        assert torch.autograd.gradcheck(layer, (x, w))
        assert torch.autograd.gradgradcheck(layer, (x, w))
    assert found.chosen


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, 2)
    return nn.Sequential(*layers, nn.ConvTranspose2d(4, 3, 3), nn.Flatten(), nn.LazyLinear(2))


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("mode", ["autocast", "compile", "vmap", "engine", "inference"])
def test_in_every_mode(mode: str) -> None:
    model, x = net(), torch.randn(6, 3, 9, 8)
    model(x)
    y = torch.randint(2, (6,))

    def step(ours: nn.Module) -> list[Tensor]:
        if mode == "inference":
            with torch.inference_mode():
                return [ours.eval()(x)]
        if mode == "vmap":
            filters = torch.randn(3, 4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
            return [torch.func.vmap(lambda w: F.conv2d(x, w))(filters)]
        if mode == "engine":
            engine = anybatch.Engine(ours, nn.CrossEntropyLoss(), micro_batch=4)
            engine.backward(x, y)
        elif mode == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                F.cross_entropy(ours(x).float(), y).backward()
        else:
            forward: Callable[[Tensor], Any] = ours
            if mode == "compile":
                forward = torch.compile(ours, backend="aot_eager")
            F.cross_entropy(forward(x), y).backward()
        return [p.grad for p in ours.parameters() if p.grad is not None]

    true = step(copy.deepcopy(model))
    with anybatch.convolutions() as found:
        ours = step(copy.deepcopy(model))
    assert found.chosen
    assert all(str(c).startswith("fft") for c in found.configurations)
    scale = max(float(t.norm()) for t in true)
    for mine, its in zip(ours, true, strict=True):
        far = float((mine - its).norm()) / max(float(its.norm()), 0.01 * scale)
        assert far < (0.05 if mode == "autocast" else 1e-5)


@pytest.mark.usefixtures("divided")
def test_half_precision_is_nearer_to_the_truth_than_torchs() -> None:
    one = problem("forward", 2, "padded")
    x, w, b = own(one)
    true = computed(one, x, w, b)
    half = [t.detach().bfloat16().requires_grad_() for t in (x, w, b)]
    plain = computed(one, *half)
    with anybatch.convolutions():
        ours = computed(one, *half)
    for mine, its, exact in zip(ours, plain, true, strict=True):
        assert mine.dtype == torch.bfloat16
        assert distance(mine, exact) <= 1.1 * distance(its, exact)


@pytest.mark.usefixtures("divided")
def test_an_error_inside_and_several_threads_restore_torchs_kernels() -> None:
    x, w = torch.randn(3, 2, 9), torch.randn(4, 2, 3)
    true, found, barrier = F.conv1d(x, w), list[float](), threading.Barrier(3)

    def work() -> None:
        barrier.wait()
        for _ in range(20):
            with anybatch.convolutions():
                found.append(distance(F.conv1d(x, w), true.double()))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert max(found) < 1e-6
    with pytest.raises(ZeroDivisionError), anybatch.convolutions():
        _ = 1 / 0
    assert torch.equal(F.conv1d(x, w), true)
    with anybatch.convolutions() as outer:
        with anybatch.convolutions() as inner:
            F.conv1d(x, w)
        assert not outer.chosen
        assert inner.chosen
        F.conv1d(x, w)
    assert outer.chosen


def test_what_is_measured_is_saved_and_a_real_choice_is_right(tmp_path: Path) -> None:
    cache = tmp_path / "of" / "costs.sqlite"
    layer, x = nn.Conv1d(4, 4, 65, padding=32, groups=4), torch.randn(4, 4, 256)
    true = layer(x).detach()
    with anybatch.convolutions("1MiB", cache=cache) as first:
        found = layer(x).detach()
    assert distance(found, true.double()) <= 1e-6
    assert not any(c.workspace > 1 << 20 for c in first.configurations)
    with anybatch.convolutions("1MiB", cache=cache) as second:
        layer(x)
    assert second.chosen == first.chosen  # the same seconds: nothing was measured again
    with anybatch.convolutions("1KiB", cache=cache, policy="undivided") as third:
        layer(x)
    assert all(c.workspace <= 1024 for c in third.configurations)


def test_a_total_is_divided_among_the_kernels_of_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(one: Problem, size: int, name: str) -> tuple[float, int, float]:
        wide = one.window == (5, 5)
        return ((0.1 if wide else 0.5) if name == "fft" else 1.0) * size, 1000 * size, 0.0

    measured_as(monkeypatch, made, held=True)
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 2, k, padding=k // 2) for k in (5, 3, 3)]
    model, x = nn.Sequential(*layers), torch.randn(4, 2, 8, 8)

    def step() -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    true = step()
    with anybatch.convolutions(workspace_total=7000) as found:
        first = step()
        assert not found.chosen
        second = step()
        assert len(found.configurations) == 8  # the first layer's input wants no gradient
        wide = [
            c
            for (p, _), one in found.chosen.items()
            for c in one.configurations
            if p.window == (5, 5)
        ]
        # each of 9000 seconds wins most for a byte where the window is wide
        assert sum(c.workspace for c in found.configurations) <= 7000
        assert all(str(c).startswith("fft") for c in wide)
        third = step()
        model(x)
        forward = model(x)
        assert len(found.configurations) == 8
    assert all(torch.equal(a, b) for a, b in zip(first, true, strict=True))
    for mine, again, its in zip(second, third, true, strict=True):
        assert distance(mine, its.double()) < 1e-6
        assert torch.equal(mine, again)
    assert distance(forward.detach(), model(x).detach().double()) < 1e-6


def test_what_means_nothing_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="both were given: leave one out"),
        anybatch.convolutions("1MiB", workspace_total="1MiB"),
    ):
        pass
    with pytest.raises(ValueError, match="nan must be"), anybatch.convolutions(nan="no"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="policy must be"), anybatch.convolutions(policy="fast"):  # type: ignore[arg-type]
        pass
    with (
        pytest.raises(ValueError, match="workspace must be a"),
        anybatch.convolutions("much"),
    ):
        pass


def test_what_is_unusual_goes_to_torch() -> None:
    with anybatch.convolutions() as found:
        F.conv_transpose1d(torch.randn(2, 3, 5), torch.randn(3, 2, 3))
        F.conv1d(torch.randn(0, 3, 5), torch.randn(4, 3, 3))
    assert not found.chosen


@pytest.mark.usefixtures("divided")
def test_without_a_folder_for_it_nothing_is_saved_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "anybatch").write_text("a file where the folder should be")
    monkeypatch.setattr("anybatch.conv.convolutions._cache_folder", lambda: tmp_path)
    x, w = torch.randn(3, 2, 9), torch.randn(4, 2, 3)
    with pytest.warns(UserWarning, match="end with this process"), anybatch.convolutions():
        F.conv1d(x, w)
    with (
        pytest.raises(anybatch.errors.StoreError, match="name another one, or give cache=False"),
        anybatch.convolutions(cache=tmp_path / "anybatch" / "costs.sqlite"),
    ):
        pass
    with anybatch.convolutions(cache=False) as found:
        F.conv1d(x, w)
    assert found.chosen


@pytest.mark.usefixtures("divided")
def test_a_file_that_breaks_is_left_and_work_goes_on(tmp_path: Path) -> None:
    cache = tmp_path / "costs.sqlite"
    x, w = torch.randn(3, 2, 9), torch.randn(4, 2, 3)
    with anybatch.convolutions(cache=cache) as found:
        cache.write_bytes(b"no data base" * 1000)
        with pytest.warns(UserWarning, match="are no longer stored in"):
            F.conv1d(x, w)
        F.conv1d(x[:2], w)
    assert len(found.chosen) == 2


def test_time_for_measuring_is_for_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def made(one: Problem, size: int, name: str) -> tuple[float, int, float]:
        requested.append(name)
        return 1.0 if name == "native" else 0.5, 100, 0.0

    measured_as(monkeypatch, made)
    x, w = torch.randn(4, 2, 9), torch.randn(4, 2, 3)
    with anybatch.convolutions(seconds=0.0, cache=False) as found:
        F.conv1d(x, w)
        F.conv1d(x, w[:2])
    assert not requested
    assert [str(c) for c in found.configurations] == ["native@4", "native@4"]


LOUD = {
    "NaN": (float("nan"), "x", torch.float32),
    "infinity": (float("inf"), "x", torch.float32),
    "minus infinity": (-float("inf"), "x", torch.float32),
    "a spectrum overflows": (1e38, "x", torch.float32),
    "NaN in a filter": (float("nan"), "w", torch.float32),
    "half precision": (float("nan"), "x", torch.bfloat16),
    "double precision": (1e308, "x", torch.float64),
}


@pytest.mark.parametrize("fastest", ["im2col", "fft", "overlap_save"])
def test_an_infinity_meets_no_zeros_of_a_border_on_request(
    monkeypatch: pytest.MonkeyPatch, fastest: str
) -> None:
    def made(_: Problem, size: int, name: str) -> tuple[float, int, float]:
        return (0.1 if name == fastest else 1.0) * size, 100 * size, 0.0

    measured_as(monkeypatch, made, held=True)
    torch.manual_seed(0)
    x, w = torch.randn(2, 2, 32, 32), torch.randn(1, 2, 5, 5)
    wide = w.clone()
    wide[0, 0, 0, 0] = float("inf")
    expected = F.conv2d(x, wide, padding=2)
    with anybatch.convolutions("16MiB", cache=False, nan="local") as found:
        assert torch.equal(F.conv2d(x, wide, padding=2).isfinite(), expected.isfinite())
        F.conv2d(x, w, padding=2)
    names = {part.algorithm for chosen in found.configurations for part in chosen.parts}
    assert names == {fastest}


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("case", LOUD)
def test_one_value_that_is_not_finite_stays_local_on_request(case: str) -> None:
    value, where, dtype = LOUD[case]
    one = problem("forward", 2, "plain")
    x, w, _ = own(one, dtype)
    with torch.no_grad():
        (x if where == "x" else w)[0, 0, 0, 0] = value
    expected = computed(one, x, w, None)
    with anybatch.convolutions("1MiB", cache=False, nan="local") as found:
        local = computed(one, x, w, None)
        with torch.no_grad():
            (x if where == "x" else w)[0, 0, 0, 0] = 0.5
        computed(one, x, w, None)
    torch.testing.assert_close(local[0], expected[0], rtol=0, atol=0, equal_nan=True)
    for a, b in zip(local, expected, strict=True):  # a gradient may not depend on the value
        assert torch.equal(a.isfinite(), b.isfinite())
    assert all(configuration.divided for configuration in found.configurations)
    with torch.no_grad():
        (x if where == "x" else w)[0, 0, 0, 0] = value
    with anybatch.convolutions("1MiB", cache=False):
        spread = computed(one, x, w, None)[0]
    more = int((~spread.isfinite()).sum()) - int((~expected[0].isfinite()).sum())
    assert more == 0 if where == "w" else more > 0  # a filter is a whole channel's anyway


ODD = {
    "bias of one": {"bias": torch.ones(1)},
    "bias of too many": {"bias": torch.ones(5)},
    "bias of two directions": {"bias": torch.ones(4, 1)},
    "bias of another type": {"bias": torch.ones(4, dtype=torch.float64)},
    "stride 0": {"stride": 0},
    "stride below 0": {"stride": -1},
    "dilation 0": {"dilation": 0},
    "padding below 0": {"padding": -1},
    "groups 0": {"groups": 0},
    "groups that do not divide": {"groups": 3},
    "a window larger than the image": {"dilation": 9},
}


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize("case", ODD)
def test_a_wrong_call_is_torchs_to_refuse(case: str) -> None:
    x, w = torch.randn(2, 2, 9, 9), torch.randn(4, 2, 3, 3)
    with pytest.raises(RuntimeError) as expected:
        F.conv2d(x, w, **ODD[case])
    with anybatch.convolutions("1MiB", cache=False):
        F.conv2d(x, w, torch.ones(4))  # a right one of these shapes was computed before
        with pytest.raises(RuntimeError) as found:
            F.conv2d(x, w, **ODD[case])
    assert str(found.value) == str(expected.value)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("where", ["a terminal", "a notebook"])
def test_what_takes_long_is_announced_on_a_terminal_and_in_a_notebook(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    if where == "a notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    shown = Terminal() if where == "a terminal" else io.StringIO()
    telling = Telling(stream=shown)
    one = problem("forward", 2, "plain")
    telling(one, 4, "fft")
    assert not shown.getvalue()
    telling._begin -= 10.0
    telling(one, 8, "fft")
    assert shown.getvalue().startswith("\rmeasuring convolutions, 2: forward")
    assert len(shown.getvalue()) == 60
    telling.over()
    assert shown.getvalue().endswith("\r" + " " * 59 + "\r")
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    silent = io.StringIO()
    quiet = Telling(stream=silent)
    quiet._begin -= 10.0
    quiet(one, 8, "fft")
    quiet.over()
    assert not silent.getvalue()


def test_what_is_torchs_for_ever_is_not_queried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_as(monkeypatch, lambda one, size, name: (float(name != "native"), 9, 0.0))
    x, w = torch.randn(4, 2, 9, requires_grad=True), torch.randn(4, 2, 3, requires_grad=True)
    requested: list[str] = []
    ask = Chooser.__call__

    def noted(self: Chooser, one: Problem, *more: Any) -> Tensor | None:
        requested.append(one.kernel)
        return ask(self, one, *more)

    monkeypatch.setattr(Chooser, "__call__", noted)
    with anybatch.convolutions(cache=False) as found:
        for _ in range(3):
            F.conv1d(x, w).sum().backward()
        assert requested == ["forward", "data", "filter"]
        F.conv1d(x, w, stride=2)
        F.conv1d(x.detach(), w).sum().backward()
        assert requested == ["forward", "data", "filter", "forward", "filter"]
    assert len(found.chosen) == 4


@pytest.mark.parametrize("error", [RuntimeError("could not create a primitive"), KeyError("x")])
def test_a_kernel_for_whose_measurement_memory_does_not_suffice_stays_torchs(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    measured_as(monkeypatch, fails)
    x, weight = torch.randn(4, 3, 40, 40), torch.randn(3, 1, 31, 31)
    want = F.conv2d(x, weight, groups=3)
    with anybatch.convolutions("8MiB") as chosen:
        if isinstance(error, KeyError):
            with pytest.raises(KeyError):
                F.conv2d(x, weight, groups=3)
            return
        assert torch.equal(F.conv2d(x, weight, groups=3), want)
        assert torch.equal(F.conv2d(x, weight, groups=3), want)  # and is not measured again
    assert "native" in str(chosen)


@pytest.mark.parametrize(
    ("system", "variables", "folder"),
    [
        ("linux", {"XDG_CACHE_HOME": "/else"}, "/else"),
        ("linux", {"XDG_CACHE_HOME": ""}, "/me/.cache"),
        ("darwin", {}, "/me/Library/Caches"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local"),
        ("win32", {"LOCALAPPDATA": ""}, "/me/AppData/Local"),
    ],
)
def test_measurements_are_saved_where_the_system_keeps_caches(
    system: str, variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(Path, "home", lambda: Path("/me"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert convolutions.cache_file(True) == Path(folder) / "anybatch" / "convolutions.sqlite"
