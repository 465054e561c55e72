"""A real Slurm on this machine, for the tests of this folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with cluster(nodes=2) as made:
        yield made


@pytest.fixture(scope="module")
def four() -> Iterator[Slurm]:
    """A cluster of four nodes, some of which are lost."""
    with cluster(nodes=4) as made:
        yield made


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[Slurm]:
    """A cluster that is up; skips the test where there can't be one."""
    if os.geteuid() != 0:
        pytest.skip("slurmd and namespaces need root")
    daemons = ("slurmctld", "slurmd", "munged", "srun")
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [name for name in daemons if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here; tests/slurm/install installs Slurm")
    folder = Path(tempfile.mkdtemp(prefix="slurm"))  # short: unix sockets lie in it
    folder.chmod(0o755)  # munged wants to get in
    start = [HERE / "start_slurm.sh", "-d", folder / "s", "-n", str(nodes)]
    try:
        started = subprocess.run(start, timeout=90, capture_output=True, text=True)
        if started.returncode:  # no namespaces, for example
            pytest.skip(f"no Slurm can be started here: {started.stderr.strip()[-300:]}")
        env = dict(line.split("=", 1) for line in _exports(folder / "s" / "env.sh"))
        yield Slurm(folder / "s", env["SLURM_TEST_MODE"], Path(sys.executable).parent)
    finally:
        subprocess.run([HERE / "stop_slurm.sh", folder / "s"], timeout=90, check=True)
        shutil.rmtree(folder)
        (folder.parent / f"{folder.name}.lock").unlink(missing_ok=True)


def _exports(path: Path) -> list[str]:
    out = subprocess.run(
        ["bash", "-c", f". {path}; env"], check=True, capture_output=True, text=True
    ).stdout
    return [line for line in out.splitlines() if line.startswith("SLURM_") and "=" in line]
