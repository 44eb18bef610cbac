"""The benchmark under limits: a child takes its steps, or its limit refuses it memory."""

from __future__ import annotations

from pathlib import Path

from benchmarks.outofcore.limits import rows
from benchmarks.outofcore.limits.cgroups import group
from benchmarks.outofcore.limits.run import Child, nothing, ordered


def test_a_child_answers_orders_until_its_limit_refuses_it_memory(tmp_path: Path) -> None:
    limit, batch = 24 << 20, 8
    with Child(ordered("U-Net", batch, tmp_path, limit=limit), {}, nothing) as child:
        assert child.base["data"] > limit
        assert child.step() == {"failed": "refused"}
        assert child.step() == {"failed": "ended with 0"}
    assert not list(tmp_path.iterdir())


def test_a_group_is_gone_afterwards_where_one_can_be_made() -> None:
    with group(1 << 30) as made:
        path = None if made is None else made.path
        assert path is None or path.is_dir()
    assert path is None or not path.exists()


def test_the_tables_tell_what_failed() -> None:
    one = {
        "batch": 8,
        "live": 4 << 20,
        "limit": 2 << 20,
        "limited": "refused",
        "memory": 1 << 20,
        "growth": 5 << 20,
    }
    good = {"failed": None, "wall": [1.0, 1.1, 1.2], "predicted": 1 << 20, "out": 3 << 20}
    good |= {"waited": 0.5, "best": "large", "exact": True, "same malloc": [0.9, 1.0, 1.1]}
    bad = {"failed": "ours: refused"}
    text = rows.limits({"steps": {"good": one | good, "bad": one | bad}})
    assert "| trains | 1 MiB of 1 | 3 MiB | 0.50 s | 1.10 (1.00 to 1.20) of malloc large |" in text
    assert "| ours: refused |" in text
    ways = {"in memory": {"failed": "killed", "steps": 1, "peak": 1 << 30}}
    made = {"batch": 8, "limit": 1 << 30, "memory": 1 << 28, "ways": ways}
    assert "| killed |" in rows.cgroup({"cgroup": made})
    assert "could not be made" in rows.cgroup({"cgroup": None})
