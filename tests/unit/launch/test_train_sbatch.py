"""slurm/train.sbatch with programs that stand for Slurm's. Real jobs are in tests/slurm."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "slurm"
SCRIPT = SCRIPTS / "train.sbatch"
JOB = 321
PORT = 10000 + 31 * JOB % 20000


def run(folder: Path, srun: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script with an srun that does `srun`; what it calls lies in folder/calls."""
    for name, text in (
        ("srun", f'echo "srun $*" >>calls; env | grep -E "^(MASTER|ROLL_TD)" >env; {srun}'),
        ("scontrol", 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$*" >>calls; fi'),
    ):
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    path = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": str(JOB)}
    given = path | {"SLURM_JOB_NODELIST": "n[1-2]"} | env
    return subprocess.run(
        [SCRIPT, *args], cwd=folder, env=given, capture_output=True, text=True, timeout=30
    )


def environment(folder: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / "env").read_text().splitlines())


def test_scripts_are_clean() -> None:
    tests = Path(__file__).parents[2] / "slurm"
    scripts = [*SCRIPTS.iterdir(), *tests.glob("*.sh"), tests / "install"]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_one_step_gets_the_arguments_and_what_ranks_need(tmp_path: Path) -> None:
    given = {"SLURM_CPUS_PER_TASK": "4", "SLURM_RESTART_COUNT": "2"}
    done = run(tmp_path, "true", "a.yaml", "x=a b", **given)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text() == (
        "srun --kill-on-bad-exit=1 --cpus-per-task=4 --unbuffered --label "
        "python -u -m roll_td a.yaml x=a b\n"
    )
    env = environment(tmp_path)
    assert re.fullmatch("[0-9a-f]{64}", env.pop("ROLL_TD_SECRET"))
    assert env == {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(PORT),
        "ROLL_TD_NOTICES": "TERM,USR2",
        "ROLL_TD_NOTICE_FILE": f"{tmp_path}/slurm-{JOB}.notice",
        "ROLL_TD_RESTARTS": "2",
    }


def test_a_busy_port_is_passed_over_and_the_users_stays(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", PORT)):
        run(tmp_path, "true", "a.yaml")
    assert environment(tmp_path)["MASTER_PORT"] == str(PORT + 1)
    run(tmp_path, "true", "a.yaml", MASTER_PORT="5", MASTER_ADDR="me")
    assert environment(tmp_path) | {"MASTER_PORT": "5", "MASTER_ADDR": "me"} == environment(
        tmp_path
    )


@pytest.mark.parametrize(
    ("srun", "code", "requeued"),
    [
        ("echo TERM USR2 >$ROLL_TD_NOTICE_FILE", 0, True),
        ("echo TERM >$ROLL_TD_NOTICE_FILE", 143, False),
        ("echo USR2 >$ROLL_TD_NOTICE_FILE; exit 9", 9, False),
        ("exit 7", 7, False),
    ],
)
def test_k04_only_usr2_asks_for_a_requeue_and_a_death_wins(
    srun: str, code: int, requeued: bool, tmp_path: Path
) -> None:
    (tmp_path / f"slurm-{JOB}.notice").write_text("USR2\n")  # of an earlier start
    done = run(tmp_path, srun, "a.yaml")
    assert done.returncode == code, done.stderr
    assert (f"requeue {JOB}\n" in (tmp_path / "calls").read_text()) is requeued


def test_without_a_config_it_says_how_it_is_called(tmp_path: Path) -> None:
    done = run(tmp_path, "true")
    assert done.returncode == 2 and "usage: sbatch slurm/train.sbatch CONFIG" in done.stderr
    assert not (tmp_path / "calls").exists()
