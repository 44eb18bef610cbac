"""What a person wants of more GPUs: read once, and refused where it means nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import anybatch
from anybatch import Plan
from anybatch.tools.scaled import (
    COMPUTE,
    FREE,
    LOAD,
    PREPARE,
    SERVED,
    TRANSFER,
    UPDATE,
    Goal,
    LoopStage,
    NetworkLink,
    goal_of,
    of_micro_batches,
    scale_of,
    scaled,
    step_seconds,
)
from anybatch.units import parse_bandwidth, parse_seconds


class Stream(IterableDataset[Any]):
    """A stream of unknown length, whose loader has `__len__` all the same."""

    def __iter__(self) -> Iterator[Any]:
        yield from ((torch.ones(8), torch.tensor(0)) for _ in range(64))


STREAM = DataLoader(Stream(), batch_size=32)


def test_a_goal_is_what_was_said() -> None:
    assert goal_of(4, None, None, loader=[1]) == Goal(gpus=4)
    assert goal_of(None, 2.5, None, loader=[1]) == Goal(speedup=2.5)
    assert goal_of(None, None, 60, epochs=3, loader=[1, 2]) == Goal(deadline=60, steps=6)
    assert goal_of(None, None, None, loader=None) == Goal()
    assert goal_of(np.int64(4), None, None, loader=[1]) == Goal(gpus=4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gpus": 2, "speedup": 2}, r"at most one goal.*\['gpus', 'speedup'\] were"),
        ({"gpus": 0}, "gpus must be a whole number of at least 1, and it is 0"),
        ({"gpus": 1.5}, "gpus must be a whole number"),
        ({"speedup": -1}, "speedup must be a number above 0, and it is -1"),
        ({"speedup": nan}, "speedup must be a number above 0"),
        ({"deadline": inf}, "deadline must be a number of seconds above 0"),
        ({"deadline": "1h"}, "deadline must be a number of seconds above 0, and it is '1h'"),
        ({"gpus": True}, "gpus must be a whole number of at least 1, and it is True"),
        ({"gpus": 4.0}, "gpus must be a whole number of at least 1, and it is 4.0"),
        ({"speedup": "3x"}, "speedup must be a number above 0, and it is '3x'"),
        ({"deadline": 9, "epochs": None}, "epochs must be a whole number"),
        ({"deadline": 9, "epochs": 0}, "epochs must be a whole number of at least 1"),
        ({"gpus": 2, "loader": None}, "there is no loader for gpus: give loader="),
        ({"network": "10Gbit", "loader": None}, "there is no loader for network"),
        ({"network": "fast"}, 'network must be bits a second such as "10Gbit"'),
        ({"deadline": 9, "loader": iter(())}, "the loader has no length"),
        ({"deadline": 9, "loader": STREAM}, "the loader has no length"),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], expected: str) -> None:
    words = {"gpus": None, "speedup": None, "deadline": None, "loader": [1], **options}
    with pytest.raises(ValueError, match=expected):
        goal_of(words.pop("gpus"), words.pop("speedup"), words.pop("deadline"), **words)


@pytest.mark.parametrize(
    ("text", "found"), [("10Gbit", 1.25e9), ("8 bit/s", 1.0), ("1.6Mbit", 2e5), ("400GBIT", 5e10)]
)
def test_networks_are_in_bits(text: str, found: float) -> None:
    assert parse_bandwidth(text) == found


@pytest.mark.parametrize("text", ["10GB", "0Gbit", "", "Gbit", 10, None])
def test_what_is_no_network_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="network must be bits a second"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "found"), [("90s", 90), ("1.5h", 5400), ("2d", 172800), ("30 min", 1800), ("7", 7)]
)
def test_times_are_read_in_their_unit(text: str, found: float) -> None:
    assert parse_seconds(text) == found


@pytest.mark.parametrize("text", ["6 years", "0h", "-1h", "", 6])
def test_what_is_no_time_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match='deadline must be a time such as "30min"'):
        parse_seconds(text)


def test_a_plan_answers_a_goal() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    options = {"memory": "1MiB", "optimizer": optimizer, "loader": loader}
    plan = anybatch.plan(model, F.cross_entropy, (x[:32], y[:32]), gpus=3, **options)
    assert plan.scale is not None
    assert plan.scale.gpus == 3
    assert FREE in plan.scale.assumed
    assert plan.scale.rows[0].speedup == 1
    assert Plan.from_json(plan.to_json()) == plan
    linked = anybatch.plan(model, F.cross_entropy, (x[:32], y[:32]), network="8bit", **options)
    assert linked.scale is not None
    assert FREE not in linked.scale.assumed
    size = sum(p.nbytes for p in model.parameters())
    two = linked.scale.rows[1]
    assert two.seconds == pytest.approx(size, rel=1e-2)  # a byte a second, and it goes half twice
    assert linked.scale.fastest == 1
    assert linked.scale.servers is None
    served = anybatch.plan(
        *(model, F.cross_entropy, (x[:32], y[:32])), network="10Gbit", gpus=2, servers=9, **options
    )
    assert served.scale is not None
    assert served.scale.servers is not None
    assert (served.scale.servers.workers, served.scale.servers.servers) == (2, 9)
    assert Plan.from_json(served.to_json()) == served
    assert "9 for 2 workers" in str(served)


COMPUTES, BYTES = 0.5, 4_000_000
"""Seconds of computing on a mini-batch, and bytes of gradients: 8 MB a round."""


@pytest.mark.parametrize(
    ("servers", "workers", "network", "expected"),
    [
        ("auto", 8, "256Mbit", (4, 4, 1.0, "4 servers hide the traffic of 8 workers")),
        (4, 8, "256Mbit", (4, 4, 1.0, "4 servers hide the traffic of 8 workers")),
        (1, 8, "256Mbit", (1, 4, 4.0, "which is 25% of a round; 4 servers hide it")),
        (8, 8, "256Mbit", (8, 4, 0.5, "which is 100% of a round; 4 servers hide it")),
        ("auto", 1, "1Gbit", (1, 1, 0.128, "1 server hides the traffic of 1 worker")),
        ("auto", 8, "64Mbit", (None, None, 2.0, "a worker's own link needs 1 s a round")),
        (9, 8, "64Mbit", (9, None, 2.0, "which is 50% of a round; no number hides it")),
    ],
)
def test_parameter_servers_are_those_of_the_lemma(
    servers: Any, workers: int, network: str, expected: tuple[int | None, int | None, float, str]
) -> None:
    """2 S_p N_w / (N_ps B_ps) over T_C, and no less than 2 S_p / B_ps on a worker's own link."""
    optimizer = torch.optim.SGD(nn.Linear(1000, 1000, bias=False).parameters(), lr=0.1)
    assert sum(p.nbytes for p in optimizer.param_groups[0]["params"]) == BYTES
    takes = dict.fromkeys((LOAD, PREPARE, TRANSFER, UPDATE), 0.0) | {COMPUTE: COMPUTES}
    stages = [
        LoopStage(name, seconds, seconds, seconds / COMPUTES) for name, seconds in takes.items()
    ]
    profile: Any = SimpleNamespace(samples=100, stages=stages, workers=0, overhead=0.0)
    plan: Any = SimpleNamespace(memory=None, offload=None, micro_batch=100)
    goal = goal_of(workers, None, None, loader=[1], network=network, servers=servers)
    scale = scale_of(plan, profile, optimizer, goal, network, 100)
    found = scale.servers
    assert found is not None
    assert (found.servers, found.fewest) == expected[:2]
    assert found.traffic == pytest.approx(expected[2])
    assert expected[3] in str(found)
    assert any(str(found) in line for line in scale.explain())
    assert SERVED in scale.assumed


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ({"servers": 4}, "give gpus= and network= with servers="),
        ({"servers": 4, "gpus": 8}, "give gpus= and network= with servers="),
        ({"servers": "auto", "network": "1Gbit"}, "give gpus= and network= with servers="),
        ({"servers": 0, "gpus": 8, "network": "1Gbit"}, "servers must be a whole number of at"),
        ({"servers": True, "gpus": 8, "network": "1Gbit"}, "servers must be a whole number of at"),
        (
            {"servers": "4", "gpus": 8, "network": "1Gbit"},
            'servers must be a whole number or "auto"',
        ),
        (
            {"servers": 4, "gpus": 8, "network": "1Gbit", "loader": None},
            "network, servers: give lo",
        ),
    ],
)
def test_servers_that_mean_nothing_are_refused(requested: dict[str, Any], expected: str) -> None:
    words = {"gpus": None, "speedup": None, "deadline": None, "loader": [1]}
    with pytest.raises(ValueError, match=re.escape(expected)):
        goal_of(**words | requested)


