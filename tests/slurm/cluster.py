"""What tests do with a Slurm cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROLL_TD = "import sys; from roll_td.cli import main; sys.exit(main())"
START_S = 120
"""How long a job may take to its first step, or to its end, on a busy machine."""


@dataclass(frozen=True)
class Slurm:
    """A cluster that is up."""

    folder: Path
    """What start_slurm.sh has made."""
    mode: str
    """netns, shared or plain: how its nodes are told apart."""
    bin: Path
    """Where `python` is that has roll_td."""

    def run(self, *command: str | Path, cwd: Path, ok: bool = True) -> str:
        """Run a command as a user of the cluster would; both its streams."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env=self.env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert (done.returncode == 0) is ok, done.stdout
        return done.stdout

    def env(self) -> dict[str, str]:
        mine = ("SLURM_", "ROLL_TD_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC")
        env = {k: v for k, v in os.environ.items() if not k.startswith(mine)}
        env |= {"SLURM_CONF": str(self.folder / "etc/slurm.conf"), "OMP_NUM_THREADS": "1"}
        env["PATH"] = f"{self.bin}:{env['PATH']}"
        env["PYTHONPATH"] = str(Path(__file__).parents[1] / "dist")
        if self.mode != "netns":  # there all nodes have this machine's network
            env["GLOO_SOCKET_IFNAME"] = "lo"
        return env

    def link(self, node: str, state: str) -> None:
        """Set the network of a node `up` or `down`."""
        text = '. "$0/env.sh"; slurm_link "$1" "$2"'
        subprocess.run(["bash", "-c", text, self.folder, node, state], check=True, timeout=20)

    def daemon(self, node: str) -> int:
        """The pid of a node's slurmd."""
        return int((self.folder / "pids" / f"slurmd-{node}").read_text().split()[0])

    def processes_on(self, node: str) -> list[int]:
        """All that runs on a node, its daemon first."""
        daemon = self.daemon(node)
        host = os.readlink(f"/proc/{daemon}/ns/uts")
        found = [daemon]
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(folder / "ns/uts") == host and folder.name != str(daemon):
                    found.append(int(folder.name))
        return found

    def roll_td(self, *args: str, cwd: Path, ok: bool = True) -> str:
        """`roll-td …` in `cwd`; what it prints."""
        return self.run(sys.executable, "-c", ROLL_TD, *args, cwd=cwd, ok=ok)

    def submit(self, config: Path, name: str, *args: str) -> Job:
        """`roll-td submit` of a run in the folder of its config."""
        given = ["--to", "slurm", "--devices", "cpu", *args, f"exp_name={name}"]
        out = self.roll_td("submit", str(config), *given, cwd=config.parent)
        number = out.splitlines()[0].split()[1]
        assert out.startswith(f"job {number} on slurm\n"), out
        return Job(self, number, config.parent / name)


@dataclass(frozen=True)
class Job:
    """A job in its queue."""

    slurm: Slurm
    number: str
    run_dir: Path

    def show(self, field: str) -> str:
        """A field of `scontrol show job`."""
        shown = self.slurm.run("scontrol", "show", "job", self.number, "-o", cwd=Path("/"))
        return next(f.split("=", 1)[1] for f in shown.split() if f.startswith(f"{field}="))

    def wait(self, *states: str, limit_s: float = START_S) -> None:
        """Wait until Slurm reports one of these states."""
        self.until(lambda: self.show("JobState") in states, f"{states}", limit_s)

    def wait_for(self, text: str, start: int = 0) -> None:
        """Wait until a rank of a start of this job has said so."""
        self.until(lambda: text in self.said(start), f"{text!r} in start {start}")

    def said(self, start: int = 0) -> str:
        """What the ranks of a start have said."""
        logs = sorted((self.run_dir / "logs" / f"{self.number}.{start}").glob("[0-9]*.log"))
        return "".join(path.read_text() for path in logs)

    def script_said(self) -> str:
        (path,) = (self.run_dir / "logs").glob(f"{self.number}_*_log.out")
        return path.read_text()

    def until(
        self,
        condition: Callable[[], bool],
        what: str,
        limit_s: float = START_S,
        every_s: float = 0.2,
    ) -> float:
        """Wait for a condition, looked at every `every_s`; how long that took in seconds."""
        began = time.monotonic()
        while not condition():
            taken = time.monotonic() - began
            if taken > limit_s:
                outs = (
                    [
                        p.read_text()
                        for p in (self.run_dir / "logs").rglob("*.*")
                        if p.is_file() and p.suffix in (".log", ".out")
                    ]
                    if self.run_dir.exists()
                    else []
                )
                shown = self.slurm.run("scontrol", "show", "job", self.number, cwd=Path("/"))
                raise AssertionError(f"not {what} after {limit_s} s: {shown}\n" + "\n".join(outs))
            time.sleep(every_s)
        return time.monotonic() - began

    def processes(self) -> list[int]:
        """The live processes of the job's ranks, on all nodes."""
        found, job = [], f"SLURM_JOB_ID={self.number}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                env = (folder / "environ").read_bytes().split(b"\0")
                told = any(e.startswith(b"ROLL_TD_SECRET=") for e in env)
                if job in env and told and (folder / "comm").read_text() != "srun\n":
                    found.append(int(folder.name))
        return found

    def kill_rank(self, rank: int, key: str = "SLURM_PROCID") -> None:
        """SIGKILL to one rank, found by the variable that numbers it."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                is_rank = b"\0roll_td\0" in line and b"torch.distributed.run" not in line
                if is_rank and f"{key}={rank}".encode() in env:
                    os.kill(pid, signal.SIGKILL)
                    return
        raise AssertionError(f"no rank {rank}: {self.said()}")
