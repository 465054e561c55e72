"""Cloud schedulers through TorchX, whose only importer this is.

    torchx run -s kubernetes -cfg queue=q launch/torchx_component.py:train --config CONFIG --image I
    roll-td submit CONFIG --to torchx:kubernetes --option queue=q --option image=I

All roles of a pipeline share the ranks of the job, so the app has one role of TorchX: a replica a
node, in which torchrun starts the node's ranks. A scheduler ends a replica by SIGTERM, which
torchrun passes on: the ranks take it for a notice, and make a checkpoint if the scheduler leaves
them the time. Loads in torchx 0.7.0 and in torchx-nightly, which read the annotations of `train`
as they are: as types, so not from __future__, and in the form of typing alone.
"""

import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Dict, Optional  # noqa: UP035

from torchx import specs  # type: ignore[import-untyped,import-not-found]
from torchx.runner import get_runner  # type: ignore[import-untyped,import-not-found]
from torchx.specs import macros  # type: ignore[import-untyped,import-not-found]

from launch.jobspec import JobSpec, Wishes, job_spec, torchrun_options
from roll_td.config.load import load

PORT = 29500
"""torchrun's own; where replicas share hosts with other jobs, each job needs another."""
_OF_THIS_MACHINE = ("local_cwd", "slurm")
"""Schedulers whose replicas see this machine's files; the others run an image."""


def train(
    *overrides: str,
    config: str,
    image: str = ".",
    python: str = "python",
    devices: str = "gpu",
    cpus_per_rank: int = 1,
    mem_gb: int = 0,
    max_retries: int = 0,
    port: int = PORT,
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
) -> specs.AppDef:
    """A pipeline as one job of torch.distributed.

    Args:
        overrides: key=value, changes to the config
        config: YAML file, from the working directory both here and in the image
        image: what the scheduler runs; a folder, for local_cwd and slurm
        python: the interpreter in the image
        devices: gpu, or cpu where device ranks are to have CPU cores alone
        cpus_per_rank: CPU cores of each rank
        mem_gb: memory of each node; 0 leaves it to the scheduler
        max_retries: how often the scheduler starts a failed job again
        port: a port that is free on the first node
        env: environment of the ranks, NAME=VALUE,…
    """
    if devices not in ("gpu", "cpu"):
        raise ValueError(f"devices={devices}: must be gpu or cpu")
    wishes = Wishes(
        devices="gpu" if devices == "gpu" else "cpu",
        cpus_per_rank=cpus_per_rank,
        mem_gb=mem_gb or None,
        torchrun_restarts=0,
        env=env or {},
    )
    spec = job_spec(load(config, overrides), config, overrides, wishes, os.environ, folder="")
    return _app(spec, image, python, max_retries, port, secrets.token_hex(32))


def request_text(spec: JobSpec, scheduler: str, options: Mapping[str, str]) -> str:
    """What would be sent to the scheduler; its secret is made at the submission."""
    app, settings = _prepare(spec, scheduler, options, PORT, "made-at-the-submission")
    with get_runner() as runner:
        _check_scheduler(runner, scheduler)
        return str(runner.dryrun(app, scheduler, _typed(runner, scheduler, settings)))


def submit(spec: JobSpec, scheduler: str, options: Mapping[str, str]) -> str:
    """Submit a job, and wait for its end if the scheduler is this process: its handle.

    Raises ValueError if it fails there.
    """
    port = 20000 + secrets.randbelow(9500)
    app, settings = _prepare(spec, scheduler, options, port, secrets.token_hex(32))
    with get_runner() as runner:
        _check_scheduler(runner, scheduler)
        handle = runner.run(app, scheduler, _typed(runner, scheduler, settings))
        if scheduler.startswith("local"):
            status = runner.wait(handle, wait_interval=0.5)
            if status is None or status.state is not specs.AppState.SUCCEEDED:
                raise ValueError(f"{handle}: {status}; logs are in {spec.run_dir}/logs")
        return str(handle)


