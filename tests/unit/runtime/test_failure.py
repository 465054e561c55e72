"""How a cause reads, is chosen, told and printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from roll_td.runtime.failure import Cause, write_error_file

HEAD = """
import os, sys, threading, time
from roll_td.runtime import failure
from roll_td.runtime.failure import *
"""


def run(program: str, **pipes: Any) -> tuple[int, str]:
    """Exit code and stderr of a Python process that runs `program`."""
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL} | pipes
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(program)], text=True, timeout=30, **pipes
    )
    return done.returncode, done.stderr


def cause(kind: Any, text: str, **given: Any) -> Cause:
    where = {"role": "", "worker": None, "rank": 3, "host": "vm", "method": "", "time_s": 1.0}
    return Cause(kind=kind, text=text, **(where | given))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            cause("exception", "Traceback\n  x\nKeyError: 1\n", role="a", worker=2, method="f"),
            "roll-td: a.f failed (worker 2 of a, rank 3 on vm): KeyError: 1\n"
            "Traceback\n  x\nKeyError: 1",
        ),
        (
            cause("exception", "Traceback\nKeyError: 1", method="the reader"),
            "roll-td: the reader failed (rank 3 on vm): KeyError: 1\nTraceback\nKeyError: 1",
        ),
        (
            cause("exception", "MemoryError"),
            "roll-td: the runtime failed (rank 3 on vm): MemoryError",
        ),
        (
            cause("driver", "Traceback\nKeyError: 1"),
            "roll-td: the driver failed (rank 3 on vm): KeyError: 1\nTraceback\nKeyError: 1",
        ),
        (
            cause("driver", "Traceback (most recent call last):\n  File 1\nKeyError: 1\n  or 2"),
            "roll-td: the driver failed (rank 3 on vm): KeyError: 1\n"
            "Traceback (most recent call last):\n  File 1\nKeyError: 1\n  or 2",
        ),
        (
            cause("driver", "Traceback\n  File 1\nOSError: 1\nno room: 3 MB are free there"),
            "roll-td: the driver failed (rank 3 on vm): no room: 3 MB are free there\n"
            "Traceback\n  File 1\nOSError: 1\nno room: 3 MB are free there",
        ),
        (cause("death", "rank 3 died"), "roll-td: rank 3 died (rank 3 on vm)"),
        (cause("signal", "told by SIGTERM"), "roll-td: told by SIGTERM (rank 3 on vm)"),
        (cause("exception", ""), "roll-td: the runtime failed (rank 3 on vm): no more is known"),
    ],
)
def test_how_a_cause_reads(given: Cause, text: str) -> None:
    assert given.render() == text


def test_a_cause_of_an_exception_has_its_traceback_and_the_errors_it_came_from() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error
    except ValueError as error:
        text = Cause.of(error, "exception", 1, method="m", host="vm").render()
    assert text.startswith("roll-td: m failed (rank 1 on vm): ValueError: second\nTraceback")
    assert "KeyError: 'first'" in text and "direct cause" in text


# --- the undertaker ----------------------------------------------------------------------------

BURY = """
import pickle
said = []
class Hub:
    def send_now(self, kind, head): said.append((kind.name, pickle.loads(head)))
    def cut(self, own_rank): said.append(("cut", own_rank))
hub = Hub()
undertaker = Undertaker(
    hub, ["vm"] * 3, lambda: said.append("on_end"), lambda: said.append("save"), own_rank=1
)
def cause(kind, rank, time_s, text="it failed", method=""):
    return Cause(kind, "", None, rank, "vm", method, text, time_s)
{causes}
for rank in {gone}:
    undertaker.eof(rank)
began = time.monotonic()
failure.os._exit, leave = (lambda code: (
    os.write(2, f"{{said}} {{time.monotonic() - began:.1f}}\\n".encode()), leave(code))), os._exit
