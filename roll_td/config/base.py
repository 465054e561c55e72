"""The settings every pipeline has, and those of one role."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from roll_td.config.checkpoint import CheckpointConfig
from roll_td.config.device_mapping import parse_device_mapping
from roll_td.config.functions import functions_in
from roll_td.config.masking import shown
from roll_td.config.model import GenerationConfig, ModelConfig, TrainingConfig
from roll_td.config.schema import ConfigError, Problem
from roll_td.config.strategies import StrategyArgs
from roll_td.config.trackers import TrackersConfig

MOST_TIMEOUT_S = 36_500 * 86_400
"""gloo waits for ever where its timeout overflows: 36,500 days were tried and are fine."""
NODE_TIMEOUTS_S = range(5, 32_768)
"""What the kernel can count in its keepalive of a connection."""


@dataclass
class WorkerConfig:
    """One role: the workers of one Cluster. A subclass that checks more calls
    super().__post_init__() first; problems come as one ConfigError, one per line."""

    name: str | None = None
    """Name of the role; None: the name of its field in the pipeline's config."""
    worker_cls: str | None = None
    """Dotted path of the Worker class."""
    device_mapping: list[int] | str | int | None = None
    """Devices of the role: a list, a number, 0-7, 0-3,6 or list(range(0, 8)); read into a list.
    None: a role on CPUs."""
    num_gpus_per_worker: int = 1
    """Devices of one worker, consecutive in device_mapping."""
    world_size: int | None = None
    """Number of workers. A role with devices derives it, a role on CPUs gives it."""
    timeout_s: float = 1800.0
    """Seconds after which a collective of this role fails."""
    strategy_args: StrategyArgs | None = None
    """The backend; None: the Worker class has no use for one."""
    model: ModelConfig | None = None
    """The role's model; None: that of the pipeline, if it has one."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """For a role that trains."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """For a role that generates."""

    def __post_init__(self) -> None:
        problems = [
            *_count(self, "num_gpus_per_worker"),
            *_timeout(self, "timeout_s"),
            *([] if self.world_size is None else _count(self, "world_size")),
        ]
        if self.device_mapping is not None:
            given = shown("device_mapping", self.device_mapping)
            try:
                self.device_mapping = parse_device_mapping(self.device_mapping)
            except ValueError as error:
                rule, _, fix = str(error).partition("; ")
                problems.append(Problem("device_mapping", given, rule, fix))
        if not problems:
            problems = self._derive_world_size()
        if problems:
            raise ConfigError(problems)

    def _derive_world_size(self) -> list[Problem]:
        devices, per_worker, given = self.device_mapping, self.num_gpus_per_worker, self.world_size
        if not isinstance(devices, list):
            rule, fix = "needs a device_mapping", "leave it out for a role on CPUs"
            wrong = Problem("num_gpus_per_worker", str(per_worker), rule, fix)
            return [] if per_worker == 1 else [wrong]
        if len(devices) % per_worker:
            rule = f"does not divide the {len(devices)} devices of device_mapping"
            fix = "give each worker the same number of devices"
            return [Problem("num_gpus_per_worker", str(per_worker), rule, fix)]
        self.world_size = len(devices) // per_worker
        if given in (None, self.world_size):
            return []
        rule = f"{len(devices)} devices, {per_worker} to a worker, make {self.world_size} workers"
        return [Problem("world_size", str(given), rule, "leave it out")]


@dataclass(frozen=True)
class JobSize:
    """How many ranks a job has."""

    num_nodes: int
    """Nodes."""
    num_gpus_per_node: int
    """Device ranks of a node."""
    num_cpu_ranks_per_node: int
    """Further ranks of a node, the driver's included."""

    @property
    def ranks_per_node(self) -> int:
        """Processes to start on each node."""
        return self.num_gpus_per_node + self.num_cpu_ranks_per_node


