"""Slurm through submitit, whose only importer this is: one submission for the whole job."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor, SlurmJob

from launch.jobspec import JobSpec
from launch.slurm_step import run_step


class _Executor(SlurmExecutor):
    """submitit's, for machines without Slurm too: there a script can be printed."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def sbatch_text(spec: JobSpec, partition: str | None, options: Mapping[str, str]) -> str:
    """The batch script of a job. `options` are sbatch's own, without the dashes."""
    # the hook that submitit has its plug-ins define; there is no other way to see the text
    executor = _executor(spec, partition, options)
    return executor._make_submission_file_text(executor._submitit_command_str, uid="")


def submit(spec: JobSpec, partition: str | None, options: Mapping[str, str]) -> str:
    """Queue a job; its number. Raises ValueError if this cluster can't run it."""
    if shutil.which("sbatch") is None:
        raise ValueError("there is no sbatch on this machine; submit from a login node of Slurm")
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as script:
        script.write(sbatch_text(spec, partition, options))
        script.flush()
        tried = subprocess.run(
            ["sbatch", "--test-only", script.name], capture_output=True, text=True
        )
    if tried.returncode != 0:
        asked = f"{spec.nodes} nodes of {spec.ranks_per_node} ranks, {spec.gpus_per_node} GPUs"
        raise ValueError(
            f"Slurm refuses {asked}: {tried.stderr.strip()}; `sinfo -o '%P %D %c %m %G %l'` "
            "shows what there is"
        )
    return str(_executor(spec, partition, options).submit(run_step, spec).job_id)


def state(run_dir: Path, job: str) -> str:
    """What Slurm calls the state of the job; UNKNOWN once it has forgotten it."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    queued = subprocess.run(command, capture_output=True, text=True)
    if queued.returncode == 0 and queued.stdout.strip():
        return queued.stdout.strip()
    return str(_job(run_dir, job).get_info().get("State", "UNKNOWN"))  # from sacct


def cancel(run_dir: Path, job: str) -> None:
    """End the job."""
    _job(run_dir, job).cancel()


def _job(run_dir: Path, job: str) -> SlurmJob[None]:
    return SlurmJob(folder=run_dir / "logs", job_id=job)


def _executor(spec: JobSpec, partition: str | None, options: Mapping[str, str]) -> SlurmExecutor:
    executor = _Executor(folder=Path(spec.run_dir) / "logs")
    executor.update_parameters(
        job_name=spec.name,
        nodes=spec.nodes,
        ntasks_per_node=spec.ranks_per_node,
        cpus_per_task=spec.cpus_per_rank,
        gpus_per_node=spec.gpus_per_node or None,
        mem=None if spec.mem_gb is None else f"{int(spec.mem_gb * 1024)}MB",
        time=spec.time_min,  # None leaves it to Slurm: submitit would set 5 minutes
        partition=partition,
        signal_delay_s=spec.lead_s,
        wckey=None,
        stderr_to_stdout=True,
        use_srun=False,  # the script starts the step itself, and outlives it
        additional_parameters=_own(spec, options),
    )
    return executor


def _own(spec: JobSpec, options: Mapping[str, str]) -> dict[str, Any]:
    """What sbatch is given that submitit has no name for; `options` win. Of two that differ in a
    - and a _ the script has the latter last, so that it holds."""
    given = {key.replace("-", "_"): value or True for key, value in options.items()}
    requeue = {} if "no_requeue" in given else {"requeue": True}
    return requeue | {"chdir": spec.folder} | given
