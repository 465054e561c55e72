"""A real job through TorchX's scheduler of this machine: ended by it, it goes on where it was."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.dist.harness import Job
from tests.dist.test_sft import START_S, write_sft

pytest.importorskip("torchx")


def submit(config: Path) -> Job:
    program = "import sys; from roll_td.cli import main; sys.exit(main())"
    given = ["--to", "torchx:local_cwd", "--devices", "cpu", "exp_name=ended"]
    return Job(["-W", "ignore", "-c", program, "submit", str(config), *given])


def wait_for(job: Job, folder: Path, text: str) -> str:
    """Wait until a log that TorchX writes has a text: all that its logs have."""
    deadline = time.monotonic() + START_S
    while True:
        said = "".join(path.read_text() for path in folder.glob("logs/**/combined.log"))
        if text in said:
            return said
        assert time.monotonic() < deadline and job.process.poll() is None, job.out + said
        time.sleep(0.2)


@pytest.mark.timeout(3 * START_S)
def test_a_job_that_torchx_ends_makes_a_checkpoint_first(tmp_path: Path) -> None:
    rest = {"eval_steps": 10**6, "keep_checkpoints": None}
    config = write_sft(tmp_path, max_steps=10**6, save_steps=10**6, **rest)
    job = submit(config)
    wait_for(job, tmp_path / "ended", "step 5/")
    job.process.send_signal(signal.SIGTERM)  # TorchX's scheduler ends its replicas by SIGTERM
    assert job.finish(START_S).code != 0
    said = wait_for(submit(config), tmp_path / "ended", "going on from")
    assert "SIGTERM: the run ends after this step, with a checkpoint" in said
    (saved,) = (tmp_path / "ended" / "checkpoints").glob("step_*")
    assert int(saved.name[5:]) > 5 and f"{saved}\n" in said
