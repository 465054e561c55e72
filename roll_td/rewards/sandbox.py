"""Runs programs in Python that nobody has looked at, such as answers of a model.

With isolation `namespaces` (Linux 5.14 or newer; root, or any user where the kernel lets users make
namespaces) a program sees a file system of its own: the system's programs and Python's, read-only,
and an empty folder in memory, which is all it can write to and is gone with it. It has no network,
not even loopback, sees no other process and none of this one's environment, and has the rights of
nobody; the kernel refuses it what would lead around this: other kinds of sockets, namespaces of its
own, shared memory of System V, keys. Time, memory, files and processes are limited, and all that it
has started ends with it, and with this process.

With `limits` there are the limits alone, and root's programs run as nobody: a program can read and
write what its user may, use the network, and signal processes of its user; its folder and what it
has started may stay if this process is killed.

Neither protects from faults of the kernel itself. Memory is limited for each process, not for all
of a program's together, and files that are in memory alone count as files. Without root `limits`
counts all processes of the user, so that a program may get fewer than it may have. What runs tests
shares the interpreter with what they test: a program made to look for it can find how results are
told (a random number, made anew for each program), or give back objects that are equal to anything;
one that only ends early, prints, guesses or replaces builtins can't. Programs whose output is
compared are judged from outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from roll_td.config.reward_settings import SandboxLimits
from roll_td.rewards import jail

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": jail.BOX,
    "TMPDIR": jail.BOX,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # threads count as processes
    "OPENBLAS_NUM_THREADS": "1",
}
"""All that a program finds."""


@dataclass(frozen=True)
class Ran:
    """What came of a program."""

    status: int | None
    """Its exit status, below 0 for the signal that ended it; None: it took too long."""
    output: str = ""
    """What it printed, as far as it was kept."""
    passed: tuple[bool, ...] = ()
    """Which of its tests hold; empty if it did not come so far as to tell."""


def run_tests(code: str, tests: list[str], limits: SandboxLimits) -> Ran:
    """Run a program, then tests in its names, each a piece of Python that raises unless it holds.

    RuntimeError if the sandbox can't be made here.
    """
    return _run(code, [{"tests": tests}], limits, 0)[0]


def run_programs(code: str, inputs: list[str], limits: SandboxLimits, keep_bytes: int) -> list[Ran]:
    """Run a program once for each text that it is to read from standard input; of what it prints
    the first `keep_bytes` bytes are kept. RuntimeError as run_tests."""
    return _run(code, [{"input": text} for text in inputs], limits, keep_bytes)


def _run(
    code: str, cases: list[dict[str, Any]], limits: SandboxLimits, keep_bytes: int
) -> list[Ran]:
    is_whole = limits.isolation == "namespaces"
    with nullcontext() if is_whole else TemporaryDirectory(prefix="roll-td-box-") as box:
        job = vars(limits) | {
            "code": code,
            "cases": cases,
            "keep_bytes": keep_bytes,
            "box": box,
            "paths": sorted({sys.base_prefix, sys.prefix}),
            "parent": os.getpid(),
        }
        done = subprocess.run(
            [sys.executable, "-I", "-B", str(Path(jail.__file__))],
            input=json.dumps(job).encode(),
            capture_output=True,
            env=ENVIRONMENT if box is None else ENVIRONMENT | {"HOME": box, "TMPDIR": box},
            start_new_session=True,
        )
    _, ready, report = done.stdout.decode().partition(jail.READY)
    if not ready:
        said = done.stderr.decode("utf-8", "replace").strip()
        last = said.rpartition("\n")[2] or f"it ended with {done.returncode}"
        fix = "allow this user namespaces, or set isolation: limits, which isolates less"
        raise RuntimeError(f"no sandbox of {limits.isolation} here: {last}; {fix}")
    if done.returncode:  # with `limits` a program can end what runs it
        return [Ran(None)] * len(cases)
    return [
        Ran(
            told["status"],
            told.get("output", "").encode("latin-1").decode("utf-8", "replace"),
            tuple(map(bool, told.get("passed", ()))),
        )
        for told in json.loads(report)
    ]
