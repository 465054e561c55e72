"""TraceWriter: valid when closed, readable when not."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from roll_td.runtime import trace
from roll_td.runtime.trace import COLOURS, TraceWriter, colour_name


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def test_a_closed_trace_is_a_json_array_of_the_events(tmp_path: Path) -> None:
    path = tmp_path / "trace" / "rank0.json"
    writer = TraceWriter(path, base_s=100.0)
    writer.process(0, "rank 0")
    writer.thread(0, 1, "actor")
    writer.span("generate", "run", 0, 1, 100.5, 101.0, "actor", {"rows": 4})
    writer.close()
    writer.close()
    process, thread, span = events_of(path)
    assert process == {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}}
    assert (thread["name"], thread["tid"], thread["args"]) == ("thread_name", 1, {"name": "actor"})
    assert (span["ph"], span["ts"], span["dur"]) == ("X", 500_000.0, 500_000.0)
    assert (span["cat"], span["args"]) == ("run", {"rows": 4})
    assert span["cname"] == colour_name("actor")


def test_overlapping_calls_are_pairs_told_apart_by_id(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    writer = TraceWriter(path)
    writer.async_span("a", "call", 0, 0, 1, 0.0, 2.0, "actor")
    writer.async_span("b", "call", 0, 0, 2, 1.0, 3.0, "critic")
    writer.close()
    seen = [(e["ph"], e["name"], e["id"], e["ts"]) for e in events_of(path)]
    assert seen == [("b", "a", 1, 0), ("e", "a", 1, 2e6), ("b", "b", 2, 1e6), ("e", "b", 2, 3e6)]


def test_a_clock_set_back_gives_length_0(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json")
    writer.span("a", "run", 0, 0, 2.0, 1.0, "actor")
    writer.close()
    assert events_of(tmp_path / "trace.json")[0]["dur"] == 0


def test_an_empty_trace_and_events_after_close(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json")
    writer.close()
    writer.process(0, "late")
    assert events_of(tmp_path / "trace.json") == []


def test_a_trace_left_open_is_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "FLUSH_SECONDS", 0.0)
    path = tmp_path / "trace.json"
    writer = TraceWriter(path)
    writer.process(0, "rank 0")
    writer.process(1, "rank 1")
    assert [e["pid"] for e in json.loads(path.read_text() + "]")] == [0, 1]
    writer.close()


def test_writes_are_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "FLUSH_SECONDS", 1e9)
    path = tmp_path / "trace.json"
    writer = TraceWriter(path)
    writer.process(0, "rank 0")
    assert path.read_text() == "[\n"
    writer.close()
    assert len(events_of(path)) == 1


def test_threads_do_not_mix_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "FLUSH_SECONDS", 0.0)
    writer = TraceWriter(tmp_path / "trace.json")

    def work(tid: int) -> None:
        for call in range(50):
            writer.async_span("a", "call", 0, tid, call, 0.0, 1.0, "actor")

    threads = [threading.Thread(target=work, args=(tid,)) for tid in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    events = events_of(tmp_path / "trace.json")
    assert len(events) == 400
    for begin, end in zip(events[::2], events[1::2], strict=True):
        assert (begin["ph"], end["ph"]) == ("b", "e")
        assert (begin["tid"], begin["id"]) == (end["tid"], end["id"])


def test_colours_are_stable_and_known() -> None:
    assert colour_name("actor_train") in COLOURS
    code = "from roll_td.runtime.trace import colour_name; print(colour_name('actor_train'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == colour_name("actor_train")
