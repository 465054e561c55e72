"""Starts a real job for a test: a pipeline file and a YAML in a folder, and torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).parent


@dataclass
class Ended:
    """How a job ended."""

    code: int
    out: str
    seconds: float


def write_config(folder: Path, pipeline: str, **config: object) -> Path:
    """A config for a pipeline of tests/dist/scenarios.py."""
    path = folder / "job.yaml"
    data = {"pipeline_cls": f"scenarios.{pipeline}", "output_dir": str(folder / "runs"), **config}
    path.write_text(yaml.safe_dump(data))
    return path


def environment() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return env | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}


def start(args: list[str], **env: str) -> subprocess.Popen[str]:
    """Start a command in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *args],
        env=environment() | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=HERE,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 50) -> Ended:
    """Wait for the end; whatever is left of its session is an error, and ended by pid."""
    began = time.monotonic()
    try:
        out, _ = process.communicate(timeout=timeout_s)
    finally:
        left = session_members(process.pid)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left over: {left}"
    return Ended(process.returncode, out, time.monotonic() - began)


def session_members(session: int) -> list[int]:
    """The pids of a session, zombies not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def run(config: Path, ranks: int, *overrides: str, timeout_s: float = 50, **env: str) -> Ended:
    """Run a job of `ranks` processes by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    args = [*torchrun, "-m", "roll_td", str(config), *overrides]
    return finish(start(args, **env), timeout_s)
