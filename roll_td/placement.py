"""Which worker sits on which rank: arithmetic, before any process starts.

The first num_gpus_per_node local ranks of a node own one device each, further ones are CPU
ranks; device d is local rank d % num_gpus_per_node of node d // num_gpus_per_node. The driver
sits on the first CPU rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from roll_td.config.base import WorkerConfig, cpu_ranks_per_node

__all__ = [
    "RolePlacement",
    "Seat",
    "Slot",
    "WorldLayout",
    "cpu_ranks_per_node",
    "place",
    "placement_table",
    "planned_places",
    "world_layout",
]


@dataclass(frozen=True)
class Slot:
    """Where one rank is."""

    rank: int
    """Global rank."""
    node: int
    """Number of its node."""
    local_rank: int
    """Rank within the node."""
    device: int | None
    """Its device, counted over all nodes; None for a CPU rank."""


@dataclass(frozen=True)
class WorldLayout:
    """All ranks of a job."""

    slots: tuple[Slot, ...]
    """One a rank, by global rank."""
    num_nodes: int
    """Nodes."""
    num_gpus_per_node: int
    """Device ranks of a node."""
    driver_rank: int
    """Global rank of the driver."""

    @cached_property
    def rank_of_device(self) -> dict[int, int]:
        """Device → global rank."""
        return {slot.device: slot.rank for slot in self.slots if slot.device is not None}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but slow."""
        device = self.slots[self.driver_rank].device
        if device is None:
            return ()
        return (
            f"driver shares rank {self.driver_rank} with device {device}, as there is no CPU "
            f"rank; start {self.num_gpus_per_node + 1} ranks on each node",
        )


@dataclass(frozen=True)
class Seat:
    """Where one worker sits."""

    worker: int
    """Rank of the worker in its role."""
    ranks: tuple[int, ...]
    """Global ranks it owns; it lives on the first."""
    devices: tuple[int, ...]
    """Devices it owns; none for a CPU role."""


@dataclass(frozen=True)
class RolePlacement:
    """Where the workers of one role sit."""

    name: str
    """Name of the role."""
    seats: tuple[Seat, ...]
    """One a worker, in rank order."""
    warnings: tuple[str, ...] = ()
    """What is allowed but slow."""


def planned_places(num_nodes: int, gpus: int, cpus: int) -> list[tuple[int, int]]:
    """(node, local rank) by global rank, where each node gets gpus + cpus ranks."""
    return [(node, local) for node in range(num_nodes) for local in range(gpus + cpus)]


def world_layout(
    places: Sequence[tuple[int, int]], num_nodes: int, num_gpus_per_node: int
) -> WorldLayout:
    """The layout of a world whose global rank r is at places[r] = (node, local rank).

    Raises ValueError, saying what to start, unless every node has its device ranks.
    """
    gpus = num_gpus_per_node
    start = f"start at least {max(gpus, 1)} ranks on each of {num_nodes} nodes"
    nodes = sorted({node for node, _ in places})
    if nodes != list(range(num_nodes)):
        raise ValueError(
            f"the ranks run on {len(nodes)} nodes (numbers {nodes}), but num_nodes={num_nodes}; "
            f"set num_nodes={len(nodes)} or {start}"
        )
    for node in nodes:
        local_ranks = sorted(local for other, local in places if other == node)
        if local_ranks != list(range(len(local_ranks))):
            raise ValueError(
                f"node {node} has the local ranks {local_ranks}, they must count from 0 without "
                "gap or repetition; start all ranks of a node with one launcher"
            )
        if len(local_ranks) < gpus:
            raise ValueError(
                f"node {node} has {len(local_ranks)} ranks, its {gpus} devices "
                f"(num_gpus_per_node={gpus}) need one each; {start}, and one more for the driver"
            )
    slots = tuple(
        Slot(rank, node, local, node * gpus + local if local < gpus else None)
        for rank, (node, local) in enumerate(places)
    )
    driver = next((slot.rank for slot in slots if slot.device is None), 0)
    return WorldLayout(slots, num_nodes, gpus, driver)


def place(name: str, role: WorkerConfig, layout: WorldLayout) -> RolePlacement:
    """Seat the workers of a role. Raises ValueError if the world has no room for them."""
    if isinstance(role.device_mapping, list):
        return _place_on_devices(name, role.device_mapping, role.num_gpus_per_worker, layout)
    if role.world_size is None:
        raise ValueError(
            f"{name} has neither device_mapping nor world_size; "
            "set device_mapping for a role on devices, world_size for one on CPUs"
        )
    return _place_on_cpus(name, role.world_size, layout)


