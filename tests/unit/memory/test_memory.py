from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch
from anybatch import Engine
from anybatch.memory import limits as memory
from anybatch.memory.limits import MemoryLimit, _host_limits, _shared, available_memory

GIB = 1 << 30


def system(root: Path, files: dict[str, str]) -> Path:
    """Write the files of a system; the process's own limits are none there."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n"}
V2 = "sys/fs/cgroup/"
V1 = "sys/fs/cgroup/memory/"


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, (8 * GIB, "memory available")),
        (
            {
                "proc/self/cgroup": "0::/job\n",
                V2 + "job/memory.max": str(4 * GIB),
                V2 + "job/memory.current": str(GIB),
            },
            (3 * GIB, "control group limit"),
        ),
        (  # a parent's limit is smaller than its child's
            {
                "proc/self/cgroup": "0::/slice/job\n",
                V2 + "slice/job/memory.max": str(6 * GIB),
                V2 + "slice/job/memory.current": str(GIB),
                V2 + "slice/memory.max": str(3 * GIB),
                V2 + "slice/memory.current": str(2 * GIB),
            },
            (GIB, "control group limit"),
        ),
        (  # inside a container the group is the root
            {
                "proc/self/cgroup": "0::/\n",
                V2 + "memory.max": str(2 * GIB),
                V2 + "memory.current": str(GIB),
            },
            (GIB, "control group limit"),
        ),
        (
            {
                "proc/self/cgroup": "0::/job\n",
                V2 + "job/memory.max": "max\n",
                V2 + "job/memory.current": str(GIB),
            },
            (8 * GIB, "memory available"),
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/other\n9:memory,hugetlb:/job\n",
                V1 + "job/memory.limit_in_bytes": str(2 * GIB),
                V1 + "job/memory.usage_in_bytes": str(GIB),
                V1 + "other/memory.limit_in_bytes": "1",
                V1 + "other/memory.usage_in_bytes": "0",
            },
            (GIB, "control group limit"),
        ),
        (  # how version 1 writes that there is none
            {
                "proc/self/cgroup": "9:memory:/job\n",
                V1 + "job/memory.limit_in_bytes": str((1 << 63) - 4096),
                V1 + "job/memory.usage_in_bytes": str(GIB),
            },
            (8 * GIB, "memory available"),
        ),
        ({"proc/self/cgroup": "nonsense\n\n::\n"}, (8 * GIB, "memory available")),
    ],
)
def test_the_smallest_limit_wins_and_what_is_unlimited_does_not_count(
    files: dict[str, str], want: tuple[int, str], tmp_path: Path
) -> None:
    assert min(_host_limits(system(tmp_path, MEMINFO | files))) == want


def test_the_limits_of_the_process_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = system(tmp_path, MEMINFO | {"proc/self/status": f"VmData: {GIB // 1024} kB\n"})
    limits = {memory.resource.RLIMIT_DATA: 3 * GIB}
    none = memory.resource.RLIM_INFINITY
    monkeypatch.setattr(
        memory.resource, "getrlimit", lambda limit_name: (limits.get(limit_name, none), none)
    )
    assert min(_host_limits(root)) == (2 * GIB, "RLIMIT_DATA")


def test_a_fifth_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_host_limits", lambda _: iter([(100, "b"), (50, "a"), (70, "c")]))
    assert available_memory(torch.device("cpu")) == (40, "a, less 20 %")
    monkeypatch.setattr(memory, "_host_limits", lambda _: iter([(-5, "a")]))
    assert available_memory(torch.device("cpu")) == (0, "a, less 20 %")


def test_a_system_that_tells_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_host_limits", lambda _: iter(()))
    with pytest.raises(ValueError, match=r"memory= must be given where.*it is None on cpu"):
        available_memory(torch.device("cpu"))


def test_with_nothing_passed_what_is_left_is_planned_for_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_host_limits", lambda _: iter([(100_000, "a limit")]))
    model = nn.Linear(5, 3)
    engine = Engine(model, F.cross_entropy)
    engine.backward(torch.randn(10, 5), torch.randint(0, 3, (10,)))
    assert engine.plan is not None
    assert engine.plan.memory is not None
    assert engine.plan.memory.source == "a limit, less 20 %"
    assert engine.plan.memory.budget == 80_000 + 4 * (15 + 3)
    assert "(a limit, less 20 %)" in str(engine.plan)


@pytest.mark.parametrize("share", ["80%", "25 %"])
def test_a_share_is_one_of_what_is_left_and_is_named(
    monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    monkeypatch.setattr(memory, "_host_limits", lambda _: iter([(100_000, "a limit")]))
    plan = anybatch.plan(
        nn.Linear(5, 3),
        F.cross_entropy,
        (torch.randn(10, 5), torch.randint(0, 3, (10,))),
        memory=share,
    )
    number = float(share.strip("% "))
    assert plan.memory is not None
    assert plan.memory.source == f"a limit, {number:g} % of it"
    assert plan.memory.budget == 1000 * number + 4 * (15 + 3)


def test_a_share_of_a_device_that_is_not_there() -> None:
    batch = torch.randn(10, 5), torch.randint(0, 3, (10,))
    plan = anybatch.plan(nn.Linear(5, 3), F.cross_entropy, batch, memory="50%", device="cuda:2GiB")
    assert plan.memory is not None
    assert plan.memory.budget == (2 * GIB - 600 * 2**20) // 2


def test_the_ranks_of_a_machine_share_what_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(9 * GIB, "memory available"), (GIB, "RLIMIT_AS")]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert list(_shared(limits)) == limits  # not of torchrun
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    shared = (3 * GIB, "memory available, for each of 3 ranks")
    assert list(_shared(limits)) == [shared, limits[1]]


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")
def test_a_limit_of_the_host_holds_inside_and_nowhere_else() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = MemoryLimit(torch.device("cpu"), GIB)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), limit:
            assert GIB < resource.getrlimit(resource.RLIMIT_DATA)[0] < 1 << 50
            raise ZeroDivisionError
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert MemoryLimit.possible(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"memory the system can limit.* it is mps"):
        MemoryLimit(torch.device("mps"), GIB)
