"""Inside a Slurm allocation: start the ranks, wait, and say what became of them.

Runs in the batch script, on the first node. Everything of one start of a job lies in
RUN_DIR/logs/JOB.RESTARTS: a log a task, srun's own words, and what notices the job has ended for.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from launch.jobspec import NOTICES, JobSpec, rank_command, torchrun_command
from roll_td.distributed.world import expand_nodelist

REQUEUE = "USR2"
"""The notice that asks for a requeue."""
PORTS = 100
"""How many ports are tried before giving up."""
_SRUN_LOG, _NOTICE = "srun.log", "notice"


class JobFailedError(RuntimeError):
    """The job has failed; the text is its first cause."""


def run_step(spec: JobSpec) -> None:
    """Start all ranks with srun and wait for their end.

    Raises JobFailedError with the first cause; SystemExit after a notice: 0 once Slurm has
    queued the job again, 143 if no one asked for that.
    """
    job, restarts = os.environ["SLURM_JOB_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    logs = Path(spec.run_dir) / "logs" / f"{job}.{restarts}"
    logs.mkdir(parents=True, exist_ok=True)
    print(f"roll-td: logs of the ranks are in {logs}", flush=True)
    env, port = step_environment(spec, logs, os.environ), free_port(int(job), os.environ)
    with open(logs / _SRUN_LOG, "wb") as srun_log:
        command = srun_command(spec, logs, os.environ, port)
        env.setdefault("MASTER_PORT", str(port))
        code = subprocess.run(command, env=env, cwd=spec.folder, stderr=srun_log).returncode
    notices = (logs / _NOTICE).read_text().split() if (logs / _NOTICE).exists() else []
    if code != 0:
        raise JobFailedError(f"srun ended with exit code {code}\n{first_cause(logs)}")
    if REQUEUE in notices:
        print(f"roll-td: stopped by SIG{REQUEUE} after a checkpoint; queued again", flush=True)
        subprocess.run(["scontrol", "requeue", job], check=True)
        sys.exit(0)
    if notices:
        print(f"roll-td: stopped by SIG{notices[0]} after a checkpoint", flush=True)
        sys.exit(143)


def srun_command(spec: JobSpec, logs: Path, environ: Mapping[str, str], port: int) -> list[str]:
    """The one step of the job: a task for each rank, or for each node's torchrun."""
    per_node, cpus = spec.ranks_per_node, spec.cpus_per_rank
    program = rank_command(spec)
    if spec.torchrun_restarts is not None:
        per_node, cpus = 1, spec.ranks_per_node * spec.cpus_per_rank
        head = environ.get("MASTER_ADDR") or expand_nodelist(environ["SLURM_JOB_NODELIST"])[0]
        program = torchrun_command(spec, f"{head}:{port}", environ["SLURM_JOB_ID"])
    return [
        "srun",
        "--kill-on-bad-exit=1",
        "--unbuffered",
        f"--nodes={spec.nodes}",
        f"--ntasks={spec.nodes * per_node}",
        f"--ntasks-per-node={per_node}",
        f"--cpus-per-task={cpus}",
        f"--output={logs}/%t.log",
        *program,
    ]


def step_environment(spec: JobSpec, logs: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks. The secret is made anew for each start and written nowhere."""
    return (
        dict(environ)
        | spec.env
        | {
            "ROLL_TD_NOTICES": NOTICES,
            "ROLL_TD_NOTICE_FILE": str(logs / _NOTICE),
            "ROLL_TD_RESTARTS": environ.get("SLURM_RESTART_COUNT", "0"),
            "ROLL_TD_SECRET": secrets.token_hex(32),
        }
    )


def free_port(job: int, environ: Mapping[str, str]) -> int:
    """The user's MASTER_PORT, else a port that nobody on this node has, counted from one that
    differs for jobs next to each other."""
    if "MASTER_PORT" in environ:
        return int(environ["MASTER_PORT"])
    ports = [10000 + (31 * job + n) % 20000 for n in range(PORTS)]
    for port in ports:
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
    raise OSError(
        f"ports {ports[0]} to {ports[-1]} of {socket.gethostname()} are all taken; set MASTER_PORT "
        "to a free one"
    )


def first_cause(logs: Path) -> str:
    """What a failed job has said of its first cause, whichever rank said it; else what srun said
    of the first task that ended badly."""
    texts = [path.read_text(errors="replace") for path in sorted(logs.glob("[0-9]*.log"))]
    said = [found[-1] for text in texts if (found := re.findall(r"(?ms)^roll-td: .*", text))]
    # ranks that have lost the driver know less than it does
    said.sort(key=lambda text: text.startswith("roll-td: the driver (rank"))
    if said:
        return said[0].strip()
    lines = (logs / _SRUN_LOG).read_text(errors="replace").splitlines()
    ended = [line for line in lines if re.search(r"tasks? [\d,-]+: ", line)]
    return (ended or lines or ["no rank has said why; see their logs"])[0]
