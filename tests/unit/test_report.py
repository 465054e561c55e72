"""The page about a run: what it shows is what the run wrote."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_td.cli import main
from roll_td.report.charts import Bar, line_chart, number, stacked_bars, ticks, timeline
from roll_td.report.page import _time, _unit, read_run, write_report
from roll_td.report.spans import Step, in_steps, read_starts, stages, steps_of, total, union
from roll_td.runtime.trace import TraceWriter
from roll_td.trackers import JsonlTracker

CONFIG = """pipeline_cls: my.Pipeline
max_steps: 4
model: {path: a <b>odd</b> name}
train: {name: null, worker_cls: my.Trainer, device_mapping: [0, 1], world_size: 2}
rewards:
  maths: {name: judge, worker_cls: my.Judge, device_mapping: null, world_size: 3}
"""
BEGAN = 1_800_000_000.0
Log = Callable[[dict[str, float], int, float], None]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Log metrics of a step at a number of seconds after BEGAN."""
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")

    def write(values: dict[str, float], step: int, at_s: float) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: BEGAN + at_s)
            tracker.log(values, step)

    (tmp_path / "config.yaml").write_text(CONFIG)
    yield write
    tracker.close()


def trace(
    run: Path, at_s: float, calls: Sequence[tuple[str, dict[int, tuple[float, float]]]]
) -> Path:
    """A trace file begun at a time, of calls: name, rank → (begin, end); times after BEGAN."""
    path = run / "trace" / f"{BEGAN + at_s:.3f}.json"
    writer = TraceWriter(path, BEGAN + at_s)
    for rank in (0, 1, 2):
        writer.process(rank, f"rank {rank} on vm")
    for call, (name, spans) in enumerate(calls):
        begun = min(begin for begin, _ in spans.values())
        runs = [(r, (BEGAN + b, BEGAN + b, BEGAN + b, BEGAN + e)) for r, (b, e) in spans.items()]
        writer.call(name, name.split(".")[0], call, 2, BEGAN + begun, BEGAN + begun + 1, runs)
    writer.close()
    return path


def page(run: Path) -> str:
    return write_report(run).read_text(encoding="utf-8")