time.sleep(20)
"""


def bury(causes: str, gone: str = "(0, 2)") -> tuple[int, list[str]]:
    """Exit code and stderr's lines of a driver's process whose job has failed."""
    code, err = run(BURY.format(causes=causes, gone=gone))
    return code, err.splitlines()


def seconds_in(line: str) -> float:
    """How long after the failure the process has ended."""
    return float(line.rpartition(" ")[2])


def test_a_failed_job_tells_all_then_saves_then_speaks() -> None:
    code, lines = bury("undertaker.fail(cause('driver', 1, 1.0))")
    text = "roll-td: the driver failed (rank 1 on vm): it failed"
    assert code == 1
    assert lines[0] == text
    assert lines[1].startswith(f"['on_end', ('ABORT', '{text}'), ('cut', 1), 'save'] ")
    assert seconds_in(lines[1]) < 2


@pytest.mark.parametrize(
    ("causes", "code", "first"),
    [
        ("('exception', 0, 2.0), ('exception', 2, 1.0)", 1, "rank 2 on vm"),
        ("('exception', 0, 1.0), ('death', 2, 2.0)", 1, "it failed (rank 2 on vm)"),
        ("('signal', 0, 1.0, 'told', 'SIGTERM'), ('driver', 1, 2.0)", 1, "the driver failed"),
        ("('signal', 0, 2.0, 'told', 'SIGINT'),", 130, "told (rank 0 on vm)"),
    ],
)
def test_the_best_cause_of_the_first_moments_is_chosen(causes: str, code: int, first: str) -> None:
    """A death, else the earliest; a signal only if there is no other."""
    got, lines = bury(f"for args in ({causes}): undertaker.fail(cause(*args))")
    assert got == code
    assert lines[0].startswith("roll-td: ") and first in lines[0]


def test_ranks_that_do_not_end_are_waited_for_two_seconds() -> None:
    _, lines = bury("undertaker.fail(cause('driver', 1, 1.0))", gone="(2,)")
    assert 2 < seconds_in(lines[1]) < 6


def test_saving_may_fail_or_hang() -> None:
    hangs = "undertaker._save = lambda: time.sleep(9)\n"
    code, lines = bury(hangs + "undertaker.fail(cause('driver', 1, 1.0))")
    assert code == 1 and lines[0].startswith("roll-td: the driver failed")
    assert 1 < seconds_in(lines[1]) < 6


def test_an_undertaker_that_fails_ends_the_process_all_the_same() -> None:
    code, lines = bury("hub.cut = None\nundertaker.fail(cause('driver', 1, 1.0))")
    assert code == 1
    assert lines[0].startswith("roll-td: the job failed, and telling why failed too: TypeError")


# --- the last words ----------------------------------------------------------------------------


def test_torchrun_finds_the_cause_and_takes_it_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    for full, text in ((True, "line 1\nline 2"), (False, "line 1")):
        write_error_file("line 1\nline 2", full)
        message = json.loads(path.read_text())["message"]
        assert message["message"] == text
        assert message["extraInfo"]["py_callstack"] == text
        assert 1.5 < time.time() - int(message["extraInfo"]["timestamp"]) < 5
    assert list(tmp_path.iterdir()) == [path]


def test_without_torchrun_no_error_file_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    write_error_file("text", full=True)


def test_an_error_file_that_cannot_be_written_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/full/error.json")
    write_error_file("text", full=True)


def test_what_was_printed_comes_out_and_nothing_runs_at_the_end() -> None:
    code, err = run(
        """
        import atexit
        atexit.register(lambda: os.write(2, b"atexit"))
        sys.stderr = open(2, "w", buffering=10_000, closefd=False)
        sys.stderr.write("buffered")
        end_process(5)
        """
    )
    assert (code, err) == (5, "buffered")


def test_nobody_reads_and_the_process_ends_all_the_same() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writing, True)
    program = """
        sys.stdout = open(1, "w", buffering=10_000, closefd=False)
        print("buffered")
        say("said")
        end_process(4)
        """
    code, _ = run(program, stdout=writing, stderr=writing)
    assert code == 4
    os.close(reading)
    os.close(writing)


def test_all_is_said_to_a_slow_reader_that_made_the_pipe_non_blocking() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    text = "z" * 150_000
    with subprocess.Popen(
        [sys.executable, "-c", HEAD + "say(sys.stdin.read())"],
        stdin=subprocess.PIPE,
        stderr=writing,
        text=True,
    ) as process:
        os.close(writing)
        assert process.stdin is not None
        process.stdin.write(text)
        process.stdin.close()
        with open(reading) as pipe:
            assert pipe.read() == text + "\n"
    assert process.returncode == 0