def _place_on_devices(
    name: str, devices: list[int], per_worker: int, layout: WorldLayout
) -> RolePlacement:
    ranks = layout.rank_of_device
    outside = [device for device in devices if device not in ranks]
    if outside:
        raise ValueError(
            f"{name} uses devices {outside}, the world has {len(ranks)}, numbered from 0 "
            f"({layout.num_nodes} nodes of num_gpus_per_node={layout.num_gpus_per_node}); "
            "mend device_mapping, or raise num_gpus_per_node or num_nodes"
        )
    seats = []
    for worker in range(len(devices) // per_worker):
        own = tuple(devices[worker * per_worker : (worker + 1) * per_worker])
        nodes = sorted({layout.slots[ranks[device]].node for device in own})
        if len(nodes) > 1:
            raise ValueError(
                f"worker {worker} of {name} has the devices {list(own)} of the nodes {nodes}, and "
                "a worker lives in one process; order device_mapping so that each worker's "
                f"{per_worker} are on one node, or lower num_gpus_per_worker"
            )
        seats.append(Seat(worker, tuple(ranks[device] for device in own), own))
    return RolePlacement(name, tuple(seats))


def _place_on_cpus(name: str, world_size: int, layout: WorldLayout) -> RolePlacement:
    cpu_ranks = _spread_cpu_ranks(layout)
    free = [rank for rank in cpu_ranks if rank != layout.driver_rank]
    device_ranks = [slot.rank for slot in layout.slots if slot.device is not None]
    driver = [layout.driver_rank]
    ranks = [*free, *driver, *(rank for rank in device_ranks if rank not in driver)]
    cpus = -(-(world_size + 1) // layout.num_nodes)
    per_node = layout.num_gpus_per_node + cpus
    start = f"start {per_node} ranks on each node (num_cpu_ranks_per_node={cpus})"
    if world_size > len(ranks):
        raise ValueError(
            f"{name} has {world_size} workers on CPUs, the world has {len(ranks)} ranks, and no "
            f"rank takes two of one role; {start}: {per_node * layout.num_nodes} in all"
        )
    seats = tuple(Seat(worker, (ranks[worker],), ()) for worker in range(world_size))
    sharing = ["the driver"] if world_size > len(free) else []
    if world_size > len(free) + 1:
        sharing.append("devices")
    warning = f"{name} has {world_size} workers on CPUs and shares ranks with "
    warnings = (f"{warning}{' and '.join(sharing)}; {start}",) if sharing else ()
    return RolePlacement(name, seats, warnings)


def _spread_cpu_ranks(layout: WorldLayout) -> list[int]:
    """CPU ranks, the first of every node before the second of any."""
    slots = [slot for slot in layout.slots if slot.device is None]
    return [slot.rank for slot in sorted(slots, key=lambda slot: (slot.local_rank, slot.node))]


def placement_table(
    placements: Sequence[RolePlacement],
    layout: WorldLayout,
    physical: Mapping[int, str] | None = None,
) -> str:
    """The placement as text, a line for each rank of each worker. `physical` names the device
    of the machine behind a device of the job."""
    users: dict[int, list[str]] = {slot.rank: [] for slot in layout.slots}
    users[layout.driver_rank].append("driver")
    for placement in placements:
        for seat in placement.seats:
            for rank in seat.ranks:
                users[rank].append(placement.name)
    rows = [("role", "worker", "rank", "host slot", "device", "shared with")]
    rows.append(_row("driver", "-", layout.driver_rank, layout, users, physical or {}))
    rows += [
        _row(placement.name, str(seat.worker), rank, layout, users, physical or {})
        for placement in placements
        for seat in placement.seats
        for rank in seat.ranks
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (zip(row, widths, strict=True) for row in rows)
    return "\n".join("  ".join(cell.ljust(w) for cell, w in line).rstrip() for line in lines)


def _row(
    role: str,
    worker: str,
    rank: int,
    layout: WorldLayout,
    users: Mapping[int, list[str]],
    physical: Mapping[int, str],
) -> tuple[str, str, str, str, str, str]:
    slot = layout.slots[rank]
    others = ", ".join(user for user in users[rank] if user != role) or "-"
    device = "-" if slot.device is None else str(slot.device)
    if slot.device is not None and physical.get(slot.device, device) != device:
        device = f"{device}→{physical[slot.device]}"
    return role, worker, str(rank), f"node{slot.node}:{slot.local_rank}", device, others