@dataclass
class BaseConfig(CheckpointConfig):
    """What every pipeline is given. A pipeline's own config subclasses it; its __post_init__
    calls super().__post_init__(), having set before what the sizes derive from."""

    pipeline_cls: str | None = None
    """Dotted path of the Pipeline class."""
    config_cls: str | None = None
    """Dotted path of the config class; None: the pipeline class says it."""
    exp_name: str | None = None
    """Name of the run; None: the file name of the config."""
    output_dir: str = "runs"
    """Directory in which each run has its own."""
    seed: int = 42
    """The seed all others derive from."""
    num_nodes: int = 1
    """Nodes of the job."""
    num_gpus_per_node: int | None = None
    """Device ranks of a node. None: on one node, as many as the roles use."""
    num_cpu_ranks_per_node: int | None = None
    """Ranks of a node without a device. None: the driver's and enough for the CPU roles."""
    device_memory_gb: float | None = None
    """What the roles on a device may take of its memory together, by the estimate of `check`, in
    units of 2^30 bytes. None: as much as they want."""
    transfer_timeout_s: float = 1800.0
    """Seconds after which a transfer of data between driver and workers fails."""
    node_timeout_s: int = 30
    """Seconds after which a machine that answers nothing is lost, and the job with it: its network
    is cut, its kernel hangs. A rank that computes, or is stopped, is none: its kernel answers."""
    trackers: TrackersConfig = field(default_factory=TrackersConfig)
    """Where metrics go beside the run directory and the terminal."""

    def __post_init__(self) -> None:
        sections = role_sections(vars(self))
        problems = [*_timeout(self, "transfer_timeout_s"), *_same_names(sections)]
        if self.node_timeout_s not in NODE_TIMEOUTS_S:
            rule, fix = "must be from 5 to 32767 seconds", "leave it out for the default"
            problems.append(Problem("node_timeout_s", repr(self.node_timeout_s), rule, fix))
        if self.device_memory_gb is not None and self.device_memory_gb <= 0:
            rule, fix = "must be above 0", "leave it out to have no limit"
            problems.append(Problem("device_memory_gb", repr(self.device_memory_gb), rule, fix))
        problems += self.checkpoint_problems()
        given = (self.num_nodes, self.num_gpus_per_node, self.num_cpu_ranks_per_node)
        try:
            size = job_size(sections.values(), *given)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        if problems:
            raise ConfigError(problems)
        self.num_gpus_per_node = size.num_gpus_per_node
        self.num_cpu_ranks_per_node = size.num_cpu_ranks_per_node

    def optimizer_steps(self, role: str) -> int | None:
        """Optimiser steps that a role takes in the whole run, which schedules of the learning rate
        end after: the max_steps of a subclass; None: not known."""
        return getattr(self, "max_steps", None)

    def outside_problems(self) -> list[Problem]:
        """What the config names and is not to be had here: files, folders to write to, functions of
        the user's own. Asked by `roll-td check` and `run`; a subclass that names files adds to it.
        """
        problems = self.resume_problems(self.run_dir / "checkpoints")
        problems += _unwritable("output_dir", self.run_dir)
        export_dir = getattr(self, "export_dir", None)
        problems += [] if export_dir is None else _unwritable("export_dir", Path(export_dir))
        for key, function in functions_in(self):
            problems += [problem.under(key) for problem in function.own_problems()]
        return problems

    @property
    def run_dir(self) -> Path:
        """The run's own directory."""
        return Path(self.output_dir) / (self.exp_name or "run")


def roles(config: BaseConfig) -> dict[str, WorkerConfig]:
    """The roles by name: fields that are a WorkerConfig or a dict of them.

    Raises ConfigError if two have the same name.
    """
    sections = role_sections(vars(config))
    problems = _same_names(sections)
    if problems:
        raise ConfigError(problems)
    return {str(role.name): role for role in sections.values()}