def row(text: str, first: str) -> list[str]:
    """The cells of the table row that begins with a text."""
    for line in re.findall(r"<tr>(.*?)</tr>", text):
        cells = [re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", line)]
        if cells and cells[0] == first:
            return cells
    raise AssertionError(f"no row {first!r}")


def shapes(svg: str, tag: str) -> list[dict[str, str]]:
    """Attributes, and the title under the pointer, of the elements of a chart."""
    found = []
    for element in ElementTree.fromstring(svg).iter(tag):
        found.append({**element.attrib, "title": element.findtext("title") or ""})
    return found


def test_numbers_of_a_run(tmp_path: Path, log: Log) -> None:
    log({"val/score": 0.25}, 0, 1)
    for step, loss in enumerate([4.0, 3.0, math.nan, 1.5]):
        log({"actor/loss": loss, "time/step_s": 0.5 + step, "kept": 3.0}, step, 2 + step)
    log({"val/score": 0.75}, 4, 6)
    text = page(tmp_path)
    assert "4 of 4 steps" in text
    assert row(text, "val/score")[1:] == ["0.25 (step 0)", "0.75 (step 4)", "0.25", "0.75"]
    assert row(text, "actor/loss")[1:] == ["4 (step 0)", "1.5 (step 3)", "1.5", "4"]
    assert text.index("<b>val/score</b>") < text.index("<b>actor/loss</b>")
    assert text.index("<b>actor/loss</b>") < text.index("Further metrics")
    assert text.index("Further metrics") < text.index("<b>time/step_s</b>")
    assert "1 of 4 not finite" in text
    assert "The same in all steps: kept 3." in text and "<b>kept</b>" not in text


def test_a_step_logged_again_has_its_last_value(tmp_path: Path, log: Log) -> None:
    log({"loss": 9.0}, 0, 1)
    log({"loss": 8.0}, 1, 2)
    log({"loss": 5.0}, 1, 3)
    assert row(page(tmp_path), "loss")[2] == "5 (step 1)"


def test_what_ran(tmp_path: Path, log: Log) -> None:
    text = page(tmp_path)
    assert row(text, "model.path")[1] == "a &lt;b&gt;odd&lt;/b&gt; name"
    assert row(text, "train")[1:] == ["Trainer", "devices 0, 1", ""]
    assert row(text, "judge")[1:] == ["Judge", "CPU workers: 3", ""]
    assert "path: a &lt;b&gt;odd" in text.partition("<pre>")[2]


def test_time_per_stage(tmp_path: Path, log: Log) -> None:
    log({"loss": 1.0}, 0, 4)
    log({"loss": 1.0}, 1, 10)
    calls = [
        ("train.step", {0: (2, 4), 1: (2, 3.5)}),
        ("train.step", {0: (6, 8), 1: (5, 7)}),
        ("judge.score", {2: (7, 10)}),
    ]
    trace(tmp_path, 0, calls)
    text = page(tmp_path)
    assert row(text, "train.step")[2:] == ["50.0%", "5 s", "2", "2.5 s"]
    assert row(text, "judge.score")[2:] == ["30.0%", "3 s", "1", "3 s"]
    assert row(text, "no command running")[2:] == ["30.0%", "3 s", "", ""]  # 0 to 2, 4 to 5
    bars = {shape["title"] for shape in shapes(charts(text)[-2], "rect")}
    assert bars == {
        "step 1: train.step 3 seconds",
        "step 1: judge.score 3 seconds",
        "step 1: no command running 1 seconds",
    }
    spans = [shape["title"] for shape in shapes(charts(text)[-1], "rect")]
    assert sorted(spans) == [
        "judge.score, rank 2: 3 s",
        "train.step, rank 0: 2 s",
        "train.step, rank 1: 2 s",
    ]


def test_a_timeline_is_cut_to_its_steps(tmp_path: Path, log: Log) -> None:
    log({"<loss>": 1.0}, 0, 4)
    log({"<loss>": 1.0}, 1, 8)
    trace(tmp_path, 0, [("train.step", {0: (3, 6), 1: (6, 9)})])
    text = page(tmp_path)
    first, second = shapes(charts(text)[-1], "rect")
    assert (first["x"], first["width"]) == ("150.0", "437.5")
    assert (second["x"], second["width"]) == ("588.0", "437.5")
    assert "<loss>" not in text


def charts(text: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", text)


def test_more_stages_than_colours_share_the_last_row(tmp_path: Path, log: Log) -> None:
    calls = [(f"role.m{i:02}", {0: (i, i + 0.9 - i / 100)}) for i in range(12)]
    trace(tmp_path, 0, calls)
    text = page(tmp_path)
    assert row(text, "other commands")[3:5] == [_time(0.81 + 0.80 + 0.79), "3"]
    assert "role.m09" not in text


def test_a_resumed_run(tmp_path: Path, log: Log) -> None:
    """A step that was undone counts to no step; nor does a start, or what an older run left."""
    log({"loss": 1.0}, 0, 12)
    log({"loss": 1.0}, 1, 13)
    log({"loss": 1.0}, 2, 26)
    log({"loss": 1.0}, 3, 28)
    trace(tmp_path, 0, [("train.old", {0: (1, 2)})])
    trace(tmp_path, 10, [("train.step", {0: (12, 13)}), ("train.step", {0: (13, 14)})])
    trace(tmp_path, 20, [("train.step", {0: (25, 26)}), ("train.step", {0: (26.5, 28)})])
    run = read_run(tmp_path)
    assert run.steps == [
        Step(1, BEGAN + 12, BEGAN + 13),
        Step(3, BEGAN + 26, BEGAN + 28),
    ]
    assert {name: len(calls) for name, calls in stages(run.starts).items()} == {"train.step": 4}
    text = page(tmp_path)
    assert "2 starts" in text and "after 12 s" in text
    assert row(text, "train.step")[2:5] == ["37.5%", "4.5 s", "4"]


def test_a_run_that_goes_on(tmp_path: Path, log: Log) -> None:
    """Its last lines may be torn, and its trace has no end yet."""
    log({"loss": 1.0}, 0, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "ti')
    path = trace(tmp_path, 0, [("train.step", {0: (0, 1)}), ("train.step", {0: (1, 2)})])
    whole = path.read_text()
    path.write_text(whole[: whole.rindex('"args"')])
    text = page(tmp_path)
    assert "1 of 4 steps" in text
    assert row(text, "train.step")[4] == "1"


def test_a_run_that_has_not_logged_yet(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    text = page(tmp_path)
    assert "0 of 4 steps" in text and "no metrics yet" in text and "no trace" in text


def test_a_run_without_trace(tmp_path: Path, log: Log) -> None:
    log({"loss": 1.0}, 0, 1)
    assert "no trace" in page(tmp_path)


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"has no config\.yaml: give the directory of a run"):
        write_report(tmp_path)
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "none is not there" in capsys.readouterr().err


def test_the_command_says_where_the_page_is(
    tmp_path: Path, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_the_page_needs_nothing_else(tmp_path: Path, log: Log) -> None:
    log({"loss": 1.0}, 0, 1)
    trace(tmp_path, 0, [("train.step", {0: (0, 1)})])
    text = page(tmp_path)
    assert re.findall(r"(?:src|href|url)\W*(\w+:[^\"')]*)", text) == ["https://ui.perfetto.dev"]
    assert "<script" not in text and "@import" not in text


def test_it_imports_no_torch() -> None:
    code = "import sys, roll_td.report.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0


def test_union_and_seconds_in_steps() -> None:
    times = [(4.0, 6.0), (0.0, 2.0), (1.0, 3.0), (5.0, 5.5)]
    assert union(times) == [(0.0, 3.0), (4.0, 6.0)] and total(union(times)) == 5.0
    steps = [Step(7, 1.0, 2.5), Step(8, 2.5, 4.5), Step(9, 5.0, 9.0)]
    assert in_steps(times, steps) == [1.5, 1.0, 1.0]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8),
    st.lists(st.integers(0, 60), min_size=2, max_size=6, unique=True),
)
def test_seconds_in_steps_are_those_counted_one_by_one(
    spans: list[tuple[int, int]], edges: list[int]
) -> None:
    edges.sort()
    steps = [Step(i, *ends) for i, ends in enumerate(pairwise(edges))]
    busy = {second for begin, length in spans for second in range(begin, begin + length)}
    wanted = [len(busy & set(range(int(s.begin_s), int(s.end_s)))) for s in steps]
    assert in_steps([(b, b + length) for b, length in spans], steps) == wanted


def test_steps_need_a_start() -> None:
    assert steps_of([(0, 1.0), (1, 2.0)], []) == []


def test_ranks_have_the_names_of_the_trace(tmp_path: Path) -> None:
    trace(tmp_path, 0, [("train.step", {0: (0, 1)})])
    (start,) = read_starts(tmp_path / "trace")
    assert start.ranks == {0: "rank 0 on vm", 1: "rank 1 on vm", 2: "rank 2 on vm"}


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    high = low + width
    found = ticks(low, high)
    assert 2 <= len(found) <= 6
    assert low - width * 1e-6 <= found[0] and found[-1] <= high + width * 1e-6
    assert re.fullmatch(r"[125]0*", f"{found[1] - found[0]:.0e}".partition("e")[0])


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.35667, "0.3567"), (28_345, "28.3k"), (1.5e-5, "1.5e-05"), (2e9, "2G"), (-3e6, "-3M"),
     (9_999, "9999"), (math.nan, "not finite")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (4.2, "4.2 s"), (200, "3 min 20 s"), (7_500, "2 h 5 min")],
)
def test_times_are_for_people(seconds: float, text: str) -> None:
    assert _time(seconds) == text


