"""From parallel degrees to worker ranks: pure arithmetic, known before any process starts.

A role's workers are numbered so that neighbours in a tensor-parallel group are neighbours in
rank, and pipeline stages lie furthest apart, as in Megatron:

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank

Ranks here are worker ranks, 0 to world_size - 1 of one role; no global rank appears.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from roll_td.config.base import WorkerConfig

RankTuples = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Topology:
    """How a role's workers are split.

    Raises ValueError for a degree or a micro-batch size that is not an integer of at least 1.
    """

    dp: int = 1
    """Data-parallel replicas; cp is not counted in."""
    tp: int = 1
    """Tensor-parallel degree."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Context-parallel degree."""
    steps_together: bool = False
    """True: the ranks meet in collectives at each micro-batch, so all need equally many."""
    micro_batch_size: int | None = None
    """Rows of one micro-batch; None: all rows of a dp rank in one."""
    micro_batch_tokens: int | None = None
    """Instead: real tokens of one micro-batch, rows balanced over dp ranks by their lengths."""
    shard: int | None = None
    """Neighbouring dp ranks that hold one copy of the model between them, where those are not all
    of them (hybrid sharding). Only without tp, pp and cp."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp"):
            _check_positive(name, getattr(self, name), "leave it out to get 1")
        if self.shard is not None:
            way_out = "leave it out to shard over all dp ranks"
            _check_positive("shard", self.shard, way_out)
            if self.dp % self.shard or self.dp != self.world_size:
                raise ValueError(
                    f"Topology: shard={self.shard} must divide dp={self.dp}, and there must be "
                    f"no tp, pp or cp beside it; {way_out}"
                )
        if self.micro_batch_size is not None:
            way_out = "leave it out to get one micro-batch per dp rank"
            _check_positive("micro_batch_size", self.micro_batch_size, way_out)

    @property
    def world_size(self) -> int:
        """Number of workers: dp * tp * pp * cp."""
        return self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True)
class RankInfo:
    """Where one worker stands in its role."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int

    @property
    def is_first(self) -> bool:
        """The worker that receives its dp rank's rows and passes them on: tp = cp = pp = 0."""
        return self.tp_rank == self.cp_rank == self.pp_rank == 0

    @property
    def is_collecting(self) -> bool:
        """The worker that answers for its dp rank: tp = cp = 0 on the last pipeline stage."""
        return self.tp_rank == self.cp_rank == 0 and self.pp_rank == self.pp_size - 1


def data_parallel(world_size: int) -> Topology:
    """The topology of a role without a strategy: every worker is a dp rank."""
    return Topology(dp=world_size)


def apart(config: WorkerConfig) -> Topology:
    """The topology of a strategy whose workers have nothing to do with each other."""
    return data_parallel(_workers(config))


def together(config: WorkerConfig) -> Topology:
    """The topology of FSDP: every worker is a dp rank, and all meet at each micro-batch."""
    assert config.strategy_args is not None
    shard = config.strategy_args.settings.fsdp_size
    dp, micro = _workers(config), config.training.micro_batch_size
    tokens = config.training.max_tokens_per_micro_batch
    return Topology(
        dp=dp,
        steps_together=True,
        micro_batch_size=micro,
        micro_batch_tokens=tokens,
        shard=shard,
    )


def _workers(config: WorkerConfig) -> int:
    if config.world_size is None:
        raise ValueError(
            f"role {config.name} has no world_size; "
            "set device_mapping for a role on devices, world_size for one on CPUs"
        )
    return config.world_size


def _is_hybrid(topology: Topology) -> bool:
    return topology.shard is not None and topology.shard < topology.dp


def rank_infos(topology: Topology) -> tuple[RankInfo, ...]:
    """The RankInfo of every worker, in rank order."""
    dp, tp, pp, cp = topology.dp, topology.tp, topology.pp, topology.cp
    places = product(range(pp), range(dp), range(cp), range(tp))
    return tuple(
        RankInfo(
            rank=rank,
            world_size=topology.world_size,
            dp_rank=dp_rank,
            dp_size=dp,
            tp_rank=tp_rank,
            tp_size=tp,
            pp_rank=pp_rank,
            pp_size=pp,
            cp_rank=cp_rank,
            cp_size=cp,
        )
        for rank, (pp_rank, dp_rank, cp_rank, tp_rank) in enumerate(places)
    )


def role_groups(topology: Topology) -> dict[str, RankTuples]:
    """The worker ranks of every process group of a role, by name, in one fixed order.

    'dp', 'tp', 'pp', 'cp' (each only if its degree exceeds 1): groups along that dimension,
    members in order of their rank in it. 'mp' (only if it has more than one member): all
    workers of a dp rank, the one that is_first at its head. 'shard', 'replicate' (only where dp
    ranks hold several copies of the model): those of one copy, and the same part of each copy.
    'world': all workers.
    """
    ranks = np.arange(topology.world_size)
    grid = ranks.reshape(topology.pp, topology.dp, topology.cp, topology.tp)
    axes = {"dp": 1, "tp": 3, "pp": 0, "cp": 2}
    groups = {
        name: _rows(np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]))
        for name, axis in axes.items()
        if grid.shape[axis] > 1
    }
    if topology.dp < topology.world_size:
        groups["mp"] = _rows(np.moveaxis(grid, 1, 0).reshape(topology.dp, -1))
    if _is_hybrid(topology):
        copies = ranks.reshape(-1, topology.shard or 1)
        groups |= {"replicate": _rows(copies.T), "shard": _rows(copies)}
    groups["world"] = (tuple(ranks.tolist()),)
    return groups


def mesh_shape(topology: Topology) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes of the role's device mesh: degrees above 1, slowest (pp) first.

    A mesh over ranks 0 to world_size - 1 in that shape has the groups of `role_groups`. A role
    of one worker has the mesh ('dp',), (1,); one with several copies of the model
    ('replicate', 'shard').
    """
    if _is_hybrid(topology):
        shard = topology.shard or 1
        return ("replicate", "shard"), (topology.dp // shard, shard)
    sizes = {"pp": topology.pp, "dp": topology.dp, "cp": topology.cp, "tp": topology.tp}
    kept = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
    return tuple(kept), tuple(kept.values())


def _rows(grid: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> RankTuples:
    return tuple(tuple(row) for row in grid.tolist())


def _check_positive(name: str, value: object, way_out: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"Topology: {name}={value!r} must be an integer of at least 1; {way_out}")
