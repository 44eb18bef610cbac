"""The benchmark of convolution kernels: it compares the same, and its tables are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.ucudnn.kernels import cases, rows, run
from torch import nn

from anybatch.conv.algorithms import native
from anybatch.conv.problem import KERNELS


def test_the_problem_of_a_layer_is_what_its_module_runs() -> None:
    layer = cases.Layer("small", 4, (9, 8), (5, 3), 2, 3)
    module, x = layer.make(), layer.rows().requires_grad_()
    y = module(x)
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, [x, module.weight], dy)
    w = module.weight.detach()
    arguments = {"forward": (x.detach(), w, y), "data": (dy, w, dx), "filter": (dy, x.detach(), dw)}
    for kernel in KERNELS:
        one, other, wanted = arguments[kernel]
        problem = run.problem_of(layer, kernel)
        assert problem.operands(3) == (tuple(one.shape), tuple(other.shape))
        assert torch.allclose(native(problem, one, other), wanted, atol=1e-5)
        name, torchs = run.best_of_torch(problem, (one, other))
        assert name in ("contiguous", "channels last")
        assert torch.allclose(torchs(), wanted, atol=1e-5)


def test_it_runs_and_its_tables_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = cases.Layer("small", 2, (64,), (33,), 2, 2)
    monkeypatch.setitem(cases.LAYERS, "small", small)
    monkeypatch.setattr(run, "IMAGES", 2)

    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    monkeypatch.setattr(run, "large_windows", lambda: nn.Sequential(network(), nn.Linear(4, 10)))
    found = {"modes": {"default": run.one_mode(["small"], 2)}}
    assert rows.conv_kernels(found).count("\n") == 1 + 3
    assert rows.conv_step(found).count("\n") == 1 + 2
    assert found["modes"]["default"]["step"]["error"] < 1e-5


def test_the_network_has_the_windows_of_its_name() -> None:
    windows = [m.kernel_size[0] for m in cases.large_windows().modules() if type(m) is nn.Conv2d]
    assert [k for k in windows if k > 4] == [31, 29, 27]
