"""Worker: what a user's role subclasses. And what the runtime tells a worker of its place."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from roll_td.config.base import BaseConfig, WorkerConfig
from roll_td.config.classes import import_object
from roll_td.distributed.topology import RankInfo, Topology, apart, data_parallel, rank_infos
from roll_td.runtime.dispatch import Dispatch, register

MeshSpec = tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""Names and sizes of the dimensions, and the global ranks of the workers in role order."""


@dataclass(frozen=True)
class WorkerContext:
    """Where one worker is, and with whom it can talk."""

    role: str
    """Name of the role."""
    rank: int
    """Rank in the role."""
    world_size: int
    """Workers of the role."""
    rank_info: RankInfo
    """Place in the role's topology."""
    local_rank: int
    """Rank of its process within the node."""
    host: str
    """Name of its machine."""
    groups: dict[str, Any]
    """The role's process groups that it is in, by name as role_groups has them."""
    mesh_spec: MeshSpec
    """What its device mesh is made of, beside the groups."""
    device: torch.device
    """Its device, the first if it has several; the CPU for a CPU role."""
    devices: tuple[int, ...]
    """Devices it owns, counted over all nodes."""
    physical_devices: tuple[str | None, ...]
    """For each device the one of the machine behind it; None if no list of visible ones is set."""
    master_addr: str
    """Host of the role's worker 0."""
    master_port: int
    """A port on it for the role's own use."""

    @classmethod
    def alone(cls) -> WorkerContext:
        """That of a worker made by hand, outside a job: the only one of its role, on the CPU."""
        (info,) = rank_infos(data_parallel(1))
        return cls(
            role="worker",
            rank=0,
            world_size=1,
            rank_info=info,
            local_rank=0,
            host=socket.gethostname(),
            groups={},
            mesh_spec=(("dp",), (1,), (0,)),
            device=torch.device("cpu"),
            devices=(),
            physical_devices=(),
            master_addr="127.0.0.1",
            master_port=0,
        )


class Worker:
    """One worker of a role. Methods marked with @register are what its Cluster can call.

    A subclass that has an `__init__` or `initialize` calls that of super() first, and marks an
    `initialize` of its own with @register again.
    """

    def __init__(self, worker_config: WorkerConfig) -> None:
        context = self.context
        self.rank: int = context.rank
        self.world_size: int = context.world_size
        self.local_rank: int = context.local_rank
        self.rank_info: RankInfo = context.rank_info
        self.groups: dict[str, Any] = context.groups
        self.device: torch.device = context.device
        self.master_addr: str = context.master_addr
        self.master_port: int = context.master_port
        self.worker_config = worker_config
        self.pipeline_config: BaseConfig | None = None
        self.strategy: Any = None
        self.logger = logging.getLogger(f"{context.role}.{context.rank}")

    @cached_property
    def context(self) -> WorkerContext:
        """Its place in the job. The runtime sets it before `__init__`; made by hand it is alone."""
        return WorkerContext.alone()

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The role's device mesh, over the groups there are: making it talks to nobody."""
        names, shape, ranks = self.context.mesh_spec
        if not self.groups:
            raise ValueError(
                f"worker {self.context.role}.{self.rank} has no process groups, so no mesh; "
                "a Cluster gives its workers both"
            )
        groups = [self.groups["world" if self.world_size == 1 else name] for name in names]
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=names)
        grid = torch.tensor(ranks).view(shape)
        return DeviceMesh.from_group(groups, self.device.type, mesh=grid, mesh_dim_names=names)

    @classmethod
    def topology(cls, worker_config: WorkerConfig) -> Topology:
        """How the workers of a role are split: as its strategy says, each for itself without one.
        Pure: it is asked before they exist."""
        if worker_config.strategy_args is None:
            return apart(worker_config)
        topology: Topology = import_object(worker_config.strategy_args.row.topology)(worker_config)
        return topology

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: BaseConfig) -> None:
        """Keep the pipeline's config; a subclass makes here what takes long to make."""
        self.pipeline_config = pipeline_config