@pytest.mark.parametrize(
    ("key", "unit"),
    [
        ("time/step_s", "seconds"),
        ("time/tokens_per_s", "tokens per second"),
        ("w/mb_per_s", "MB per second"),
        ("rows_per_s", "rows per second"),
        ("a/peak_gb", "GB"),
        ("response/length_max", "tokens"),
        ("loss", ""),
    ],
)
def test_units_come_from_names(key: str, unit: str) -> None:
    assert _unit(key) == unit


def test_a_line_goes_through_its_points_with_gaps() -> None:
    svg = line_chart([(0, 0.0), (10, 1.0), (20, math.nan), (30, 0.5)], (0, 40), "")
    first, last = shapes(svg, "polyline")
    # 274 pixels from x = 48 on are 40 steps, 120 pixels up from y = 138 are the value 1
    assert first["points"] == "48.0,138.0 116.5,18.0" and last["points"] == "253.5,78.0"
    titles = [shape["title"] for shape in shapes(svg, "circle") if shape["title"]]
    assert titles == ["step 0: 0", "step 10: 1", "step 30: 0.5"]


def test_a_long_line_is_means_in_a_band() -> None:
    points = [(float(step), float(step % 2)) for step in range(200)]
    (line,), (band,) = (
        shapes(line_chart(points, (0, 199), ""), t) for t in ("polyline", "polygon")
    )
    means = {y for _, y in (point.split(",") for point in line["points"].split())}
    edges = {y for _, y in (point.split(",") for point in band["points"].split())}
    assert means == {"78.0"} and edges == {"18.0", "138.0"}
    assert len(line["points"].split()) == 100


