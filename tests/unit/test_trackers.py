"""Trackers: nothing is dropped, the step is the caller's."""

import io
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from roll_td.config.trackers import TensorBoardConfig, TrackersConfig
from roll_td.metrics import Mean
from roll_td.trackers import JsonlTracker, Start, TerminalTracker, open_trackers, read_metrics


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
    for step in ("1", 1.5, None):
        with pytest.raises(TypeError, match="integer"):
            tracker.log({"x": 1.0}, step)  # type: ignore[arg-type]
    assert read_metrics(tmp_path / "metrics.jsonl") == {}
    tracker.log({"x": 1.0}, np.int64(3))  # type: ignore[arg-type]
    tracker.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == {("x", 3): 1.0}


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


def test_l01_what_was_logged_after_a_position_is_undone_on_resuming(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log({"train": 1.0}, 0)
    position = tracker.position()
    tracker.log({"train": 2.0, "old": 2.0}, 1)
    tracker.log({"val": 3.0}, 0)
    tracker.close()
    resumed = JsonlTracker(tmp_path / "metrics.jsonl", position)
    resumed.log({"train": 5.0}, 1)
    resumed.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [(json.loads(x)["step"], json.loads(x)["train"]) for x in lines] == [(0, 1.0), (1, 5.0)]


def test_metrics_that_are_shorter_than_the_position_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "time": 0, "x": 1.0}\n')
    JsonlTracker(path, 10_000).close()
    assert "33 bytes where the checkpoint knows of 10000" in caplog.text
    assert read_metrics(path) == {("x", 0): 1.0}


def test_a_start_anew_sets_earlier_metrics_aside(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        trackers = open_trackers(TrackersConfig(), Start(tmp_path, "run", {}))
        assert list(trackers) == ["jsonl", "terminal"]
        trackers["jsonl"].log({"x": value}, 0)
        trackers["jsonl"].close()
    assert read_metrics(tmp_path / "metrics.jsonl") == {("x", 0): 2.0}
    (aside,) = tmp_path.glob("metrics-*.jsonl")
    assert read_metrics(aside) == {("x", 0): 1.0}


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = TrackersConfig(tensorboard=TensorBoardConfig())
    trackers = open_trackers(settings, Start(tmp_path, "run", {}))
    positions = {}
    for step in range(5):
        for tracker in trackers.values():
            tracker.log({"loss": Mean(step, 2)}, step)
        if step == 2:
            positions = {name: tracker.position() for name, tracker in trackers.items()}
    for tracker in trackers.values():
        tracker.close()
    start = Start(tmp_path, "run", {}, 3, json.loads(json.dumps(positions)))
    trackers = open_trackers(settings, start)
    for step in range(3, 6):
        for tracker in trackers.values():
            tracker.log({"loss": 10.0 * step}, step)
    for tracker in trackers.values():
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    want = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == want
    assert read_metrics(tmp_path / "metrics.jsonl") == {("loss", s): v for s, v in want}


WANDB = """
import json, sys
from pathlib import Path
from roll_td.config.masking import masked
from roll_td.config.trackers import TrackersConfig, WandbConfig
from roll_td.trackers import Start, open_trackers

folder = Path(sys.argv[1])
settings = TrackersConfig(wandb=WandbConfig("project", mode="offline"))
shown = masked({"tracker_kwargs": {"api_key": "S3CRET"}, "url": "https://u:S3CRET@h/x"})
positions = {}
for first, last, saved in ((0, 4, 2), (2, 5, None)):
    start = Start(folder, "run", shown, first, positions or None)
    trackers = open_trackers(settings, start)
    for step in range(first, last):
        for tracker in trackers.values():
            tracker.log({"loss": float(step)}, step)
            tracker.log({"val": float(-step)}, 0)
        if step + 1 == saved:
            positions = {name: tracker.position() for name, tracker in trackers.items()}
    for tracker in trackers.values():
        tracker.close()
"""


@pytest.mark.timeout(120)
def test_wandb_offline_has_the_whole_run_after_a_resume(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WANDB, str(tmp_path)], check=True, timeout=100)
    (first, second) = sorted(tmp_path.rglob("*.wandb"), key=lambda path: path.stat().st_mtime)
    assert first.name == second.name, "one run, one id"
    pairs = [p for s in range(4) for p in ((s, {"loss": float(s)}), (0, {"val": float(-s)}))]
    assert _wandb_rows(first) == list(enumerate(pairs))
    pairs = [p for s in range(5) for p in ((s, {"loss": float(s)}), (0, {"val": float(-s)}))]
    assert _wandb_rows(second) == list(enumerate(pairs))
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"S3CRET" not in path.read_bytes()


def _wandb_rows(path: Path) -> list[tuple[int, tuple[int, dict[str, float]]]]:
    """Each row of an offline file: wandb's step, ours, and the metrics."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in _leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if not record.HasField("history"):
            continue
        items = {(i.key or ".".join(i.nested_key)): i.value_json for i in record.history.item}
        numbers = {k: json.loads(v) for k, v in items.items() if not k.startswith("_")}
        step = int(numbers.pop("global_step"))
        rows.append((record.history.step.num, (step, numbers)))
    return rows


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: blocks of 32 KiB, of pieces with a checksum (4), a length (2)
    and a type (1): whole, first, middle, last. wandb begins it with 7 bytes of its own."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""
