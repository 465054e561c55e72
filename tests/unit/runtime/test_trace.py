"""TraceWriter: valid when closed, readable when not."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from roll_td.runtime import trace
from roll_td.runtime.trace import COLOURS, TraceWriter, colour_name


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def call(writer: TraceWriter, number: int, start_s: float, end_s: float, **runs: float) -> None:
    each = [
        (int(rank[1:]), (start_s, start_s + 0.25, start_s + 0.5, s)) for rank, s in runs.items()
    ]
    writer.call("actor.generate", "actor", number, 9, start_s, end_s, each)


def test_a_closed_trace_is_a_json_array_of_the_events(tmp_path: Path) -> None:
    path = tmp_path / "trace" / "rank0.json"
    writer = TraceWriter(path, base_s=100.0)
    writer.process(0, "rank 0")
    writer.thread(0, 1, "actor")
    call(writer, 7, 100.0, 102.0, r0=101.0)
    writer.close()
    writer.close()
    process, thread, begin, end, span = events_of(path)
    assert process == {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}}
    assert (thread["name"], thread["tid"], thread["args"]) == ("thread_name", 1, {"name": "actor"})
    for event, phase, ts in ((begin, "b", 0), (end, "e", 2e6)):
        assert (event["ph"], event["ts"], event["id"], event["pid"]) == (phase, ts, 7, 9)
    assert (span["ph"], span["ts"], span["dur"], span["pid"]) == ("X", 250_000.0, 750_000.0, 0)
    assert span["args"] == {"command": 7, "queued_s": 0.25, "data_s": 0.25}
    assert span["cname"] == begin["cname"] == colour_name("actor")


def test_a_clock_set_back_gives_length_0(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json")
    call(writer, 1, 2.0, 1.0, r0=1.0)
    writer.close()
    begin, end, span = events_of(tmp_path / "trace.json")
    assert (begin["ts"], end["ts"], span["dur"]) == (2e6, 2e6, 0)


def test_an_empty_trace_and_events_after_close(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json")
    writer.close()
    writer.process(0, "late")
    assert events_of(tmp_path / "trace.json") == []


def test_a_trace_left_open_is_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "FLUSH_S", 0.01)
    path = tmp_path / "trace.json"
    writer = TraceWriter(path)
    writer.process(0, "rank 0")
    writer.process(1, "rank 1")
    while path.read_text().count("rank") < 2:
        time.sleep(0.01)
    assert [e["pid"] for e in json.loads(path.read_text() + "]")] == [0, 1]
    writer.close()


def test_writes_are_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "FLUSH_S", 1e6)
    path = tmp_path / "trace.json"
    writer = TraceWriter(path)
    writer.process(0, "rank 0")
    assert path.read_text() == "[\n"
    writer.close()
    assert len(events_of(path)) == 1


def test_a_full_disk_is_told_to_whoever_traces_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "FLUSH_S", 0.01)
    writer = TraceWriter(tmp_path / "trace.json")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._file.fileno())
    os.close(full)
    with pytest.raises(OSError, match="No space left"):
        while True:
            writer.process(0, "rank 0")
            time.sleep(0.01)
    with pytest.raises(OSError, match="No space left"):
        writer.close()


def test_threads_do_not_mix_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "FLUSH_S", 0.001)
    writer = TraceWriter(tmp_path / "trace.json")

    def work(thread: int) -> None:
        for number in range(50):
            call(writer, 100 * thread + number, 0.0, 1.0)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    events = events_of(tmp_path / "trace.json")
    assert len(events) == 400
    for begin, end in zip(events[::2], events[1::2], strict=True):
        assert (begin["ph"], end["ph"]) == ("b", "e")
        assert begin["id"] == end["id"]


def test_colours_are_stable_and_known() -> None:
    assert colour_name("actor_train") in COLOURS
    code = "from roll_td.runtime.trace import colour_name; print(colour_name('actor_train'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == colour_name("actor_train")
