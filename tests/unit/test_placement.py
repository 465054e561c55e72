"""Placement arithmetic, without processes."""

from __future__ import annotations

import time

import pytest

from roll_td.config.base import WorkerConfig
from roll_td.placement import (
    RolePlacement,
    WorldLayout,
    place,
    placement_table,
    planned_places,
    world_layout,
)


def _layout(nodes: int, gpus: int, cpus: int) -> WorldLayout:
    return world_layout(planned_places(nodes, gpus, cpus), nodes, gpus)


def _ranks(placement: RolePlacement) -> list[tuple[int, ...]]:
    return [seat.ranks for seat in placement.seats]


def test_device_and_cpu_ranks_of_two_nodes() -> None:
    layout = _layout(2, 4, 1)
    assert [slot.device for slot in layout.slots] == [0, 1, 2, 3, None, 4, 5, 6, 7, None]
    assert [slot.local_rank for slot in layout.slots] == [0, 1, 2, 3, 4] * 2
    assert layout.driver_rank == 4
    assert layout.warnings == ()


def test_driver_without_a_cpu_rank_shares_rank_0() -> None:
    layout = _layout(1, 2, 0)
    assert layout.driver_rank == 0
    assert layout.warnings == (
        "driver shares rank 0 with device 0, as there is no CPU rank; start 3 ranks on each node",
    )


def test_ranks_in_any_order_over_nodes() -> None:
    layout = world_layout([(1, 0), (0, 1), (0, 0), (1, 1)], 2, 1)
    assert layout.rank_of_device == {0: 2, 1: 0}
    assert layout.driver_rank == 1


