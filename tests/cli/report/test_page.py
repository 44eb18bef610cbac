from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.report.pages import Node, in_order, log_of, plan_of, read, record_of, with_offload

from anybatch.cli.report import drawing
from anybatch.cli.report.drawing import ROLES
from anybatch.cli.report.history import LoggedStep, Overhead, RunHistory, Spent
from anybatch.cli.report.parts import number, percent, seconds
from anybatch.cli.report.record import RunRecord
from anybatch.cli.report.write import page_of, parts_of
from anybatch.core.plan_sections import verdicts
from anybatch.units import show_bytes

PAGES = {
    "whole run": record_of(),
    "step in order": record_of(step=in_order(), plan=with_offload(plan_of())),
    "one epoch": record_of(history=RunHistory.of(log_of(epochs=1))),
    "one step": record_of(history=RunHistory.of(log_of(epochs=1, each=1)), plan=plan_of()),
    "no epoch": record_of(history=RunHistory.of(log_of().splitlines()[0])),
    "long": record_of(history=RunHistory.of(log_of(epochs=90, each=30))),
    "plan": record_of(command="plan", summary=None, history=RunHistory()),
    "own steps": record_of(history=RunHistory.of(log_of(separate=True)), plan=plan_of()),
    "bare": RunRecord("train", {}),
    "not finite": record_of(history=RunHistory.of(log_of().replace(b"2.75", b"NaN"))),
}
HOSTILE = (
    """ <script>alert(1)</script>"'><img src=x onerror=alert(1)> {{ 7 * 7 }} {% raw %} $x_$ &lt;"""
)


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest) -> Node:
    return read(page_of(PAGES[request.param]))


