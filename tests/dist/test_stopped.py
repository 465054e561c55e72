"""A rank that does nothing for longer than the node timeout is not lost: its kernel answers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.dist.test_sft import START_S, start, write_sft

STOPPED_S = 9


@pytest.mark.timeout(3 * START_S)
@pytest.mark.parametrize("rank", [1, 2], ids=["worker", "driver"])
def test_a_rank_that_was_stopped_goes_on(rank: int, tmp_path: Path) -> None:
    config = write_sft(tmp_path, max_steps=60, node_timeout_s=5)
    job = start(config, "stopped")  # 60 steps: it is stopped in the middle
    job.wait_for("step 3/", START_S)
    (pid,) = [pid for pid in job.processes() if f"RANK={rank}" in environment(pid)]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(pid, signal.SIGCONT)
    ended = job.finish(START_S)
    assert ended.code == 0, ended.out
    assert "step 59/60" in ended.out


def environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")
