"""What every test shares: one thread, a seed, the size of large counts, and soak's results file."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it, and then it would not be frozen
from hypothesis import settings
from tests.covering import covering
from tests.frames import roomy
from tests.frozen import freeze

CACHES = tempfile.TemporaryDirectory(prefix="anybatch-caches-")
"""The user's folder for caches, of programs that a test starts; that of matplotlib stays."""
os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
os.environ["XDG_CACHE_HOME"] = CACHES.name

SEED = 0
EXAMPLES = 1000
FEW = 4
"""Cases of which none is left out; `large(few=...)` where each of them takes seconds."""
PART = 20
"""One case in so many is run; `large(part=...)` where there are many that take seconds each."""
settings.register_profile("part", max_examples=EXAMPLES // PART, derandomize=True, deadline=None)
settings.register_profile("soak", max_examples=EXAMPLES, derandomize=True, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="full counts instead of a seeded part")
    parser.addoption("--soak-results", help="file that receives the counts of a soak")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as what a shell starts with & has it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.load_profile("soak" if config.getoption("--soak") else "part")
    config.addinivalue_line(
        "markers",
        "large(of, few, part): of the cases of a test, or of all tests `of` a name, one in `part` "
        f"({PART}), seeded, and not fewer than `few` ({FEW}), or all under --soak",
    )
    config.addinivalue_line(
        "markers",
        "product(pairs): of the cases of a test so many that each value of each parameter is among "
        "them, and each pair of values with pairs=True, or all under --soak; without it, of a test "
        "with several `parametrize` so many that each case of each of them is",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has no large count under --soak, else most of the large cases.

    These are the same ones always. Of several test processes none is to be the last by far.
    """
    _mark_products(items)
    if config.getoption("--soak"):
        out = [item for item in items if not _counts(item)]
    else:
        cases: dict[tuple[str, int, int], list[pytest.Item]] = {}
        for item in items:
            if marker := item.get_closest_marker("large"):
                of, few, part = map(marker.kwargs.get, ("of", "few", "part"))
                name = of or item.nodeid.partition("[")[0]
                cases.setdefault((name, few or FEW, part or PART), []).append(item)
        out = [
            item
            for (name, few, part), every in cases.items()
            for item in _others(every, random.Random(name), max(few, len(every) // part))
        ]
        out += _not_covering(items)
    config.hook.pytest_deselected(items=out)
    gone = set(map(id, out))
    items[:] = [item for item in items if id(item) not in gone]
    if hasattr(config, "workerinput"):
        _shortest_last(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage in the meantime: there is none, and it takes a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    freeze()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless browser."""
    from scripts import screens

    pytest.importorskip("playwright", reason="playwright drives it: pip install 'anybatch[dev]'")
    if screens.BROWSER is None:
        pytest.skip("no browser on the path: install chromium, with your system's tool")
    with screens.chromium() as browser:
        yield browser


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Do so again for what the files before this one have imported and left."""
    freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Let the frames of a test have room."""
    pyfuncitem.obj = partial(roomy, pyfuncitem.obj)
    return (yield)


def _counts(item: pytest.Item) -> bool:
    """Say whether a test does more under --soak."""
    assert isinstance(item, pytest.Function)
    drawn = getattr(item.obj, "is_hypothesis_test", False)
    marked = item.get_closest_marker("large") or item.get_closest_marker("product")
    return bool(marked or drawn or {"counted", "some"} & set(item.fixturenames))


def _mark_products(items: list[pytest.Item]) -> None:
    """Mark a test with several `parametrize` as a product, if no mark says which cases are run.

    A list of cases that is written by hand is one of them, so none of it is left out.
    """
    for item in items:
        said = item.get_closest_marker("large") or item.get_closest_marker("product")
        if not said and len(_names(item)) > 1:
            item.add_marker(pytest.mark.product(lists=True))


def _names(item: pytest.Item) -> tuple[str, ...]:
    """Return the name of a case in each of its lists of cases."""
    return tuple(item.callspec._idlist) if hasattr(item, "callspec") else ()


def _not_covering(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of products without which each value of a parameter is still tested."""
    products: dict[tuple[str, bool, bool], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and (marker := item.get_closest_marker("product")):
            pairs, lists = (marker.kwargs.get(name, False) for name in ("pairs", "lists"))
            key = item.nodeid.partition("[")[0], pairs, lists
            products.setdefault(key, []).append(item)
    out: list[pytest.Item] = []
    for (name, pairs, lists), every in products.items():
        cases = [dict(enumerate(_names(item))) if lists else item.callspec.params for item in every]
        kept = set(covering(cases, random.Random(name), pairs=pairs))
        out += [item for place, item in enumerate(every) if place not in kept]
    return out


def _others(every: list[pytest.Item], rng: random.Random, count: int) -> list[pytest.Item]:
    sampled = set(map(id, rng.sample(every, min(count, len(every)))))
    return [item for item in every if id(item) not in sampled]


def _shortest_last(items: list[pytest.Item]) -> None:
    """Begin with files of few tests: where a file has many, each of them is short."""
    many = Counter(item.path for item in items)
    items.sort(key=lambda item: many[item.path])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a test measures out of the user's cache folder, and out of other tests."""
    found: list[Path] = []

    def folder() -> Path:
        found[:] = found or [tmp_path_factory.mktemp("cache")]  # made where it is asked for
        return found[0]

    monkeypatch.setattr("anybatch.conv.convolutions._cache_folder", folder)
    # A second engine in a test would follow the first one: those that are about it name a file.
    monkeypatch.setattr("anybatch.engine.engine.plan_file", lambda: None)


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[..., int]:
    """Return how many of `full` cases to run, all under --soak, else one in `part`; and note it."""
    soak = bool(request.config.getoption("--soak"))

    def count(full: int, part: int = PART) -> int:
        chosen = full if soak else max(1, full // part)
        request.node.user_properties.append(("counted", chosen))
        return chosen

    return count


@pytest.fixture
def some(request: pytest.FixtureRequest) -> Callable[[Sequence[Any], int], list[Any]]:
    """Return a seeded choice of so many of some cases, all under --soak; and note how many.

    Tests of one function choose others: each by its own name.
    """
    soak, rng = bool(request.config.getoption("--soak")), random.Random(request.node.name)

    def choose(cases: Sequence[Any], few: int) -> list[Any]:
        count = len(cases) if soak else min(few, len(cases))
        places = sorted(rng.sample(range(len(cases)), count))
        request.node.user_properties.append(("counted", count))
        return [cases[place] for place in places]

    return choose


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write what a soak has counted, for the pages."""
    config = terminalreporter.config
    target = config.getoption("--soak-results")
    if not target:
        return
    stats = terminalreporter.stats
    counted = {
        report.nodeid: value
        for report in stats.get("passed", [])
        for name, value in report.user_properties
        if name == "counted"
    }
    kinds = ("passed", "failed", "error", "skipped", "xfailed")
    found = {
        "seed": SEED,
        "examples": EXAMPLES if config.getoption("--soak") else EXAMPLES // PART,
        "outcomes": {outcome: len(stats.get(outcome, [])) for outcome in kinds},
        "cases": Counter(
            report.nodeid.partition("[")[0]
            for report in stats.get("passed", [])
            if {"large", "product"} & set(report.keywords) and report.nodeid not in counted
        ),
        "counted": dict(sorted(counted.items())),
    }
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
