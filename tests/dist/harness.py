"""Starts real jobs for tests: a pipeline of this folder and a YAML, and a launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).parent
_MARK = "ROLL_TD_TEST_JOB"
ECHO = "scenarios.EchoWorker"
END_S = 10
"""How soon after its first failure a job has ended."""
TIDY_S = 3.0
"""How soon after that Python's own tracker has removed the semaphores of pools."""


@dataclass
class Ended:
    """How a job ended."""

    code: int
    out: str
    """Both streams."""

    @property
    def cause(self) -> str:
        """The last thing that the job itself has printed."""
        return self.out[self.out.rindex("roll-td: ") :]


class Job:
    """A command that has been started, in a session of its own, as a terminal would."""

    def __init__(self, args: Sequence[str], **env: str):
        self._shared_memory = set(os.listdir("/dev/shm"))
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, *args],
            env=_environment() | env | {_MARK: self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=HERE,
        )
        _started.append(self)
        self._lines: list[str] = []
        self._at_end = False
        self._come = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._come:
                self._lines.append(line)
                self._come.notify_all()
        with self._come:
            self._at_end = True
            self._come.notify_all()

    @property
    def out(self) -> str:
        with self._come:
            return "".join(self._lines)

    def wait_for(self, text: str, timeout_s: float = 50) -> str:
        """Wait until a line of the output has `text`: that line."""

        def found() -> list[str]:
            return [line for line in self._lines if text in line]

        with self._come:
            self._come.wait_for(lambda: found() or self._at_end, timeout_s)
            assert found(), f"no {text!r} within {timeout_s} s: {self.out}"
            return found()[0]

    def pid_of(self, who: str) -> int:
        """The pid that a process of the job has printed as `pid of WHO: N`."""
        return int(self.wait_for(f"pid of {who}: ").rpartition(" ")[2])

    def finish(self, timeout_s: float = END_S) -> Ended:
        """Wait for the end. A process or shared memory left over is an error."""
        began = time.monotonic()
        try:
            code = self.process.wait(timeout_s)
            self._reader.join(max(0.5, began + timeout_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {timeout_s} s: {self.out}") from None
        left = self.processes()
        assert not left, f"processes left over: {left}: {self.out}"
        assert not self._reader.is_alive(), "who holds the job's output open?"
        until = time.monotonic() + TIDY_S
        while new := self._shared_memory_left():
            assert time.monotonic() < until, f"shared memory left over: {new}"
            time.sleep(0.05)
        return Ended(code, self.out)

    def _shared_memory_left(self) -> set[str]:
        new = set(os.listdir("/dev/shm")) - self._shared_memory
        return {name for name in new if not _is_in_use(name)}  # by others: all of ours have ended

    def kill(self) -> None:
        """End whatever is left of it."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def processes(self) -> list[int]:
        """The pids that are alive of all that the command has started, in whatever session."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it has ended; what is left of one is empty
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found


def _is_in_use(name: str) -> bool:
    """Whether a process that is alive has a file of /dev/shm in its memory."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return False


_started: list[Job] = []


def kill_all() -> None:
    """End what is left of all jobs."""
    while _started:
        _started.pop().kill()


def write_config(folder: Path, pipeline: str, **config: object) -> Path:
    """A config for a pipeline of this folder, given as module.Class."""
    path = folder / "job.yaml"
    data = {"pipeline_cls": pipeline, "output_dir": str(folder / "runs"), **config}
    path.write_text(yaml.safe_dump(data))
    return path


def role(**given: object) -> dict[str, object]:
    """The config of a role of EchoWorkers."""
    return {"worker_cls": ECHO} | given


def roll_td_run(config: Path, *overrides: str, **env: str) -> Job:
    """Start `roll-td run`."""
    program = "import sys; from roll_td.cli import main; sys.exit(main())"
    return Job(["-c", program, "run", str(config), *overrides], **env)


def torchrun(config: Path, ranks: int, *overrides: str, **env: str) -> Job:
    """Start torchrun on one node."""
    given = ["--standalone", "--nproc-per-node", str(ranks)]
    return Job([*_TORCHRUN, *given, "-m", "roll_td", str(config), *overrides], **env)


def agents(config: Path, ranks: Sequence[int], *overrides: str, **env: str) -> list[Job]:
    """Start one torchrun a node, all on this machine, with so many ranks each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    given = ["--nnodes", str(len(ranks)), *rendezvous, "--local-addr", "127.0.0.1"]
    jobs = []
    for number, count in enumerate(ranks):
        host = ["--rdzv-conf", f"is_host={int(number == 0)}", "--nproc-per-node", str(count)]
        args = [*_TORCHRUN, *given, *host, "-m", "roll_td", str(config), *overrides]
        jobs.append(Job(args, **env))
    return jobs


_TORCHRUN = ["-m", "torch.distributed.run"]


def _environment() -> dict[str, str]:
    mine = ("SLURM_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(mine)}
    return env | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
