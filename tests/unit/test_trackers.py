"""Trackers: nothing is dropped, the step is the caller's."""

import io
import json
import math
from pathlib import Path

import pytest

from roll_td.metrics import Mean
from roll_td.trackers import JsonlTracker, TerminalTracker, read_metrics


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_l01_older_and_repeated_steps_are_kept_and_the_last_value_wins(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log({"train": 1.0}, 5)
    tracker.log({"val": 2.0}, 5)
    tracker.log({"train": 3.0}, 6)
    tracker.close()
    resumed = JsonlTracker(path)
    resumed.log({"train": 4.0}, 5)
    resumed.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 5, 6, 5]
    assert read_metrics(path) == {("train", 5): 4.0, ("val", 5): 2.0, ("train", 6): 3.0}


def test_each_line_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log({"loss": Mean(0.5, 3)}, 1)
    assert read_metrics(path) == {("loss", 1): 0.5}
    tracker.close()


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0, "loss": 1.0}\n{"step": 2, "ti')
    tracker = JsonlTracker(path)
    tracker.log({"loss": 3.0}, 3)
    tracker.close()
    assert read_metrics(path) == {("loss", 1): 1.0, ("loss", 3): 3.0}


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log({"a": math.nan, "b": math.inf, "c": 1.0}, 1)
    tracker.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert (record["a"], record["b"], record["c"]) == (None, None, 1.0)
    assert math.isnan(read_metrics(path)["a", 1])


def test_reserved_names_and_no_numbers_are_errors(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"\['step'\]"):
        tracker.log({"step": 1.0}, 1)
    with pytest.raises(TypeError, match="'name'"):
        tracker.log({"name": "x"}, 1)  # type: ignore[dict-item]
    tracker.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == {}


def test_terminal_tracker_writes_a_line_a_step_to_a_file() -> None:
    stream = io.StringIO()
    tracker = TerminalTracker(stream, total_steps=10)
    tracker.log({"loss": 0.123456}, 1)
    tracker.log({"loss": 2}, 2)
    tracker.close()
    assert stream.getvalue() == "step 1/10  loss 0.1235\nstep 2/10  loss 2\n"


def test_terminal_tracker_redraws_one_line_on_a_terminal() -> None:
    stream = Terminal()
    tracker = TerminalTracker(stream)
    tracker.log({"loss": 1.0}, 1)
    tracker.log({"loss": 0.5}, 2)
    tracker.close()
    assert stream.getvalue() == "\rstep 1  loss 1\x1b[K\rstep 2  loss 0.5\x1b[K\n"
