"""Jobs in a real Slurm: whatever stops them, they end as if nothing had."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dist.test_sft import result, write_sft
from tests.slurm.cluster import START_S, Job, Slurm

STEPS = 150
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "train.sbatch"
TWO_NODES = ("--nodes", "2", "num_gpus_per_node=1")
pytestmark = pytest.mark.timeout(4 * START_S)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two device ranks; without a notice, the last step alone makes a checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    rest = {"eval_steps": 10_000, "keep_checkpoints": None}
    return write_sft(folder, max_steps=STEPS, save_steps=10_000, **rest)


@pytest.fixture(scope="module")
def whole(slurm: Slurm, config: Path) -> Job:
    """A run that nothing has disturbed."""
    job = slurm.submit(config, "whole", export(config, "whole"))
    job.wait("COMPLETED", "FAILED", "TIMEOUT")
    return job


def export(config: Path, name: str) -> str:
    return f"export_dir={config.parent / name / 'model'}"


def steps_saved(run_dir: Path) -> list[int]:
    names = (path.name[5:] for path in (run_dir / "checkpoints").glob("step_*"))
    return sorted(int(name) for name in names if name.isdigit())  # not what is being written


def test_a_job_is_submitted_waited_for_and_read(slurm: Slurm, whole: Job) -> None:
    assert (whole.show("JobState"), whole.show("ExitCode")) == ("COMPLETED", "0:0")
    folder = whole.run_dir.parent
    status = slurm.roll_td("status", "whole", cwd=folder)
    assert f"job {whole.number} on slurm: COMPLETED" in status and f"step_{STEPS}" in status
    logs = slurm.roll_td("logs", "whole", cwd=folder)
    assert f"step {STEPS - 1}/{STEPS}" in logs
    assert [logs.count(f".0/{rank}.log <==") for rank in range(4)] == [1, 1, 1, 0]
    assert steps_saved(whole.run_dir) == [STEPS]


def test_a_preempted_job_comes_back_and_ends_the_same(
    slurm: Slurm, config: Path, whole: Job
) -> None:
    job = slurm.submit(
        config, "preempted", "--partition", "low", *TWO_NODES, export(config, "preempted")
    )
    job.wait_for("step 5/")
    slurm.run(
        *("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"),
        *("--wrap", "sleep 1"),
        cwd=config.parent,
    )
    job.until(lambda: job.show("Restarts") == "1", "restarted")
    assert "SIGUSR2: the run ends after this step" in job.said()
    job.wait("COMPLETED", "FAILED", "TIMEOUT")
    assert (job.show("JobState"), job.show("Restarts")) == ("COMPLETED", "1")
    stopped, last = steps_saved(job.run_dir)
    assert 5 < stopped < last == STEPS
    assert f"going on from {job.run_dir}/checkpoints/step_{stopped}\n" in job.said(1)
    assert result(job.run_dir) == result(whole.run_dir)


def test_a_job_outlives_two_time_limits_and_is_then_cancelled(slurm: Slurm, config: Path) -> None:
    # the run is endless; its limit is set to one or two minutes ahead, less than its lead
    job = slurm.submit(config, "limited", "--time", "30", "--lead", "115", "max_steps=1000000")
    saved: list[int] = []
    for start in range(2):
        job.wait_for("step ", start)
        hours, minutes, seconds = map(int, job.show("RunTime").split(":"))
        set_limit(job, hours * 60 + minutes + (2 if seconds > 5 else 1))
        job.until(lambda start=start: job.show("Restarts") == str(start + 1), "queued again")
        set_limit(job, 30)
        assert len(steps_saved(job.run_dir)) == start + 1
        saved = steps_saved(job.run_dir)
        job.wait("RUNNING")
    job.wait_for(f"step {saved[-1] + 3}/", 2)
    assert f"going on from {job.run_dir}/checkpoints/step_{saved[-1]}" in job.said(2)
    assert "told to end" in slurm.roll_td("cancel", "limited", cwd=config.parent)
    job.wait("CANCELLED")
    job.until(lambda: not job.processes(), "gone", 15)
    assert len(steps_saved(job.run_dir)) == 3, "a cancelled job has time for a checkpoint"
    assert "stopped by SIGTERM after" in job.said(2)


def set_limit(job: Job, minutes: int) -> None:
    job.slurm.run(
        "scontrol", "update", f"jobid={job.number}", f"timelimit={minutes}", cwd=Path("/")
    )


def test_of_two_jobs_on_a_node_one_loses_a_rank_and_the_other_does_not_notice(
    slurm: Slurm, config: Path, whole: Job
) -> None:
    on = ("--option", "nodelist=node001")
    killed = slurm.submit(config, "killed", *on, "max_steps=1000000")
    other = slurm.submit(config, "other", *on, export(config, "other"))
    for job in (killed, other):
        job.wait_for("step 1/")
    assert not set(killed.processes()) & set(other.processes())
    killed.kill_rank(1)
    taken_s = killed.until(lambda: not killed.processes(), "gone", 15)
    assert taken_s < 5
    killed.wait("FAILED")
    assert killed.show("ExitCode") == "1:0"
    said = killed.script_said()
    assert "srun ended with exit code" in said
    assert "died without a word" in said and "(rank 1 on node001)" in said
    other.wait("COMPLETED", "FAILED", "TIMEOUT")
    assert other.show("JobState") == "COMPLETED"
    assert result(other.run_dir) == result(whole.run_dir)


def test_torchrun_starts_a_killed_rank_again(slurm: Slurm, config: Path, whole: Job) -> None:
    job = slurm.submit(
        config, "elastic", "--torchrun", "1", *TWO_NODES, "save_steps=20", export(config, "elastic")
    )
    job.wait_for("step 21/")
    job.kill_rank(2, "RANK")
    job.wait("COMPLETED", "FAILED", "TIMEOUT")
    assert job.show("JobState") == "COMPLETED", job.said()
    assert "going on from" in job.said()
    assert result(job.run_dir)[0] == result(whole.run_dir)[0]


def test_the_script_for_hands_is_told_and_comes_back(
    slurm: Slurm, config: Path, whole: Job
) -> None:
    folder = config.parent
    given = [config.name, "exp_name=hand", export(config, "hand")]
    number = slurm.run("sbatch", "--parsable", SCRIPT, *given, cwd=folder).strip()
    job, out = Job(slurm, number, folder / "hand"), folder / f"slurm-{number}.out"
    job.until(lambda: out.exists() and "step 5/" in out.read_text(), "at step 5")
    slurm.run("scancel", "--signal=USR2", number, cwd=folder)
    job.until(lambda: job.show("Restarts") == "1", "restarted")
    job.wait("COMPLETED", "FAILED", "TIMEOUT")
    assert job.show("JobState") == "COMPLETED", out.read_text()
    assert "stopped by USR2 after a checkpoint; queued again" in out.read_text()
    assert len(steps_saved(job.run_dir)) == 2
    assert result(job.run_dir) == result(whole.run_dir)

    slurm.run("scontrol", "requeue", number, cwd=folder)
    job.until(lambda: job.show("Restarts") == "2", "restarted")
    job.wait("COMPLETED", "FAILED", "TIMEOUT")
    assert job.show("JobState") == "COMPLETED", "it has nothing left to do"
    assert f"has done {STEPS} steps and is to do {STEPS}: nothing to do" in out.read_text()


def test_torchx_starts_a_job_that_the_administrator_queues_again(
    slurm: Slurm, config: Path, whole: Job
) -> None:
    folder, component = config.parent, f"{ROOT}/launch/torchx_component.py:train"
    given = ["--config", config.name, "--devices", "cpu", "--image", str(folder)]
    options = ("run", "-s", "slurm", "-cfg", f"partition=low,time=30,job_dir={folder}/torchx")
    rest = ("exp_name=x", "save_steps=20", export(config, "x"))
    # when it has submitted the job it asks sacct, and this cluster keeps no accounts
    out = slurm.run("torchx", *options, component, *given, *rest, cwd=folder, ok=False)
    number = re.findall(r"^slurm://\S*/(\d+)$", out, re.MULTILINE)[0]
    job = Job(slurm, number, folder / "x")
    job.until(lambda: bool(steps_saved(job.run_dir)), "a checkpoint")
    slurm.run("scontrol", "requeue", number, cwd=folder)
    job.until(lambda: job.show("Restarts") == "1", "queued again")
    job.wait("COMPLETED", "FAILED", "TIMEOUT")
    assert job.show("JobState") == "COMPLETED"
    assert result(job.run_dir)[0] == result(whole.run_dir)[0]


def test_what_the_cluster_cannot_run_is_refused(slurm: Slurm, config: Path) -> None:
    command = ["submit", config.name, "--to", "slurm", "exp_name=refused"]
    nine = ["--devices", "cpu", "--nodes", "9", "num_gpus_per_node=1"]
    out = slurm.roll_td(*command, *nine, cwd=config.parent, ok=False)
    assert "roll-td submit: Slurm refuses 9 nodes of 2 ranks, 0 GPUs: " in out
    out = slurm.roll_td(*command, cwd=config.parent, ok=False)
    assert "Slurm refuses 1 nodes of 3 ranks, 2 GPUs: " in out
    assert not (config.parent / "refused").exists()


def test_a_run_has_one_job(slurm: Slurm, config: Path) -> None:
    job = slurm.submit(config, "twice", "max_steps=1000000")
    again = ["submit", config.name, "--to", "slurm", "--devices", "cpu", "exp_name=twice"]
    out = slurm.roll_td(*again, cwd=config.parent, ok=False)
    assert f"twice has a job already: {job.number} on slurm is " in out
    slurm.roll_td("cancel", "twice", cwd=config.parent)
    job.wait("CANCELLED")
    job.until(lambda: not job.processes(), "gone", 60)