def role_sections(fields: Mapping[str, object]) -> dict[str, WorkerConfig]:
    """The roles among `fields` by dotted key; a role without a name gets its key's last part."""
    found: dict[str, WorkerConfig] = {}
    for field_name, value in fields.items():
        if isinstance(value, WorkerConfig):
            value.name = value.name or field_name
            found[field_name] = value
        elif isinstance(value, dict):
            for key, role in value.items():
                if isinstance(role, WorkerConfig):
                    role.name = role.name or str(key)
                    found[f"{field_name}.{key}"] = role
    return found


def job_size(
    roles: Iterable[WorkerConfig],
    num_nodes: int = 1,
    num_gpus_per_node: int | None = None,
    num_cpu_ranks_per_node: int | None = None,
) -> JobSize:
    """The size of a job for `roles`; what is None is derived. Raises ConfigError."""
    roles = list(roles)
    given = JobSize(num_nodes, num_gpus_per_node or 0, num_cpu_ranks_per_node or 0)
    problems = [
        *_count(given, "num_nodes"),
        *_count(given, "num_gpus_per_node", least=0),
        *_count(given, "num_cpu_ranks_per_node", least=0),
    ]
    mappings = [role.device_mapping for role in roles]
    devices = [d for mapping in mappings if isinstance(mapping, list) for d in mapping]
    if num_gpus_per_node is None and num_nodes > 1 and devices:
        fix = f"set the device ranks of a node; the roles use devices up to {max(devices)}"
        rule = f"is needed with num_nodes={num_nodes}"
        problems.append(Problem("num_gpus_per_node", "", rule, fix))
    if problems:
        raise ConfigError(problems)
    derived_gpus = max(devices, default=-1) + 1
    gpus = derived_gpus if num_gpus_per_node is None else num_gpus_per_node
    derived_cpus = cpu_ranks_per_node(roles, num_nodes)
    cpus = derived_cpus if num_cpu_ranks_per_node is None else num_cpu_ranks_per_node
    if gpus + cpus == 0:
        rule = "leaves a node without any rank"
        fix = "leave it out to have it derived"
        raise ConfigError([Problem("num_cpu_ranks_per_node", str(cpus), rule, fix)])
    return JobSize(num_nodes, gpus, cpus)


def cpu_ranks_per_node(roles: Iterable[WorkerConfig], num_nodes: int) -> int:
    """CPU ranks of a node: the driver's, and one for each worker of the largest CPU role."""
    sizes = [role.world_size or 0 for role in roles if role.device_mapping is None]
    return max(1, -(-(max(sizes, default=0) + 1) // num_nodes))


def _same_names(sections: Mapping[str, WorkerConfig]) -> list[Problem]:
    first: dict[str, str] = {}
    problems = []
    for section, role in sections.items():
        other = first.setdefault(str(role.name), section)
        if other != section:
            rule = f"is the name of section {other} too"
            fix = "give each role its own name"
            problems.append(Problem(f"{section}.name", repr(role.name), rule, fix))
    return problems


def _unwritable(key: str, folder: Path) -> list[Problem]:
    """A problem if nothing can be written into a folder, which is made where there is none."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return []
    rule = f"{there} is {'not to be written to' if there.is_dir() else 'no folder'}"
    return [Problem(key, repr(str(folder)), rule, "name a folder of yours")]


def _count(owner: object, name: str, least: int = 1) -> list[Problem]:
    """A problem if field `name` is not a whole number of at least `least`."""
    value = getattr(owner, name)
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return []
    rule = f"must be a whole number of at least {least}"
    return [Problem(name, repr(value), rule, "leave it out for the default")]


def _timeout(owner: object, name: str) -> list[Problem]:
    """A problem if field `name` is no time that torch.distributed can wait for."""
    value = getattr(owner, name)
    if isinstance(value, int | float) and 0 < value <= MOST_TIMEOUT_S:
        return []
    rule = f"must be above 0 and at most {MOST_TIMEOUT_S} seconds (100 years)"
    return [Problem(name, repr(value), rule, "leave it out for the default")]
