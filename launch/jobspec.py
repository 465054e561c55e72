"""What a job asks of a scheduler, worked out from its config: pure, and printable."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import yaml

from roll_td.config.base import BaseConfig
from roll_td.config.masking import shown

NOTICES = "TERM,USR2"
"""The signals that Slurm's launchers declare as notices."""
LEAD_S = 120
"""How long before its time limit a job is given notice, unless said otherwise."""


@dataclass(frozen=True)
class Wishes:
    """What the config does not say: the options of `roll-td submit`."""

    time_min: int | None = None
    """Time limit; None: the scheduler's."""
    lead_s: int = LEAD_S
    """How long before the time limit the job is given notice."""
    cpus_per_rank: int = 1
    """CPU cores of each rank."""
    mem_gb: float | None = None
    """Memory of each node in units of 2^30 bytes; None: the scheduler's."""
    devices: Literal["gpu", "cpu"] = "gpu"
    """Whether each device rank gets a GPU."""
    torchrun_restarts: int | None = None
    """None: each rank is a task of the scheduler; else torchrun starts the ranks of a node, and
    starts them again so many times."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further environment of the ranks."""


@dataclass(frozen=True)
class JobSpec:
    """A job as a scheduler is to start it."""

    name: str
    run_dir: str
    """Absolute path; all nodes share it."""
    folder: str
    """Working directory of the ranks, absolute."""
    nodes: int
    device_ranks_per_node: int
    cpu_ranks_per_node: int
    """Ranks of a node without a device, the driver's included."""
    gpus_per_node: int
    cpus_per_rank: int
    mem_gb: float | None
    """Memory of each node in units of 2^30 bytes; None: the scheduler's."""
    time_min: int | None
    lead_s: int
    torchrun_restarts: int | None
    env: dict[str, str]
    """What is set for every rank, beside what the launcher makes for each start."""
    argv: tuple[str, ...]
    """The Python arguments of one rank."""

    @property
    def ranks_per_node(self) -> int:
        """Processes of the job on each node."""
        return self.device_ranks_per_node + self.cpu_ranks_per_node

    def text(self) -> str:
        """As YAML, to be read."""
        made = dataclasses.asdict(self) | {"argv": list(self.argv)}
        return yaml.safe_dump(made, sort_keys=False, width=1000)


def job_spec(
    config: BaseConfig,
    config_path: str,
    overrides: Sequence[str],
    wishes: Wishes,
    environ: Mapping[str, str],
    folder: str,
) -> JobSpec:
    """The job for a config that `roll-td check` finds no fault with.

    `environ` is the submitting shell's: what the user has set there stays. Paths are relative to
    `folder`. Raises ValueError for what can't be run.
    """
    _refuse(config, wishes)
    env = {"OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", str(wishes.cpus_per_rank))}
    env |= wishes.env
    _check_interface((dict(environ) | env).get("GLOO_SOCKET_IFNAME"))
    assert config.num_gpus_per_node is not None and config.num_cpu_ranks_per_node is not None
    name = config.exp_name or "run"
    return JobSpec(
        name=name,
        run_dir=os.path.join(folder, config.output_dir, name),
        folder=folder,
        nodes=config.num_nodes,
        device_ranks_per_node=config.num_gpus_per_node,
        cpu_ranks_per_node=config.num_cpu_ranks_per_node,
        gpus_per_node=config.num_gpus_per_node if wishes.devices == "gpu" else 0,
        cpus_per_rank=wishes.cpus_per_rank,
        mem_gb=wishes.mem_gb,
        time_min=wishes.time_min,
        lead_s=wishes.lead_s,
        torchrun_restarts=wishes.torchrun_restarts,
        env=env,
        argv=("-m", "roll_td", os.path.join(folder, config_path), *overrides),
    )


def rank_command(spec: JobSpec) -> list[str]:
    """The command of one rank."""
    return [sys.executable, "-u", *spec.argv]


def torchrun_command(spec: JobSpec, endpoint: str, run_id: str) -> list[str]:
    """The command that starts the ranks of one node through torchrun.

    The agent lets notices be: they are for the ranks, which get them from the scheduler. So it
    runs under a shell that ignores them; ranks set handlers of their own.
    """
    options = [
        *torchrun_options(spec),
        f"--rdzv-id={run_id}",
        f"--rdzv-endpoint={endpoint}",
        "--signals-to-handle=SIGINT",
    ]
    shell = f"trap '' {NOTICES.replace(',', ' ')}; exec \"$@\""
    return [
        *("bash", "-c", shell, "torchrun"),
        *(sys.executable, "-m", "torch.distributed.run"),
        *options,
        *spec.argv,
    ]


def torchrun_options(spec: JobSpec) -> list[str]:
    """The options of torchrun that the job determines."""
    options = {
        "nnodes": spec.nodes,
        "nproc-per-node": spec.ranks_per_node,
        "max-restarts": spec.torchrun_restarts or 0,
        "rdzv-backend": "c10d",
    }
    return [f"--{key}={value}" for key, value in options.items()]


def _refuse(config: BaseConfig, wishes: Wishes) -> None:
    if wishes.cpus_per_rank < 1:
        raise ValueError(f"--cpus-per-rank {wishes.cpus_per_rank}: must be at least 1")
    if wishes.lead_s < 1:
        raise ValueError(f"--lead {wishes.lead_s}: must be at least 1 second")
    if wishes.time_min is not None and wishes.time_min * 60 <= wishes.lead_s:
        raise ValueError(
            f"--time is {wishes.time_min} min: not longer than --lead, the {wishes.lead_s} s in "
            "which a checkpoint is to be made; give more time, or a shorter lead"
        )
    if config.resume == "none":
        raise ValueError(
            f"{shown('resume', config.resume)}: a job that is started again would begin at step 0 "
            "each time; leave resume out, and give another exp_name to begin anew"
        )


def _check_interface(name: str | None) -> None:
    """gloo takes the names of interfaces; NCCL's way of excluding some is not known to it."""
    if name is None:
        return
    rule = None
    if name.startswith("^") or name.startswith("="):
        rule = "gloo knows no '^' or '=', as NCCL does"
    elif _is_address(name):
        rule = "is an address"
    if rule is not None:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={name}: {rule}; give the name of an interface, such as eth0"
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