def test_ids_are_unique_and_what_is_referred_to_is_there(page: Node) -> None:
    ids = [one.attributes["id"] for one in page.walk() if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    referred = set()
    for one in page.walk():
        for name, value in one.attributes.items():
            referred |= set(re.findall(r"url\(#([^)]*)\)", value))
            if name in ("aria-labelledby", "aria-describedby"):
                referred |= set(value.split())
            if name == "href" and value.startswith("#"):
                referred.add(value[1:])
    assert referred <= set(ids)


def test_nothing_is_loaded_from_elsewhere(page: Node) -> None:
    assert not page.all("script", "img", "iframe", "object", "embed", "base", "form", "video")
    for one in page.walk():
        assert not [name for name in one.attributes if name.startswith("on") or name == "src"]
        assert "http:" not in str(one.attributes)
        assert "https:" not in str(one.attributes)
        href = one.attributes.get("href", "#")
        assert href.startswith("#") or href == "data:,"
    (style,) = page.all("style")
    assert "url(" not in style.text
    assert "@import" not in style.text
    policy = page.all("meta")[1].attributes
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"].startswith("default-src 'none';")


def test_headings_go_down_one_by_one_and_landmarks_are_there(page: Node) -> None:
    levels = [int(one.tag[1]) for one in page.all("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(new <= old + 1 for old, new in pairwise(levels))
    assert page.all("html")[0].attributes["lang"] == "en"
    assert [len(page.all(tag)) for tag in ("main", "header", "nav", "footer")] == [1] * 4
    first = page.all("a")[0]
    assert (first.attributes["href"], first.text) == ("#main", "Skip to the content")
    links = [one.attributes["href"][1:] for one in page.all("nav")[0].all("a")]
    assert links == [one.attributes["id"] for one in page.all("section")]


def test_tables_say_what_they_are_and_scroll_by_keyboard(page: Node) -> None:
    boxes = [one for one in page.walk() if one.attributes.get("role") == "region"]
    inside = [table for box in boxes for table in box.all("table")]
    assert len(inside) == len(page.all("table"))
    for box in boxes:
        assert box.attributes["tabindex"] == "0"
        assert {"aria-labelledby", "aria-label"} & set(box.attributes)
    for table in page.all("table"):
        (caption,) = table.all("caption")
        assert caption.text
        head, body = table.all("thead")[0], table.all("tbody")[0]
        assert {one.attributes.get("scope") for one in head.all("th")} == {"col"}
        width = len(head.all("th", "td"))
        for row in body.all("tr"):
            cells = row.all("th", "td")
            assert len(cells) == width
            assert [one.tag for one in cells] == ["th"] + ["td"] * (width - 1)
            assert cells[0].attributes["scope"] == "row"


def test_every_figure_is_named_described_and_printed_in_numbers(page: Node) -> None:
    for figure in page.all("figure"):
        (svg,) = [one for one in figure.all("svg") if one.attributes.get("role") == "img"]
        title, desc = (svg.all(tag)[0] for tag in ("title", "desc"))
        names = svg.attributes["aria-labelledby"].split()
        assert names == [title.attributes["id"], desc.attributes["id"]]
        assert len(desc.text) > len(title.text) > 3
        (details,) = figure.all("details")
        assert "open" not in details.attributes
        assert details.children
        assert details.all("table")
        assert details.all("summary")[0].text.startswith("Numbers")


def test_colours_are_those_of_the_page(page: Node) -> None:
    (style,) = page.all("style")
    light, _, rest = style.text.partition("@media screen and (prefers-color-scheme: dark)")
    dark = rest.partition("* {")[0]
    used = set()
    for one in page.walk():
        for value in one.attributes.values():
            assert not [role for role in ROLES if role in value]
            used |= set(re.findall(r"var\((--[\w-]+)\)", value))
    for theme in (light, dark):
        assert used <= set(re.findall(r"(--[\w-]+):", theme))


def test_nothing_that_a_person_names_becomes_a_part_of_the_page() -> None:
    clean, hostile = read(page_of(record_of())), read(page_of(record_of(HOSTILE)))
    assert not hostile.all("script", "img")
    words = " ".join(HOSTILE.split())
    assert hostile.text.count(words) >= 15
    assert "49" not in hostile.all("h1")[0].text
    extra = [one.tag for one in hostile.walk()]
    for one in clean.walk():
        extra.remove(one.tag)
    assert set(extra) <= {"span", "p"}  # words of a command, and the note
    metric = RunHistory.of(log_of(metric=HOSTILE))
    assert not read(page_of(record_of(history=metric))).all("script", "img")


def test_names_that_are_no_text_are_shown_all_the_same() -> None:
    assert "digits? \x00" in page_of(record_of("\udcff \x00"))


def table(page: Node, name: str) -> list[list[str]]:
    return page.by_id(name).cells()


def test_tables_hold_the_numbers_of_the_log() -> None:
    text = log_of(epochs=5, each=4, loss=lambda step: 2.0 / step + 1e-7)
    page = read(page_of(record_of(history=RunHistory.of(text))))
    lines = [json.loads(line) for line in text.splitlines()]
    rows = [line for line in lines if line["kind"] == "epoch"]
    assert table(page, "loss-numbers") == [
        [str(row["epoch"]), f"{row['train_loss']:.5g}", f"{row['test_loss']:.5g}"] for row in rows
    ]
    assert table(page, "metric-numbers") == [
        [str(row["epoch"]), f"{row['train_accuracy']:.5g}", f"{row['test_accuracy']:.5g}"]
        for row in rows
    ]
    steps = [line for line in lines if line["kind"] == "step"]
    assert table(page, "throughput-numbers") == [
        [str(line["step"]), f"{line['images_per_second']:.5g}"] for line in steps
    ]


def test_one_epoch_is_listed_step_by_step() -> None:
    text = log_of(epochs=1, each=7, loss=lambda step: 1.0 / step)
    page = read(page_of(record_of(history=RunHistory.of(text))))
    losses = [f"{1 / step:.5g}" for step in range(1, 8)]
    assert table(page, "loss-numbers") == [[str(i + 1), one] for i, one in enumerate(losses)]
    assert table(page, "epoch-numbers") == [["Loss", "2.5", "2.75"], ["Accuracy", "0.5", "0.375"]]


def test_a_long_run_is_listed_in_few_rows_and_says_so() -> None:
    page = read(page_of(PAGES["long"]))
    assert len(page_of(PAGES["long"])) < 400_000
    rows = table(page, "loss-numbers")
    assert len(rows) <= 60
    assert rows[-1][0] == "90"
    assert "Loss by epoch, one of 2 epochs" in page.text
    assert table(page, "throughput-numbers")[0][0] == "1 to 45"
    assert "median of" in page.text


def test_candidates_are_those_of_the_plan() -> None:
    plan = with_offload(plan_of())
    assert plan.memory is not None
    page = read(page_of(record_of(plan=plan)))
    rows = table(page, "candidates")
    reported = verdicts(plan.memory, 32, offloaded=True)
    assert [(row[0], row[1]) for row in rows] == [
        (str(one.micro_batch), why or "-") for one, why in reported
    ]
    assert [row[3] for row in rows] == [show_bytes(one.peak_bytes) for one, _ in reported]
    assert [row[4] for row in rows] == ["resident"] * 4 + ["offloaded"]
    plain = plan_of()
    assert plain.memory is not None
    shown = read(page_of(record_of(plan=plain)))
    why = [row[1] for row in table(shown, "candidates")]
    lost = [
        *("runner-up: 33 % slower", "chosen: the fastest timed"),
        *("fits, not timed", "does not fit: 5.0 MiB"),
    ]
    assert all(one.startswith(word) for one, word in zip(why, lost, strict=True))
    (pre,) = shown.all("pre")
    assert pre.text == " ".join(str(plain).split())


def test_memory_is_shown_by_owner_against_the_budget() -> None:
    record = record_of()
    page = read(page_of(record))
    assert table(page, "owners") == [
        ["activations", "1.0 MiB", "25.00 %"],
        ["cross-entropy", "1.0 MiB", "25.00 %"],
        ["together", "2.0 MiB", "50.00 %"],
        ["budget", "4.0 MiB", "100.00 %"],
    ]
    assert (
        "Measured peak 1.0 MiB most of the measured steps, in any size; 50.00 % of the prediction"
        in page.text
    )
    step = record.step
    assert step is not None
    rows = table(page, "timeline-numbers")
    few = step.merged(48)
    assert [row[2] for row in rows] == [show_bytes(sum(live)) for live in few.live]
    marked = [row for row in page.by_id("timeline-numbers").all("tr") if row.has("marked")]
    assert [row.all("td")[1].text for row in marked] == [show_bytes(step.peak)]
    over = replace(plan_of(), memory=replace(plan_of().memory, budget=MIB_LESS))  # type: ignore[type-var]
    assert "hold 1.0 KiB more than the budget" in read(page_of(record_of(plan=over))).text


MIB_LESS = (1 << 20) - 1024


def test_convolutions_and_scale_out_are_tables() -> None:
    page = read(page_of(record_of()))
    takes = 0.25 + 0.25 + 0.125 + 0.5
    kernel = ["forward", "64", "3 to 8", "7 x 5", "fft@24 x 2, cross-entropy@16"]
    figures = [seconds(takes), "4.5 s", "1.0 MiB", f"{4.5 / takes:.1f}"]
    assert table(page, "kernels") == [[*kernel, *figures]]
    assert table(page, "scaling-numbers")[1] == ["2", "1.07 s", "1.875", "93.75 %", "1.75"]
    marked = [row for row in page.by_id("scaling-numbers").all("tr") if row.has("marked")]
    assert [row.all("td")[0].text for row in marked] in (["1.07 s"], ["2"])
    for word in ("twice as fast", "up to 3 GPUs", "Assumed: nothing", "3 min", "1.5 s to 2.5 s"):
        assert word in page.text
    without = read(page_of(record_of(plan=plan_of()))).text
    assert "Scale-out" not in without
    assert "A step of the real loop" not in without


def test_the_steps_of_a_run_tell_what_more_gpus_could_bring() -> None:
    """R_O is 1/4: so it is 1.25 / (1/4 + 1/G) times as fast, and never 5 times."""
    history = RunHistory.of(log_of(epochs=4, separate=True))
    page = read(page_of(record_of(history=history, plan=plan_of())))
    rows = table(page, "scaling-numbers")
    gpus = [int(row[0]) for row in rows]
    assert gpus == [1, 2, 3, 4, 6, 8, 12, 16]
    fast = [1.25 / (0.25 + 1 / g) for g in gpus]
    assert [row[2] for row in rows] == [number(one) for one in fast]
    assert [row[3] for row in rows] == [percent(one / g) for one, g in zip(fast, gpus, strict=True)]
    section = page.by_id("scale").text
    for word in ("R_O 0.25", "gets beyond 5 times", "Measured: 15 steps", "Left out: summing grad"):
        assert word in section
    few = {"settings": {"batch_size": 3}}
    short = read(page_of(record_of(history=history, plan=None, config=few)))
    assert [row[0] for row in table(short, "scaling-numbers")] == ["1", "2", "3"]
    single, several = {"settings": {"batch_size": 1}}, {"process": {"ranks": 2}}
    for config in (single, several):
        bare = read(page_of(record_of(history=history, plan=None, config=config)))
        assert "Scale-out" not in bare.text
    foreseen = read(page_of(record_of(history=history)))
    assert table(foreseen, "scaling-numbers")[1] == ["2", "1.07 s", "1.875", "93.75 %", "1.75"]


@given(
    st.lists(
        st.tuples(*[st.floats(0, 1e3) for _ in range(3)], st.one_of(st.none(), st.integers(0, 9))),
        max_size=6,
    )
)
def test_overhead_is_that_of_the_sums(rows: list[tuple[float, float, float, int | None]]) -> None:
    steps = [LoggedStep(i, 1.0, 1.0, row[3], Spent(*row[:3])) for i, row in enumerate(rows)]
    found = Overhead.of(steps)
    counted = [row for row in rows if row[3] is None] or rows[1:]
    waiting, computing, rest = (sum(row[i] for row in counted) for i in range(3))
    if found is None:
        assert computing == 0 or not math.isfinite((waiting + rest) / computing)
        return
    assert found.steps == len(counted)
    assert found.ratio == pytest.approx((waiting + rest) / computing)
    assert found.seconds(1) == pytest.approx((waiting + computing + rest) / len(counted))


def test_a_log_without_such_seconds_or_with_nonsense_tells_nothing() -> None:
    assert Overhead.of(RunHistory.of(log_of()).steps) is None
    log = log_of(epochs=1, separate=True)
    assert (
        Overhead.of(RunHistory.of(log.replace(b'"seconds": ', b'"seconds": 1e999, "was": ')).steps)
        is None
    )
    assert RunHistory.of(
        log.replace(b'"waiting_seconds": ', b'"waiting_seconds": null, "was": ')
    ).broken


@pytest.mark.parametrize(
    ("end", "tone", "words"),
    [
        ({}, "good", "Finished: 12 steps, 3 epochs."),
        ({"interrupted": True, "run_folder": "r"}, "stopped", "Go on with: anybatch train --res"),
        ({"stopped": "no room"}, "bad", "Failed after step 12, 3 whole epochs: no room"),
    ],
)
def test_how_it_ended_is_said(end: dict[str, Any], tone: str, words: str) -> None:
    record = record_of()
    found = parts_of(replace(record, summary={**(record.summary or {}), **end}))
    assert found.tone == tone
    assert words in found.ending
    assert "it was killed" in parts_of(replace(record, summary=None)).ending
    assert parts_of(replace(record, command="plan")).ending == "Planned. Nothing was trained."


def test_broken_lines_are_said() -> None:
    for count, words in ((1, "1 line of metrics"), (2, "2 lines of metrics")):
        history = RunHistory.of(log_of() + b"{\n" * count)
        assert words in " ".join(parts_of(record_of(history=history)).notes)


def test_the_command_is_one_that_can_be_run() -> None:
    reported = {
        "data": "my photos/",
        "batch_size": 7,
        "image_size": [4, 9],
        "seed": 0,
        "flip": False,
    }
    reported |= {"memory": "1MiB", "skip_corrupt": True, "out": None}
    record = RunRecord("train", {"settings": reported, "process": {"ranks": 3}})
    assert record.words == (
        "torchrun --nproc-per-node=3 -m anybatch train --data 'my photos/' --batch-size 7 "
        "--memory 1MiB --image-size 9x4 --no-flip --skip-corrupt"
    )
    assert RunRecord("plan", {"settings": {}}).words == "anybatch plan"


def test_the_same_data_give_the_same_page_under_any_matplotlib_setting() -> None:
    import matplotlib

    first = page_of(record_of())
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.grid": False}):
        assert page_of(record_of()) == first
        assert matplotlib.rcParams["font.size"] == 30


def test_without_matplotlib_the_tables_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = read(page_of(record_of()))
    figures = page.all("figure")
    assert len(figures) == 5
    for figure in figures:
        assert "open" in figure.all("details")[0].attributes
        assert "pip install 'anybatch[report]'" in figure.text
        assert figure.all("table")


def test_a_figure_that_cannot_be_drawn_leaves_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> str:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(drawing, "inlined", broken)
    page = read(page_of(record_of()))
    assert "The figure could not be drawn (ZeroDivisionError: no)." in page.text
    assert len(table(page, "loss-numbers")) == 3


def test_numbers_are_written_for_people() -> None:
    assert [number(one) for one in (0.123456789, 12345.6, 1e-9, float("nan"))] == [
        *("0.12346", "12,346", "1e-09", "not finite")
    ]
    assert percent(0.5) == "50.00 %"
    assert [seconds(one) for one in (0.12345, 59.0, 61, 3661)] == [
        *("0.123 s", "59 s", "1 min 01 s", "1 h 01 min")
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
PARTS = {
    "settings": ("data", "batch_size", "memory", "image_size", "flip", "micro_batch", "seed"),
    "recipe": ("model", "epochs", "lr", "schedule", "loss", "optimizer"),
    "data": ("task", "size", "notes", "train_samples"),
    "process": ("threads", "device", "malloc", "ranks"),
    "versions": ("torch", "system"),
}
END = ("steps", "epochs", "seconds", "resumed", "stopped", "interrupted", "parameters")
CONFIG = {
    part: st.fixed_dictionaries({}, optional=dict.fromkeys(names, JSON)) | JSON
    for part, names in PARTS.items()
}


@given(
    config=st.fixed_dictionaries({}, optional=CONFIG),
    end=st.fixed_dictionaries({}, optional=dict.fromkeys(END, JSON)),
)
def test_any_contents_of_the_files_make_a_page(config: dict[str, Any], end: Any) -> None:
    read(page_of(RunRecord("train", config, end)))
