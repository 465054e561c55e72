"""Notices of a launcher, in real jobs: a checkpoint at the next step, then the end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.dist.harness import Job, roll_td_run
from tests.dist.test_sft import START_S, kill_rank, result, write_sft

STEPS = 60


def start(config: Path, name: str, notice: Path) -> Job:
    return roll_td_run(
        config,
        f"exp_name={name}",
        f"export_dir={config.parent / name / 'model'}",
        ROLL_TD_NOTICES="TERM,USR2",
        ROLL_TD_NOTICE_FILE=str(notice),
    )


def tell_all(job: Job, number: signal.Signals) -> None:
    """Signal every process of the job but the launcher, as Slurm does."""
    for pid in job.processes():
        if pid != job.process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@pytest.mark.timeout(6 * START_S)
def test_k04_a_noticed_run_saves_ends_and_resumes_exactly(tmp_path: Path) -> None:  # K04
    config = write_sft(tmp_path, max_steps=STEPS, save_steps=1000, eval_steps=7)
    notice = tmp_path / "notice"
    assert start(config, "whole", notice).finish(START_S).code == 0
    assert not notice.exists()

    # mid-step, and twice
    job = start(config, "told", notice)
    job.wait_for("step 5/", START_S)
    tell_all(job, signal.SIGTERM)
    time.sleep(0.01)
    for _ in range(2):
        tell_all(job, signal.SIGUSR2)
    ended = job.finish(START_S)
    assert ended.code == 0, ended.out
    assert notice.read_text().split()[0] == "TERM"
    (saved,) = (tmp_path / "told" / "checkpoints").iterdir()
    assert 5 < int(saved.name[5:]) < STEPS
    assert ended.out.count("SIGTERM: the run ends after this step") == 1
    notice.unlink()

    # as soon as the ranks are there, before they have joined: it waits, and nothing is lost
    job = start(config, "told", notice)
    job.wait_for("going on from", START_S)
    tell_all(job, signal.SIGUSR2)
    assert job.finish(START_S).code == 0
    assert notice.read_text() == "USR2\n"
    notice.unlink()

    # a death wins
    job = start(config, "told", notice)
    job.wait_for("going on from", START_S)
    kill_rank(job, 1)
    tell_all(job, signal.SIGUSR2)
    ended = job.finish(START_S)
    assert ended.code == 1 and "rank 1" in ended.cause
    assert not notice.exists()

    assert start(config, "told", notice).finish(START_S).code == 0
    assert result(tmp_path / "told") == result(tmp_path / "whole")
