"""Jobs that fail: each ends within END_S, with an exit code other than 0, the first cause is the
last thing it prints, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.dist.harness import END_S, Job, role, roll_td_run, torchrun, write_config

WORKER = "failing.FailingWorker"
CAUSES = {
    "raise": ("a.fail_on failed (worker 1 of a", "ValueError: seven is not a vegetable"),
    "kill": ("a.fail_on", "died without a word"),
    "exit": ("a.fail_on failed", "SystemExit: 3"),
    "lock": ("a.fail_on failed", "['bad']"),
    "nested": ("a.fail_on failed", "['first'][1]['second']"),
    "hog": ("a.fail_while_others_hold_the_gil failed", "ValueError: seven is not a vegetable"),
    "request": ("a.wrong_request failed (worker 1 of a", "ValueError: a leek in the request"),
    "closed_peer": ("a.die_soon", "died without a word"),
    "driver": ("the driver failed", "KeyError: 'no such vegetable'"),
    "driver_kill": ("the driver (rank 2", "died without a word"),
    "driver_kill_while_sending": ("the driver (rank 2", "died without a word"),
    "uneven": ("a.uneven", "don't fit together"),
    "missing": ("dubble", "did you mean double"),
    "argument": ("a.total", "['lock']"),
    "full_disk": ("the driver failed", "OSError: [Errno 27] File too large"),
    "full_disk_for_the_trace": ("the driver failed", "OSError: [Errno 27] File too large"),
}


def fails(folder: Path, how: str, worker_cls: str = WORKER, **config: object) -> Path:
    a = role(device_mapping=[0, 1], worker_cls=worker_cls)
    return write_config(folder, "failing.Fails", a=a, how=how, **config)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", list(CAUSES))
def test_the_first_failure_ends_the_job_and_is_its_last_word(how: str, tmp_path: Path) -> None:
    job = roll_td_run(fails(tmp_path, how))
    job.wait_for("READY")
    ready = time.monotonic()
    ended = job.finish()
    assert time.monotonic() - ready < END_S
    assert ended.code == 1
    assert "A CALL RETURNED" not in ended.out
    where, what = CAUSES[how]
    assert where in ended.cause and what in ended.cause, ended.out


@pytest.mark.timeout(90)
def test_a_worker_that_cannot_be_made_ends_the_job(tmp_path: Path) -> None:
    config = fails(tmp_path, "raise", "failing.FailsInInit")
    job = torchrun(config, 2)  # the driver shares rank 0
    job.wait_for("STARTED")
    ended = job.finish()
    assert ended.code == 1
    assert ended.cause.startswith("roll-td: a.__init__ failed (worker ")
    assert "ValueError: no worker grows here" in ended.cause


@pytest.mark.timeout(90)
def test_a_worker_that_cannot_be_initialized_ends_the_job(tmp_path: Path) -> None:
    job = torchrun(fails(tmp_path, "raise", "failing.FailsInInitialize"), 2)
    job.wait_for("STARTED")
    ended = job.finish()
    assert ended.code == 1
    assert ended.cause.startswith("roll-td: a.initialize failed (worker 1 of a, rank 1 on ")
    assert "ValueError: no model grows here" in ended.cause


@pytest.mark.timeout(90)
def test_what_nobody_has_checked_is_refused_by_the_driver(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = torchrun(fails(tmp_path, "raise"), 2, f"output_dir={tmp_path}/file").finish(40)
    assert ended.code == 1
    assert "STARTED" not in ended.out
    assert f"{tmp_path}/file is no folder; name a folder of yours" in ended.cause


@pytest.mark.timeout(90)
def test_a_rank_that_cannot_load_the_users_code_keeps_the_job_from_starting(tmp_path: Path) -> None:
    job = torchrun(fails(tmp_path, "raise"), 3, RAISE_AT_IMPORT_ON="1")
    ended = job.finish(40)
    assert ended.code == 1
    assert "STARTED" not in ended.out
    assert "job.yaml failed (rank 1 on " in ended.cause.splitlines()[0]
    assert "RuntimeError: turnips are out" in ended.cause


@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job(number: signal.Signals, tmp_path: Path) -> None:
    """As a terminal or a scheduler sends it, to a call that would never return."""
    job = roll_td_run(fails(tmp_path, "nap"))
    job.wait_for("READY")
    os.killpg(job.process.pid, number)
    ended = job.finish()
    assert ended.code == 128 + number
    assert f"the job was told to end by {number.name}" in ended.cause


@pytest.mark.timeout(90)
def test_torchruns_agent_passes_a_signal_on(tmp_path: Path) -> None:
    job = torchrun(fails(tmp_path, "nap"), 3)
    job.wait_for("READY")
    job.process.terminate()
    ended = job.finish()
    assert ended.code == 1
    assert "roll-td: the job was told to end by SIGTERM" in ended.out


@pytest.mark.timeout(90)
def test_a_launcher_that_is_killed_takes_its_ranks_along(tmp_path: Path) -> None:
    job = torchrun(fails(tmp_path, "nap"), 3)
    job.wait_for("READY")
    job.process.kill()
    assert job.finish().code == -signal.SIGKILL


@pytest.mark.timeout(90)
def test_what_a_failed_job_has_done_is_in_its_trace(tmp_path: Path) -> None:
    job = torchrun(fails(tmp_path, "uneven"), 2)
    job.wait_for("READY")
    job.finish()
    (trace,) = (tmp_path / "runs" / "job" / "trace").iterdir()
    names = {event["name"] for event in json.loads(trace.read_text())}
    assert {"a.initialize", "a.pids", "a.uneven"} <= names


@pytest.mark.timeout(60)
def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ended = Job(["-m", "roll_td", str(fails(tmp_path, "raise"))], **place).finish(30)
    assert ended.code == 1
    assert f"MASTER_PORT={port}: another program of this machine" in ended.cause
