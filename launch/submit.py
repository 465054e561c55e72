"""`roll-td submit`, `status`, `logs` and `cancel`: jobs that a scheduler runs.

A run directory remembers its last submission in job.json; each backend is one module.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.jobspec import Wishes, job_spec
from roll_td.config.load import load

RECORD = "job.json"
"""In a run directory: where its last job runs."""


@dataclass(frozen=True)
class Target:
    """Where a job goes: `slurm`, or `torchx:` and the name of a scheduler of TorchX."""

    to: str
    partition: str | None = None
    """Slurm's; of the others none has it."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The scheduler's own: of sbatch, or of TorchX's scheduler."""


def submit_with(
    config: str,
    overrides: Sequence[str],
    to: str,
    dry_run: bool,
    partition: str | None,
    time: str | None,
    env: Sequence[str],
    options: Sequence[str],
    **wishes: Any,
) -> None:
    """`submit` with the options of the command line; those that are None have their defaults."""
    if to != "slurm" and not to.startswith("torchx:"):
        raise ValueError(f"--to {to}: must be slurm, or torchx:SCHEDULER such as torchx:kubernetes")
    if to != "slurm" and (partition is not None or time is not None):
        raise ValueError(
            f"--to {to}: --partition and --time are Slurm's; give the scheduler's own settings as "
            "--option NAME=VALUE"
        )
    given = {name: value for name, value in wishes.items() if value is not None}
    for pair in env:
        if "=" not in pair:
            raise ValueError(f"--env {pair}: must be NAME=VALUE")
    made = Wishes(
        time_min=None if time is None else minutes(time),
        env=dict(pair.split("=", 1) for pair in env),
        **given,
    )
    pairs = {name.lstrip("-"): value for name, _, value in (o.partition("=") for o in options)}
    submit(config, overrides, made, Target(to, partition, pairs), dry_run)


def minutes(text: str) -> int:
    """A time limit in any of Slurm's forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; seconds are
    rounded up to the next minute. Raises ValueError."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        raise ValueError(f"--time {text}: must be D-HH:MM:SS, HH:MM:SS, or minutes")
    days, first, second, third = (int(part) if part else 0 for part in found.groups())
    if found[1] is not None or found[4] is not None:
        seconds = ((days * 24 + first) * 60 + second) * 60 + third
    else:
        seconds = first * 60 + second
    return -(-seconds // 60)


def sees_this_machine(to: str) -> bool:
    """Whether a job sees the files of this machine: others have those of an image."""
    return to in ("slurm", "torchx:slurm", "torchx:local_cwd")


def submit(
    config: str, overrides: Sequence[str], wishes: Wishes, target: Target, dry_run: bool
) -> None:
    """Submit a checked config and say where it is, or print what would be submitted.

    Raises ValueError for what can't be run there, or if the run has a job already.
    """
    # an image has a working directory of its own, to which paths are relative
    folder = os.getcwd() if sees_this_machine(target.to) else ""
    spec = job_spec(load(config, overrides), config, overrides, wishes, os.environ, folder)
    if target.to == "slurm":
        from launch import slurm

        if dry_run:
            print(slurm.sbatch_text(spec, target.partition, target.options))
            return
        _refuse_second(Path(spec.run_dir))
        job = slurm.submit(spec, target.partition, target.options)
    else:
        from launch import torchx_component as torchx

        scheduler = target.to.removeprefix("torchx:")
        if dry_run:
            print(torchx.request_text(spec, scheduler, target.options))
            return
        _refuse_second(Path(spec.run_dir))
        job = torchx.submit(spec, scheduler, target.options)
    if target.to.startswith("torchx:local"):
        print(f"job {job} on {target.to} has ended well")
        return
    print(f"job {job} on {target.to}")
    run_dir = Path(spec.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / RECORD).write_text(json.dumps({"to": target.to, "job": job}) + "\n")
    except OSError as error:  # it may be a folder of the image alone
        raise ValueError(
            f"job {job} is submitted, but `roll-td status`, `logs` and `cancel` will not know of "
            f"it: {error}; ask the scheduler"
        ) from error
    print(f"roll-td status {spec.run_dir}")


def status(run_dir: str) -> None:
    """Print the state of a run's job, and how far the run is."""
    to, job = _record(run_dir)
    print(f"job {job} on {to}: {_backend(to).state(Path(run_dir), job)}")
    folder = Path(run_dir) / "checkpoints"
    steps = [int(path.name[5:]) for path in folder.glob("step_*") if path.name[5:].isdigit()]
    print(f"newest checkpoint: {folder / f'step_{max(steps)}' if steps else 'none yet'}")


def logs(run_dir: str) -> None:
    """Print the logs of a run's last job: of its script, then of each rank of its last start."""
    to, job = _record(run_dir)
    if to != "slurm":
        _backend(to).print_logs(job)
        return
    folder = Path(run_dir) / "logs"
    starts = [path for path in folder.glob(f"{job}.*") if path.suffix[1:].isdigit()]
    last = max(starts, key=lambda path: int(path.suffix[1:]), default=None)
    ranks = [] if last is None else sorted(last.glob("*.log"), key=lambda path: path.stem.zfill(9))
    for path in [*folder.glob(f"{job}_*_log.out"), *ranks]:
        print(f"==> {path} <==")
        sys.stdout.write(path.read_text(errors="replace"))


def cancel(run_dir: str) -> None:
    """End a run's job; it makes a checkpoint first where there is time."""
    to, job = _record(run_dir)
    _backend(to).cancel(Path(run_dir), job)
    print(f"job {job} on {to}: told to end")


def _backend(to: str) -> Any:
    if to == "slurm":
        from launch import slurm

        return slurm
    from launch import torchx_component

    return torchx_component


def _record(run_dir: str) -> tuple[str, str]:
    path = Path(run_dir) / RECORD
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{run_dir}: no job was submitted from here, there is no {RECORD}; give the run "
            "directory that `roll-td submit` has printed"
        ) from None
    return found["to"], found["job"]


def _refuse_second(run_dir: Path) -> None:
    """Two jobs in one run directory would take each other's checkpoints for their own."""
    if not (run_dir / RECORD).exists():
        return
    to, job = _record(str(run_dir))
    state = _backend(to).state(run_dir, job)
    if state in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED"):
        raise ValueError(
            f"{run_dir} has a job already: {job} on {to} is {state}; `roll-td cancel {run_dir}`, "
            "or give another exp_name"
        )
