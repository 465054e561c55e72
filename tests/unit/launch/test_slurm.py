"""What is handed to Slurm, and what is made of its answers. Real jobs are in tests/slurm."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest

from launch import slurm, slurm_step
from launch.jobspec import JobSpec, Wishes, job_spec
from roll_td.config.base import BaseConfig

GOLDEN = Path(__file__).parent / "golden"


def spec(wishes: Wishes | None = None, folder: str = "/s", **given: int) -> JobSpec:
    size = {"num_nodes": 2, "num_gpus_per_node": 4, "num_cpu_ranks_per_node": 1} | given
    config = BaseConfig(exp_name="try", **size)
    return job_spec(config, "a.yaml", ["x=1"], wishes or Wishes(), {}, folder)


@pytest.fixture
def here(tmp_path: Path) -> JobSpec:
    return spec(Wishes(torchrun_restarts=None), str(tmp_path))


def test_the_batch_script_reads_as_it_should() -> None:
    wishes = Wishes(time_min=720, lead_s=300, cpus_per_rank=8, mem_gb=0.5)
    text = slurm.sbatch_text(spec(wishes), "gpu", {"account": "me", "exclusive": ""})
    text = text.replace(sys.executable, "python")
    assert text == (GOLDEN / "slurm.sbatch").read_text()


def test_what_is_not_asked_for_is_left_to_slurm() -> None:
    text = slurm.sbatch_text(spec(Wishes(devices="cpu")), None, {})
    for option in ("time", "partition", "mem", "gpus-per-node", "wckey"):
        assert f"--{option}" not in text
    assert "#SBATCH --signal=USR2@120" in text


def test_an_option_given_by_hand_wins() -> None:
    options = {"signal": "USR2@9", "job-name": "mine", "no-requeue": "", "open-mode": "truncate"}
    text = slurm.sbatch_text(spec(), None, options)
    assert "#SBATCH --signal=USR2@9\n" in text and "#SBATCH --job-name=mine\n" in text
    assert "USR2@120" not in text and "=try\n" not in text
    assert "--no-requeue" in text and "--requeue" not in text
    assert text.index("--open-mode=append") < text.index("--open-mode=truncate")


def test_without_slurm_a_submission_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="there is no sbatch on this machine"):
        slurm.submit(spec(), None, {})


def test_one_step_starts_all_ranks(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_JOB_ID": "7"}
    command = slurm_step.srun_command(spec(Wishes(cpus_per_rank=3)), tmp_path, environ, 12345)
    assert command == [
        "srun",
        "--kill-on-bad-exit=1",
        "--unbuffered",
        "--nodes=2",
        "--ntasks=10",
        "--ntasks-per-node=5",
        "--cpus-per-task=3",
        f"--output={tmp_path}/%t.log",
        *(sys.executable, "-u", "-m", "roll_td", "/s/a.yaml", "x=1"),
    ]
    elastic = spec(Wishes(cpus_per_rank=3, torchrun_restarts=2))
    command = slurm_step.srun_command(elastic, tmp_path, environ, 12345)
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=15"} <= set(command)
    assert {"--rdzv-endpoint=gpu01:12345", "--rdzv-id=7", "--max-restarts=2"} <= set(command)


def test_ranks_are_told_of_notices_and_share_a_secret_of_their_own(tmp_path: Path) -> None:
    environ = {"SLURM_RESTART_COUNT": "2", "ROLL_TD_SECRET": "stale", "HOME": "/h"}
    one = slurm_step.step_environment(spec(), tmp_path, environ)
    two = slurm_step.step_environment(spec(), tmp_path, environ)
    assert one["ROLL_TD_NOTICES"] == "TERM,USR2"
    assert one["ROLL_TD_NOTICE_FILE"] == str(tmp_path / "notice")
    assert (one["ROLL_TD_RESTARTS"], one["HOME"], one["OMP_NUM_THREADS"]) == ("2", "/h", "1")
    assert re.fullmatch("[0-9a-f]{64}", one["ROLL_TD_SECRET"])
    assert one["ROLL_TD_SECRET"] != two["ROLL_TD_SECRET"]


def test_k09_jobs_next_to_each_other_have_other_ports_and_a_busy_one_is_passed_over() -> None:
    first = slurm_step.free_port(1000, {})
    with socket.create_server(("", first)):
        assert first < slurm_step.free_port(1000, {}) < first + slurm_step.PORTS
    assert abs(slurm_step.free_port(1001, {}) - first) >= 20
    assert slurm_step.free_port(1000, {"MASTER_PORT": "7"}) == 7


def test_when_all_ports_are_busy_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_step, "PORTS", 1)
    with (
        socket.create_server(("", slurm_step.free_port(5, {}))),
        pytest.raises(OSError, match=r"ports \d+ to \d+ of .* are all taken; set MASTER_PORT"),
    ):
        slurm_step.free_port(5, {})


DRIVERS = "roll-td: rank 1 died (rank 1 on b)\nTraceback\n  more\nValueError: x\n"
LOST = "step 1/2\nroll-td: the driver (rank 2 on a) died without a word\n"


@pytest.mark.parametrize(
    ("logs", "cause"),
    [
        ({"0": LOST, "2": "step 1/2\n" + DRIVERS, "srun": "srun: error: task 1: Killed"}, DRIVERS),
        ({"0": LOST, "1": "", "srun": ""}, LOST.partition("\n")[2]),
        ({"0": "", "srun": "srun: job 7\nsrun: error: b: tasks 1,3: Killed\nsrun: b: task 0: x\n"},
         "srun: error: b: tasks 1,3: Killed"),
        ({"0": "", "srun": "srun: error: no such node\n"}, "srun: error: no such node"),
        ({"0": "", "srun": ""}, "no rank has said why; see their logs"),
    ],
)  # fmt: skip
def test_the_first_cause_is_shown_whoever_has_said_it(
    logs: dict[str, str], cause: str, tmp_path: Path
) -> None:
    for name, text in logs.items():
        (tmp_path / f"{name}.log").write_text(text)
    assert slurm_step.first_cause(tmp_path) == cause.strip()


def fake_srun(folder: Path, script: str) -> None:
    """Programs that stand for srun and scontrol; what is asked of scontrol is in a file."""
    for name, text in (("srun", script), ("scontrol", f'echo "$@" >>{folder}/asked')):
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("script", "code", "asked"),
    [
        ('echo "TERM USR2" >$ROLL_TD_NOTICE_FILE', 0, "requeue 77\n"),
        ("echo USR2 >$ROLL_TD_NOTICE_FILE", 0, "requeue 77\n"),
        ("echo TERM >$ROLL_TD_NOTICE_FILE", 143, ""),
        ("true", None, ""),
        ("echo USR2 >$ROLL_TD_NOTICE_FILE; exit 9", "exit code 9", ""),
    ],
)
def test_k04_only_usr2_asks_for_a_requeue_and_a_death_wins(
    script: str,
    code: int | str | None,
    asked: str,
    here: JobSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_srun(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    if code is None:
        slurm_step.run_step(here)
    elif isinstance(code, str):
        with pytest.raises(slurm_step.JobFailedError, match=code):
            slurm_step.run_step(here)
    else:
        with pytest.raises(SystemExit) as ended:
            slurm_step.run_step(here)
        assert ended.value.code == code
    file = tmp_path / "asked"
    assert (file.read_text() if file.exists() else "") == asked
    assert (tmp_path / "runs" / "try" / "logs" / "77.1" / "srun.log").exists()


@pytest.mark.parametrize(
    ("squeue", "state"),
    [("echo RUNNING", "RUNNING"), ("exit 1", "COMPLETED"), ("true", "COMPLETED")],
)
def test_k06_the_state_is_squeues_then_that_of_the_records(
    squeue: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("squeue", squeue), ("sacct", "printf 'JobID|State\\n77|COMPLETED\\n'")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert slurm.state(tmp_path, "77") == state
