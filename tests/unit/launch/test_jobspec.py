"""From a config to what a scheduler is asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from launch.jobspec import JobSpec, Wishes, job_spec, rank_command, torchrun_command
from roll_td.config.base import BaseConfig

GOLDEN = Path(__file__).parent / "golden"


def spec(wishes: Wishes | None = None, environ: dict[str, str] | None = None, **given: Any) -> Any:
    size = {"num_nodes": 2, "num_gpus_per_node": 4, "num_cpu_ranks_per_node": 1}
    config = BaseConfig(**({"exp_name": "try"} | size | given))
    made = job_spec(config, "a/b.yaml", ["x=1", "y=a b"], wishes or Wishes(), environ or {}, "/s")
    assert isinstance(made, JobSpec)
    return made


def test_the_job_of_a_config_reads_as_it_should() -> None:
    wishes = Wishes(time_min=720, cpus_per_rank=8, mem_gb=64, env={"NCCL_DEBUG": "WARN"})
    assert spec(wishes).text() == (GOLDEN / "jobspec.yaml").read_text()


def test_ranks_are_those_of_the_placement_and_gpus_are_asked_for_devices_alone() -> None:
    assert (spec().ranks_per_node, spec().gpus_per_node) == (5, 4)
    on_cpu = spec(Wishes(devices="cpu"))
    assert (on_cpu.ranks_per_node, on_cpu.gpus_per_node) == (5, 0)


def test_absolute_paths_stay() -> None:
    assert spec(output_dir="/runs").run_dir == "/runs/try"
    assert spec(output_dir="runs").run_dir == "/s/runs/try"


@pytest.mark.parametrize(
    ("wishes", "environ", "threads"),
    [
        (Wishes(cpus_per_rank=3), {}, "3"),
        (Wishes(cpus_per_rank=3), {"OMP_NUM_THREADS": "7"}, "7"),
        (Wishes(env={"OMP_NUM_THREADS": "9"}), {"OMP_NUM_THREADS": "7"}, "9"),
    ],
)
def test_what_the_user_has_set_wins(wishes: Wishes, environ: dict[str, str], threads: str) -> None:
    assert spec(wishes, environ).env["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("wishes", "given", "words"),
    [
        (Wishes(time_min=2), {}, r"--time is 2 min: not longer than --lead, the 120 s"),
        (Wishes(lead_s=0), {}, r"--lead 0: must be at least 1 second"),
        (Wishes(cpus_per_rank=0), {}, r"--cpus-per-rank 0: must be at least 1"),
        (Wishes(), {"resume": "none"}, r"would begin at step 0 each time"),
        (Wishes(env={"GLOO_SOCKET_IFNAME": "^lo,docker"}), {}, r"gloo knows no '\^'"),
        (Wishes(env={"GLOO_SOCKET_IFNAME": "10.0.0.1"}), {}, r"is an address"),
    ],
)
def test_what_cannot_be_run_is_refused(wishes: Wishes, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spec(wishes, **given)


def test_k11_an_interface_of_the_shell_is_checked_too() -> None:
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=fe80::1: is an address"):
        spec(environ={"GLOO_SOCKET_IFNAME": "fe80::1"})
    assert "GLOO_SOCKET_IFNAME" not in spec(environ={"GLOO_SOCKET_IFNAME": "eth0,ib0"}).env


def test_k03_three_minutes_with_a_lead_of_two_are_enough() -> None:
    assert spec(Wishes(time_min=3)).time_min == 3


def test_commands() -> None:
    rank = ["-m", "roll_td", "/s/a/b.yaml", "x=1", "y=a b"]
    assert rank_command(spec()) == [sys.executable, "-u", *rank]
    options = [
        "--nnodes=2",
        "--nproc-per-node=5",
        "--max-restarts=2",
        "--rdzv-backend=c10d",
        "--rdzv-id=77",
        "--rdzv-endpoint=node001:12345",
        "--signals-to-handle=SIGINT",
    ]
    command = torchrun_command(spec(Wishes(torchrun_restarts=2)), "node001:12345", "77")
    assert command[:4] == ["bash", "-c", "trap '' TERM USR2; exec \"$@\"", "torchrun"]
    assert command[4:] == [sys.executable, "-m", "torch.distributed.run", *options, *rank]
