"""The launcher of one machine: what it says, hands on, and ends. Whole jobs are in tests/dist."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from launch import local


def failure(exitcode: int, timestamp: int = 5, message: Any = "text of torch's own") -> Any:
    name = signal.Signals(-exitcode).name if exitcode < 0 else "<N/A>"
    return SimpleNamespace(
        exitcode=exitcode, timestamp=timestamp, message=message, signal_name=lambda: name
    )


@pytest.mark.parametrize(
    ("failures", "words"),
    [
        ({0: failure(3)}, "rank 0 was ended by exit code 3"),
        ({1: failure(-9)}, "rank 1 was ended by signal 9 (SIGKILL)"),
        ({0: failure(1, 6), 1: failure(2, 5)}, "rank 1 was ended by exit code 2"),
        ({0: failure(1), 1: failure(-11)}, "rank 1 was ended by signal 11 (SIGSEGV)"),
        ({0: failure(-15), 1: failure(1)}, "rank 1 was ended by exit code 1"),
        ({0: failure(-15), 2: failure(-9)}, "rank 2 was ended by signal 9 (SIGKILL)"),
        ({2: failure(1), 1: failure(1)}, "rank 1 was ended by exit code 1"),
    ],
)
def test_the_last_words_are_about_the_rank_that_ended_first(
    failures: dict[int, Any], words: str
) -> None:
    assert local._last_words(failures) == f"roll-td: {words}"


def test_only_a_rank_that_left_its_cause_has_told() -> None:
    assert local._told(failure(1, message={"message": "why"}))
    assert not local._told(failure(-9))


def test_ranks_share_the_cores_and_the_users_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(13)))
    for name in ("OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    with local._environment(4):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["THP_MEM_ALLOC_ENABLE"]) == ("3", "1")
    assert not {"OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE"} & os.environ.keys()
    with local._environment(99):
        assert os.environ["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with local._environment(4):
        assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_each_job_has_a_secret_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLL_TD_SECRET", raising=False)
    found = []
    for _ in range(2):
        with local._environment(2):
            found.append(os.environ["ROLL_TD_SECRET"])
    assert found[0] != found[1] and len(found[0]) == 64
    assert "ROLL_TD_SECRET" not in os.environ


def test_signals_are_raised_once_and_their_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with local._signals_raised() as handled:
        assert signal.SIGTERM in handled and signal.SIGINT in handled
        with pytest.raises(local._SignalledError) as raised:
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # impatience must not break the tidying up
    assert raised.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_hangup_that_nohup_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with local._signals_raised() as handled:
            assert signal.SIGHUP not in handled
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_a_run_has_left_is_ended_and_nothing_else() -> None:
    def sleeper(run_id: str, ignoring: bool) -> subprocess.Popen[str]:
        ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if ignoring else ""
        program = f"import signal, time; {ignore} print('up', flush=True); time.sleep(60)"
        env = os.environ | {"TORCHELASTIC_RUN_ID": run_id}
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        process.stdout.readline()
        return process

    mine, stubborn, other = sleeper("a1", False), sleeper("a1", True), sleeper("a11", False)
    with mine, stubborn, other:
        assert sorted(local._of_run("a1")) == sorted([mine.pid, stubborn.pid])
        began = time.monotonic()
        local._end_left_over("a1")
        assert time.monotonic() - began < 3
        assert (mine.wait(5), stubborn.wait(5)) == (-signal.SIGTERM, -signal.SIGKILL)
        assert other.poll() is None
        other.kill()


def test_a_signal_before_any_rank_has_started_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launch(*_: Any) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        return 0

    monkeypatch.setattr(local, "_launch", launch)
    assert local.run_local("job.yaml", [], 2) == 128 + signal.SIGINT
