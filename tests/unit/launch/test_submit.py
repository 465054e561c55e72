"""`roll-td submit`, `status`, `logs` and `cancel`, as far as they need no scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch import slurm, torchx_component
from launch.submit import minutes
from roll_td.cli import main

SFT = Path(__file__).parents[3] / "configs" / "sft" / "tiny.yaml"
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # TorchX's own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SFT.parents[2])  # where the paths of the config lead from


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("90:00", 90),
        ("0:30", 1),
        ("12:00:00", 720),
        ("1-0", 1440),
        ("1-2:30", 1590),
        ("2-01:00:01", 2941),
    ],
)
def test_time_limits_are_read_as_slurm_does(text: str, expected: int) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-5"])
def test_another_time_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--time {text}: must be D-HH:MM:SS"):
        minutes(text)


def submit(*args: str) -> int:
    return main(["submit", str(SFT), *args])


def test_a_dry_run_prints_the_script_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"output_dir={tmp_path}"
    given = ["--to", "slurm", "--partition", "gpu", "--time", "1-0", "--dry-run", "seed=3", run]
    assert submit(*given, "--option", "account=me", "exp_name=x") == 0
    text = capsys.readouterr().out
    for line in ("partition=gpu", "time=1440", "account=me", "ntasks-per-node=3", "job-name=x"):
        assert f"#SBATCH --{line}\n" in text
    assert f"#SBATCH --output={tmp_path}/x/logs/%j_0_log.out\n" in text
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_for_kubernetes_asks_for_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--to", "torchx:kubernetes", "--dry-run", "--option", "queue=q"]
    assert submit(*given) == 1
    assert "roll-td submit: --to torchx:kubernetes runs an image" in capsys.readouterr().err
    assert submit(*given, "--option", "image=mine", "seed=8") == 0
    out = capsys.readouterr().out
    assert "image: mine" in out and "seed=8" in out


def test_what_an_image_may_have_is_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    only_there = ["data.train=/nowhere/a.jsonl", "output_dir=/proc/version/x"]
    assert submit("--to", "slurm", "--dry-run", *only_there) == 1
    text = capsys.readouterr().err
    assert "data.train='/nowhere/a.jsonl': there is no such file" in text
    assert "output_dir='/proc/version/x/tiny': /proc/version is no folder" in text
    given = ["--to", "torchx:kubernetes", "--dry-run", "--option", "queue=q"]
    assert submit(*given, "--option", "image=mine", *only_there) == 0
    text = capsys.readouterr().err
    assert text.count("warning: ") == text.count("(or have it there)") == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--to", "pbs"], "--to pbs: must be slurm, or torchx:SCHEDULER"),
        (["--to", "torchx:lsf", "--partition", "a"], "--partition and --time are Slurm's"),
        (["--to", "slurm", "--env", "A"], "--env A: must be NAME=VALUE"),
        (["--to", "slurm", "--time", "soon"], "--time soon: must be D-HH:MM:SS"),
        (["--to", "slurm", "--time", "2"], "--time is 2 min: not longer than --lead"),
        (["--to", "slurm", "resume=none"], "would begin at step 0 each time"),
        (["--to", "slurm", "actor_train.device_mapping=0-9", "num_gpus_per_node=2"], "1 problem"),
    ],
)
def test_what_cannot_be_submitted_is_refused(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(*args, "--dry-run") == 1
    assert words in capsys.readouterr().err


def test_an_option_nobody_knows_is_no_override(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        submit("--to", "slurm", "--dry-run", "--partitoin=gpu")
    assert ended.value.code == 2
    assert "unrecognized arguments: --partitoin=gpu" in capsys.readouterr().err


class Backend:
    """Stands for the module of a scheduler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: str):
        self.cancelled: list[str] = []
        self.submitted: list[Any] = []
        monkeypatch.setattr(slurm, "state", lambda run_dir, job: state)
        monkeypatch.setattr(slurm, "cancel", lambda run_dir, job: self.cancelled.append(job))
        monkeypatch.setattr(slurm, "submit", self.submit)

    def submit(self, *given: Any) -> str:
        self.submitted.append(given)
        return "42"


def test_a_run_remembers_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = Backend(monkeypatch, "RUNNING")
    given = ["--to", "slurm", f"output_dir={tmp_path}", "exp_name=x"]
    assert submit(*given, "--nodes", "2", "num_gpus_per_node=1") == 0
    run_dir = tmp_path / "x"
    assert capsys.readouterr().out == f"job 42 on slurm\nroll-td status {run_dir}\n"
    ((spec, partition, options),) = backend.submitted
    assert (spec.nodes, spec.ranks_per_node, partition, options) == (2, 2, None, {})
    assert json.loads((run_dir / "job.json").read_text()) == {"to": "slurm", "job": "42"}

    assert submit(*given) == 1, "two jobs in one run directory"
    assert "x has a job already: 42 on slurm is RUNNING" in capsys.readouterr().err
    for step in (9, 10):
        (run_dir / "checkpoints" / f"step_{step}").mkdir(parents=True)
    assert main(["status", str(run_dir)]) == 0
    status = capsys.readouterr().out
    assert status == (
        f"job 42 on slurm: RUNNING\nnewest checkpoint: {run_dir}/checkpoints/step_10\n"
    )
    assert main(["cancel", str(run_dir)]) == 0
    assert backend.cancelled == ["42"]
    Backend(monkeypatch, "CANCELLED")
    assert submit(*given) == 0, "one that has ended is in nobody's way"


def test_a_job_that_no_folder_here_can_remember_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torchx_component, "submit", lambda *given: "kubernetes://torchx/q:job")
    (tmp_path / "file").write_text("")
    given = ["--to", "torchx:kubernetes", "--option", "queue=q", "--option", "image=mine"]
    assert submit(*given, f"output_dir={tmp_path}/file") == 1
    out, err = capsys.readouterr()
    assert out == "job kubernetes://torchx/q:job on torchx:kubernetes\n"
    assert "job kubernetes://torchx/q:job is submitted, but `roll-td status`" in err


def test_logs_are_those_of_the_script_and_of_the_last_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text('{"to": "slurm", "job": "42"}')
    for start in (9, 10):
        folder = tmp_path / "logs" / f"42.{start}"
        folder.mkdir(parents=True)
        for rank in (2, 10):
            (folder / f"{rank}.log").write_text(f"rank {rank} of start {start}\n")
    (tmp_path / "logs" / "42_0_log.out").write_text("script\n")
    (tmp_path / "logs" / "41_0_log.out").write_text("another job\n")
    assert main(["logs", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("==>")]
    assert lines == ["script", "rank 2 of start 10", "rank 10 of start 10"]


def test_a_folder_without_a_job_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("status", "logs", "cancel"):
        assert main([command, str(tmp_path)]) == 1
        assert f"roll-td {command}: {tmp_path}: no job was submitted" in capsys.readouterr().err