def test_a_line_without_a_finite_value_is_empty() -> None:
    assert shapes(line_chart([(0, math.nan)], (0, 0), ""), "polyline") == []


def test_bars_stand_on_each_other_and_share_where_there_are_many() -> None:
    svg = stacked_bars([(1, [1.0, 3.0]), (2, [2.0, 0.0])], [("a", "red"), ("b", "blue")], "seconds")
    # 170 pixels are 4 seconds
    heights = {shape["title"]: float(shape["height"]) for shape in shapes(svg, "rect")}
    assert heights == pytest.approx(
        {
            "step 1: a 1 seconds": 42.5,
            "step 1: b 3 seconds": 127.5,
            "step 2: a 2 seconds": 85,
            "step 2: b 0 seconds": 0,
        },
        abs=0.1,
    )
    tops = {shape["title"][8:9]: float(shape["y"]) for shape in shapes(svg, "rect")[:2]}
    assert tops == {"a": 145.5, "b": 18.0}
    many = stacked_bars([(i, [float(i % 3)]) for i in range(360)], [("a", "red")], "seconds")
    assert {shape["height"] for shape in shapes(many, "rect")} == {"170.0"}
    assert shapes(many, "rect")[0]["title"] == "mean of steps 0 to 2: a 1 seconds"


def test_a_timeline_has_its_bars_in_place() -> None:
    bars = [Bar(0.0, 0.5, "red", "a & b"), Bar(0.75, 1.0, "blue", "c")]
    svg = timeline([("rank 0", bars)], [(0.5, "step 3")], 1.0, "seconds")
    left, right = shapes(svg, "rect")
    # 876 pixels from x = 150 on are 1 second; bars end half a pixel early, to be told apart
    assert (left["x"], left["width"], left["title"]) == ("150.0", "437.5", "a & b")
    assert (right["x"], right["width"]) == ("807.0", "218.5")
    assert [s["x1"] for s in shapes(svg, "line") if s["class"] == "mark"] == ["588.0"]