def state(run_dir: Path, job: str) -> str:
    """TorchX's name for the state of a job; UNKNOWN once the scheduler has forgotten it."""
    with get_runner() as runner:
        status = runner.status(job)
    return "UNKNOWN" if status is None else status.state.name


def cancel(run_dir: Path, job: str) -> None:
    """End the job."""
    with get_runner() as runner:
        runner.cancel(job)


def print_logs(job: str) -> None:
    """Print what the scheduler has of all nodes."""
    with get_runner() as runner:
        app = runner.describe(job)
        if app is None:
            raise ValueError(f"{job}: its scheduler does not know it any more")
        for role in app.roles:
            for replica in range(role.num_replicas):
                for line in runner.log_lines(job, role.name, replica):
                    print(f"[{replica}] {line.rstrip()}")


def _app(
    spec: JobSpec, image: str, python: str, max_retries: int, port: int, secret: str
) -> specs.AppDef:
    # ${…:=localhost}: some schedulers do not tell the first node its own name
    head = "localhost:0" if spec.nodes == 1 else f"$${{{macros.rank0_env}:=localhost}}:{port}"
    options = [*torchrun_options(spec), f"--rdzv-id={macros.app_id}"]
    options += [f"--shutdown-timeout={spec.lead_s}"]  # how long torchrun waits for the checkpoint
    options += ["--local-addr=127.0.0.1"] if spec.nodes == 1 else []
    words = [python, "-m", "torch.distributed.run", *options]
    # $$ is a $ to TorchX
    program = [shlex.quote(word).replace("$", "$$") for word in spec.argv]
    command = " ".join([*map(_quoted, words), f"--rdzv-endpoint={head}", *program])
    return specs.AppDef(
        name=spec.name.lower().replace("_", "-"),
        roles=[
            specs.Role(
                name="ranks",
                image=image,
                entrypoint="bash",
                args=["-c", f"ROLL_TD_RESTARTS=$${{SLURM_RESTART_COUNT:-0}} exec {command}"],
                env=spec.env
                | {
                    "ROLL_TD_NOTICES": "TERM",
                    "ROLL_TD_NOTICE_FILE": f"{spec.run_dir}/notice",
                    "ROLL_TD_SECRET": secret,
                },
                num_replicas=spec.nodes,
                max_retries=max_retries,
                port_map={"c10d": port},
                resource=specs.Resource(
                    cpu=spec.ranks_per_node * spec.cpus_per_rank,
                    gpu=spec.gpus_per_node,
                    memMB=-1 if spec.mem_gb is None else int(spec.mem_gb * 1024),
                ),
            )
        ],
    )


def _quoted(word: str) -> str:
    """For bash; the macros of TorchX stay as they are, their values are plain."""
    return word if "${" in word else shlex.quote(word)


def _prepare(
    spec: JobSpec, scheduler: str, options: Mapping[str, str], port: int, secret: str
) -> tuple[specs.AppDef, dict[str, str]]:
    """The app, and the scheduler's own settings: `options` without those that are the app's."""
    here = scheduler in _OF_THIS_MACHINE
    settings = dict(options)
    image = settings.pop("image", spec.folder if here else "")
    if not image:
        raise ValueError(
            f"--to torchx:{scheduler} runs an image; name one that has roll-td, the config and "
            "the data: --option image=NAME"
        )
    python = settings.pop("python", sys.executable if here else "python")
    retries = int(settings.pop("max_retries", "0"))
    if scheduler.startswith("local"):
        settings.setdefault("log_dir", f"{spec.run_dir}/logs")
    return _app(spec, image, python, retries, port, secret), settings


def _check_scheduler(runner: Any, scheduler: str) -> None:
    known = sorted(runner.scheduler_backends())
    if scheduler not in known:
        raise ValueError(f"--to torchx:{scheduler}: this TorchX has {', '.join(known)}")


def _typed(runner: Any, scheduler: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Settings as the scheduler wants them."""
    text = ",".join(f"{name}={value}" for name, value in settings.items())
    return dict(runner.scheduler_run_opts(scheduler).cfg_from_str(text))
