"""Where workers find themselves: ranks, devices, groups in role order, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from roll_td import Cluster, DataProto, Dispatch, Topology, Worker, WorkerConfig, register
from roll_td.placement import planned_places
from roll_td.runtime.cluster import ResourceManager
from roll_td.runtime.inprocess import LocalJob
from roll_td.runtime.transport import LocalTransport, Ranks

MakeRole = Callable[..., Cluster]


class Where(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def am_i(self) -> dict[str, Any]:
        """A LocalJob's groups are the global ranks of their members."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "groups": self.groups,
            "devices": self.context.devices,
            "physical": self.context.physical_devices,
            "device": self.device.type,
            "port": self.master_port,
            "addr": self.master_addr,
            "logger": self.logger.name,
        }

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def rows(self, data: DataProto) -> DataProto:
        return DataProto(None, {"who": [self.local_rank] * len(data)})


class Cube(Where):
    @classmethod
    def topology(cls, worker_config: WorkerConfig) -> Topology:
        return Topology(dp=2, tp=2)


def test_groups_have_the_roles_own_order_wherever_it_sits(role: MakeRole) -> None:  # B12
    for devices in ([2, 3], [3, 1], [0]):
        cluster = role(Where, name=f"r{devices}", device_mapping=devices)
        found = cluster.am_i()
        assert [f["rank"] for f in found] == list(range(len(devices)))
        assert [f["local_rank"] for f in found] == devices
        assert all(f["groups"]["world"] == tuple(devices) for f in found)
        assert all(f["groups"].get("dp", tuple(devices)) == tuple(devices) for f in found)
        assert [f["logger"] for f in found] == [f"r{devices}.{i}" for i in range(len(devices))]
        assert len({(f["addr"], f["port"]) for f in found}) == 1
    grid = role(Cube, name="grid", device_mapping=[3, 2, 1, 0])
    groups = [f["groups"] for f in grid.am_i()]
    assert [g["tp"] for g in groups] == [(3, 2), (3, 2), (1, 0), (1, 0)]
    assert [g["dp"] for g in groups] == [(3, 1), (2, 0), (3, 1), (2, 0)]
    assert all(g["world"] == (3, 2, 1, 0) for g in groups)


def test_rows_go_to_workers_in_role_order(role: MakeRole) -> None:  # C01
    cluster = role(Where, name="turned", device_mapping=[3, 0, 2])
    data = DataProto({"x": torch.arange(5)})
    assert cluster.rows(data)["who"].tolist() == [3, 3, 0, 0, 2]
    big = DataProto({"x": torch.zeros(30, 10_000)})
    assert cluster.rows(big)["who"].tolist() == [3] * 10 + [0] * 10 + [2] * 10


def test_every_rank_makes_the_same_groups_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # B10
    made: dict[int, list[Ranks]] = {}

    def record(self: LocalTransport, groups: Any) -> None:
        made.setdefault(self.rank, []).extend(group.ranks for group in groups)

    monkeypatch.setattr(LocalTransport, "make_groups", record)
    with LocalJob(planned_places(1, 5, 1), 1, 5) as job:
        manager = ResourceManager(1, 5)
        roles = {"a": [0, 4], "b": [1, 2], "c": [0, 1, 2, 3, 4]}
        clusters = [
            Cluster(n, Where, manager, WorkerConfig(name=n, device_mapping=d), blocking=False)
            for n, d in roles.items()
        ]
        for cluster in clusters:
            cluster.wait_built()
        job.driver.drain()
    assert set(made) == set(range(6)), "ranks outside a group make it too"
    assert all(groups == made[0] for groups in made.values())
    wanted = [(0, 4), (1, 2), (0, 1, 2, 3, 4)]
    assert [g for g in made[0] if g in wanted] == wanted


@pytest.mark.parametrize(
    ("visible", "physical"),
    [
        ("4,5,6,7", [("4", "5"), ("6", "7")]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", [("GPU-a", "GPU-b"), ("GPU-c", "GPU-d")]),
        ("", [(None, None), (None, None)]),
        ("4,5", [("4", "5"), ("?", "?")]),
    ],
)
def test_a_worker_knows_all_its_devices_and_the_physical_ones(
    role: MakeRole, monkeypatch: pytest.MonkeyPatch, visible: str, physical: list[Any]
) -> None:  # C02, C04
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cluster = role(Where, name="engine", device_mapping="0-3", num_gpus_per_worker=2)
    found = cluster.am_i()
    assert [f["devices"] for f in found] == [(0, 1), (2, 3)]
    assert [f["physical"] for f in found] == physical
    on_cpu = role(Where, name="cpu", device_mapping=None, world_size=1).am_i()
    assert (on_cpu[0]["devices"], on_cpu[0]["physical"], on_cpu[0]["device"]) == ((), (), "cpu")


def test_roles_may_share_ranks_with_each_other_and_with_the_driver() -> None:
    with LocalJob([(0, 0), (0, 1)], 1, 2):  # the driver shares rank 0
        manager = ResourceManager(1, 2)
        cpu = Cluster("cpu", Where, manager, WorkerConfig(name="cpu", world_size=2))
        gpu = Cluster("gpu", Where, manager, WorkerConfig(name="gpu", device_mapping=[1, 0]))
        assert [f["local_rank"] for f in cpu.am_i()] == [0, 1]
        for rows in (0, 1, 3, 20_000):
            data = DataProto({"x": torch.arange(rows)})
            half = (rows + 1) // 2
            assert gpu.rows(data)["who"].tolist() == [1] * half + [0] * (rows - half)
        with pytest.raises(ValueError, match="many has 3 workers on CPUs, the world has 2 ranks"):
            Cluster("many", Where, manager, WorkerConfig(name="many", world_size=3))