@pytest.mark.parametrize(
    ("places", "nodes", "gpus", "message"),
    [
        ([(0, 0), (0, 1)], 1, 4, r"node 0 has 2 ranks, its 4 devices .* start at least 4 ranks"),
        ([(0, 0), (0, 1), (1, 0)], 2, 2, "node 1 has 1 ranks, its 2 devices"),
        ([(0, 0), (0, 1)], 2, 1, "the ranks run on 1 nodes .* but num_nodes=2; set num_nodes=1"),
        ([(0, 0), (1, 0)], 1, 1, "the ranks run on 2 nodes"),
        ([(0, 0), (0, 2)], 1, 1, r"node 0 has the local ranks \[0, 2\]"),
        ([(0, 0), (0, 0)], 1, 1, r"node 0 has the local ranks \[0, 0\]"),
    ],
)
def test_worlds_that_do_not_fit(
    places: list[tuple[int, int]], nodes: int, gpus: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        world_layout(places, nodes, gpus)


def test_c01_disjoint_roles_are_where_they_were_put() -> None:
    layout = _layout(1, 8, 1)
    train = place("train", WorkerConfig(device_mapping=[0, 1]), layout)
    infer = place("infer", WorkerConfig(device_mapping="2-7"), layout)
    assert _ranks(train) == [(0,), (1,)]
    assert _ranks(infer) == [(2,), (3,), (4,), (5,), (6,), (7,)]
    devices = [{d for seat in p.seats for d in seat.devices} for p in (train, infer)]
    assert devices[0] & devices[1] == set()
    assert devices[0] | devices[1] == set(range(8))
    shared = [line.split()[-1] for line in placement_table([train, infer], layout).splitlines()]
    assert shared[1:] == ["-"] * 9


def test_c02_table_shows_logical_and_physical_devices() -> None:
    layout = _layout(1, 2, 1)
    role = place("actor", WorkerConfig(device_mapping=[0, 1]), layout)
    physical = {0: "4", 1: "5"}
    assert placement_table([role], layout, physical).splitlines() == [
        "role    worker  rank  host slot  device  shared with",
        "driver  -       2     node0:2    -       -",
        "actor   0       0     node0:0    0→4     -",
        "actor   1       1     node0:1    1→5     -",
    ]
    assert "→" not in placement_table([role], layout, {0: "0", 1: "1"})


def test_c04_a_worker_owns_all_its_devices() -> None:
    layout = _layout(2, 4, 1)
    role = WorkerConfig(device_mapping=[2, 3, 7, 4], num_gpus_per_worker=2)
    seats = place("engine", role, layout).seats
    assert [seat.devices for seat in seats] == [(2, 3), (7, 4)]
    assert [seat.ranks for seat in seats] == [(2, 3), (8, 5)]


def test_a_worker_does_not_span_nodes() -> None:
    role = WorkerConfig(device_mapping=[2, 3, 7, 0], num_gpus_per_worker=2)
    with pytest.raises(ValueError, match=r"worker 1 of x has the devices \[7, 0\] of the nodes"):
        place("x", role, _layout(2, 4, 1))


def test_a_world_of_10_000_devices_is_placed_at_once() -> None:
    layout = _layout(1250, 8, 1)
    began = time.perf_counter()
    train = place("train", WorkerConfig(device_mapping="0-9999", num_gpus_per_worker=8), layout)
    cpus = place("env", WorkerConfig(world_size=1249), layout)
    assert time.perf_counter() - began < 3
    assert train.seats[-1].ranks == tuple(range(11241, 11249)) and cpus.warnings == ()
    assert len({seat.ranks for seat in cpus.seats}) == 1249


def test_shared_devices_show_in_the_table() -> None:
    layout = _layout(1, 2, 0)
    roles = [
        place("a", WorkerConfig(device_mapping=[0, 1]), layout),
        place("b", WorkerConfig(device_mapping=[1]), layout),
    ]
    rows = [line.split(maxsplit=5) for line in placement_table(roles, layout).splitlines()[1:]]
    assert [(row[0], row[2], row[5]) for row in rows] == [
        ("driver", "0", "a"),
        ("a", "0", "driver"),
        ("a", "1", "b"),
        ("b", "1", "a"),
    ]


def test_device_outside_the_world() -> None:
    with pytest.raises(ValueError, match=r"x uses devices \[2, 9\], the world has 2"):
        place("x", WorkerConfig(device_mapping=[0, 2, 9]), _layout(1, 2, 1))


def test_cpu_role_is_spread_over_nodes_beside_the_driver() -> None:
    layout = _layout(2, 2, 2)
    assert layout.driver_rank == 2
    placement = place("reward", WorkerConfig(world_size=3), layout)
    assert _ranks(placement) == [(6,), (3,), (7,)]
    assert placement.warnings == ()


@pytest.mark.parametrize(
    ("size", "ranks", "shares"),
    [
        (1, [3], []),
        (2, [3, 2], ["with the driver;"]),
        (3, [3, 2, 0], ["the driver and devices;"]),
        (4, [3, 2, 0, 1], ["the driver and devices;"]),
    ],
)
def test_cpu_role_shares_where_it_must(size: int, ranks: list[int], shares: list[str]) -> None:
    placement = place("env", WorkerConfig(world_size=size), _layout(1, 2, 2))
    assert _ranks(placement) == [(rank,) for rank in ranks]
    assert len(placement.warnings) == len(shares)
    for warning, share in zip(placement.warnings, shares, strict=True):
        assert share in warning
        assert f"num_cpu_ranks_per_node={size + 1}" in warning


def test_cpu_role_in_a_world_of_device_ranks_only() -> None:
    placement = place("env", WorkerConfig(world_size=2), _layout(1, 2, 0))
    assert _ranks(placement) == [(0,), (1,)]
    assert "the driver and devices" in placement.warnings[0]


def test_cpu_role_with_more_workers_than_ranks() -> None:
    message = (
        "env has 5 workers on CPUs, the world has 4 ranks, .*; "
        r"start 8 ranks on each node \(num_cpu_ranks_per_node=6\): 8 in all"
    )
    with pytest.raises(ValueError, match=message):
        place("env", WorkerConfig(world_size=5), _layout(1, 2, 2))


def test_a_role_without_a_size() -> None:
    with pytest.raises(ValueError, match="x has neither device_mapping nor world_size"):
        place("x", WorkerConfig(), _layout(1, 1, 1))
