"""What Slurm's way to a job's first step costs beside a bare `srun python`, and how soon a job
with a killed rank has ended, by launcher.

    python -m tests.benchmarks.launch [--rounds N]      as root, where tests/slurm/install was run

On a cluster of two nodes on this machine, that is up and has run a job before. `ours` is from the
start of `roll-td submit` to the first step of fine-tuning by two device ranks and a CPU rank;
`queued` is the same without the command itself. `bare` is from the start of `srun` to three ranks
that have imported the same modules, joined a process group and built the same model. Interleaved;
a ratio is the median of the ratios of the rounds. Ends are from SIGKILL of rank 1, in the middle
of a run, to the launcher's end, by submitit to Slurm's FAILED (looked for every 0.2 s).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.dist import harness
from tests.dist.test_sft import write_sft
from tests.slurm.cluster import Slurm
from tests.slurm.conftest import cluster

RANKS = 3
LIMIT_S = 300
BARE = """
import os, sys
import torch.distributed as dist
import roll_td.pipelines.sft, roll_td.strategies.fsdp2, roll_td.workers.sft
from roll_td.config.load import load
from roll_td.models import load_model
rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=size)
load_model(load(sys.argv[2], []).model, 0)
dist.barrier()
print("READY", flush=True)
"""


def median(values: list[float]) -> str:
    return f"{statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f})"


def submitted(slurm: Slurm, config: Path, name: str) -> tuple[float, float]:
    """Seconds to the first step: of all, and since the job was queued."""
    began = time.monotonic()
    job = slurm.submit(config, name, "max_steps=1")
    queued = time.monotonic()
    job.until(lambda: "step 0/" in job.said(), "at its first step", LIMIT_S, every_s=0.02)
    ended = time.monotonic()
    job.wait("COMPLETED", "FAILED", limit_s=LIMIT_S)
    return ended - began, ended - queued


def bare(slurm: Slurm, config: Path, name: str) -> float:
    """Seconds until all ranks are ready."""
    meet = f"file://{config.parent}/{name}.meeting"
    began = time.monotonic()
    command = ["srun", f"--ntasks={RANKS}", sys.executable, "-c", BARE, meet, str(config)]
    with subprocess.Popen(
        command, cwd=config.parent, env=slurm.env(), stdout=subprocess.PIPE, text=True
    ) as srun:
        assert srun.stdout is not None
        ready = [next(line for line in srun.stdout if line == "READY\n") for _ in range(RANKS)]
        ended = time.monotonic()
        srun.communicate()
    assert srun.returncode == 0 and len(ready) == RANKS
    return ended - began


def measure_starts(slurm: Slurm, config: Path, rounds: int) -> None:
    slurm.run("srun", "--nodes=2", sys.executable, "-c", "import torch", cwd=config.parent)
    taken: dict[str, list[float]] = {"ours": [], "queued": [], "bare": []}
    for number in range(rounds):
        for side in random.sample(["ours", "bare"], 2):
            if side == "bare":
                taken["bare"].append(bare(slurm, config, f"bare{number}"))
            else:
                whole, queued = submitted(slurm, config, f"ours{number}")
                taken["ours"].append(whole)
                taken["queued"].append(queued)
    for side, seconds in taken.items():
        print(f"{side:8} {median(seconds)} s")
    for side in ("ours", "queued"):
        ratios = [a / b for a, b in zip(taken[side], taken["bare"], strict=True)]
        print(f"{side} / bare {median(ratios)}", flush=True)


def kill_rank_1(job: harness.Job, key: str) -> float:
    """SIGKILL to the rank that `key` numbers, and wait for the job's end: the seconds."""
    for pid in job.processes():
        with contextlib.suppress(OSError):  # it has ended
            env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"{key}=1".encode() in env:
                began = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                job.process.wait(LIMIT_S)
                ended = time.monotonic()
                assert job.process.returncode != 0
                job.kill()
                return ended - began
    raise AssertionError(f"no rank 1: {job.out}")


def by_torchrun(_slurm: Slurm, config: Path, name: str) -> float:
    job = harness.torchrun(config, RANKS, f"exp_name={name}")
    job.wait_for("step 5/", LIMIT_S)
    return kill_rank_1(job, "RANK")


def by_srun(slurm: Slurm, config: Path, name: str) -> float:
    become = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
    srun = ["srun", f"--ntasks={RANKS}", "--kill-on-bad-exit=1", "--unbuffered"]
    program = [sys.executable, "-m", "roll_td", str(config), f"exp_name={name}"]
    job = harness.Job(["-c", become, *srun, *program], **slurm.env())
    job.wait_for("step 5/", LIMIT_S)
    return kill_rank_1(job, "SLURM_PROCID")


def by_submitit(slurm: Slurm, config: Path, name: str) -> float:
    job = slurm.submit(config, name)
    job.until(lambda: "step 5/" in job.said(), "at step 5", LIMIT_S)
    began = time.monotonic()
    job.kill_rank(1)
    job.wait("FAILED", limit_s=LIMIT_S)
    return time.monotonic() - began


def measure_ends(slurm: Slurm, config: Path, rounds: int) -> None:
    launchers: dict[str, Callable[[Slurm, Path, str], float]]
    launchers = {"torchrun": by_torchrun, "srun": by_srun, "submitit": by_submitit}
    taken: dict[str, list[float]] = {name: [] for name in launchers}
    for number in range(rounds):
        for name, measure in launchers.items():
            taken[name].append(measure(slurm, config, f"{name}{number}"))
    for name, seconds in taken.items():
        print(f"killed under {name:9} {median(seconds)} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with cluster(nodes=2) as slurm, tempfile.TemporaryDirectory() as folder:
        rest = {"eval_steps": 10**6, "save_steps": 10**6, "max_steps": 10**6}
        config = write_sft(Path(folder), **rest)
        measure_starts(slurm, config, rounds)
        measure_ends(slurm, config, rounds)
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