@given(
    st.integers(1, 100),
    st.sets(st.integers(1, 100), min_size=1),
    st.floats(0, 2),
    st.floats(0.01, 1),
)
def test_seconds_of_micro_batches_are_those_whose_steps_were_timed(
    size: int, sizes: set[int], fixed: float, each: float
) -> None:
    true = {n: fixed + each * n for n in sizes if n <= size}
    steps = {n: step_seconds(true, n, size) for n in true}
    assert of_micro_batches(steps, size) == pytest.approx(true)


def test_the_sizes_that_were_timed_are_those_of_the_samples() -> None:
    """Bytes of the gradients stood for them: a speedup of 1.2 where it is 1.8."""
    optimizer = torch.optim.SGD(nn.Linear(1000, 1000).parameters(), lr=0.1)
    takes = dict.fromkeys((LOAD, PREPARE, TRANSFER, UPDATE), 0.0) | {COMPUTE: 0.9}
    stages = [LoopStage(name, seconds, seconds, seconds / 0.9) for name, seconds in takes.items()]
    profile: Any = SimpleNamespace(samples=100, stages=stages, workers=0, overhead=0.0)
    true = {50: 0.5, 75: 0.6, 100: 0.9}
    rows = tuple(
        SimpleNamespace(micro_batch=n, seconds=step_seconds(true, n, 100), offloaded=False)
        for n in true
    )
    plan: Any = SimpleNamespace(
        memory=SimpleNamespace(candidates=rows), offload=None, micro_batch=100
    )
    found = scale_of(plan, profile, optimizer, Goal(), "1Gbit", 100)
    nbytes = sum(p.nbytes for p in optimizer.param_groups[0]["params"])
    link = NetworkLink(parse_bandwidth("1Gbit"))
    assert found == scaled(profile, 100, true, nbytes, link, Goal())


def test_a_stream_has_a_pace_and_no_epoch() -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(32, 8), torch.zeros(32, dtype=torch.int64)
    plan = anybatch.plan(
        *(model, F.cross_entropy, batch), memory="1MiB", optimizer=optimizer, loader=STREAM
    )
    assert plan.pace is not None
    assert plan.pace.epoch is None
    assert plan.scale is not None
    with pytest.raises(ValueError, match="gpus must be at most the 32 samples"):
        anybatch.plan(
            *(model, F.cross_entropy, batch), memory="1MiB", optimizer=optimizer, loader=STREAM,
            gpus=33,
        )  # fmt: skip
