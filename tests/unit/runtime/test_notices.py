"""Notices, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from roll_td.runtime.notices import declared_notices, leave_notices

HEAD = """
import os, signal, subprocess, sys, threading, time
from roll_td.runtime.notices import *
env = {"ROLL_TD_NOTICES": "TERM,USR2", "ROLL_TD_NOTICE_FILE": "f"}
told = []
def wait(count):
    deadline = time.monotonic() + 10
    while len(told) < count and time.monotonic() < deadline:
        time.sleep(0.01)
"""


def run(program: str) -> tuple[int, str]:
    text = HEAD + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, timeout=40
    )
    return done.returncode, done.stdout


def test_notices_before_and_after_the_start_are_told_and_end_nobody() -> None:
    assert run(
        """
        hold_notices(env)
        child = subprocess.Popen(["sleep", "60"])
        for pid in (os.getpid(), child.pid):
            os.kill(pid, signal.SIGUSR2)
        await_notices(env, told.append)
        wait(1)
        for pid in (os.getpid(), child.pid):
            os.kill(pid, signal.SIGTERM)
        wait(2)
        os.kill(os.getpid(), signal.SIGUSR2)
        wait(3)
        print([n.name for n in told], child.poll())
        child.kill()
        """
    ) == (0, "['SIGUSR2', 'SIGTERM', 'SIGUSR2'] None\n")


def test_a_launcher_that_ignores_them_keeps_none_from_its_ranks() -> None:
    assert run(
        """
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # as torchrun's shell does
        hold_notices(env)
        os.kill(os.getpid(), signal.SIGUSR2)
        await_notices(env, told.append)
        wait(1)
        print([n.name for n in told])
        """
    ) == (0, "['SIGUSR2']\n")


def test_they_are_told_beside_the_signals_that_end_a_job() -> None:
    assert run(
        """
        from roll_td.runtime.process import pass_signals_on
        ends = []
        hold_notices(env)
        pass_signals_on(ends.append)
        await_notices(env, told.append)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        wait(1)
        time.sleep(0.2)
        print([n.name for n in told], [n.name for n in ends])
        """
    ) == (0, "['SIGTERM'] ['SIGINT']\n")


def test_where_none_is_declared_signals_do_what_they_did() -> None:
    code, _ = run(
        """
        hold_notices({})
        await_notices({}, told.append)
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(5)
        """
    )
    assert code == -signal.SIGUSR2


def test_what_is_declared_is_checked() -> None:
    declared = declared_notices({"ROLL_TD_NOTICES": "TERM,USR2", "ROLL_TD_NOTICE_FILE": "f"})
    assert declared == {signal.SIGTERM, signal.SIGUSR2}
    assert declared_notices({}) == frozenset()
    with pytest.raises(ValueError, match=r"ROLL_TD_NOTICES=TERM,USR9: \['USR9'\] are no signals"):
        declared_notices({"ROLL_TD_NOTICES": "TERM,USR9", "ROLL_TD_NOTICE_FILE": "f"})
    with pytest.raises(ValueError, match="ROLL_TD_NOTICE_FILE is not set"):
        declared_notices({"ROLL_TD_NOTICES": "TERM"})


def test_notices_are_left_in_order(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    leave_notices({"ROLL_TD_NOTICE_FILE": str(path)}, [signal.SIGTERM, signal.SIGUSR2])
    assert path.read_text() == "TERM USR2\n"
    assert list(tmp_path.iterdir()) == [path]
