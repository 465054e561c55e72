from itertools import product

import pytest

from roll_td.distributed.topology import (
    RankInfo,
    Topology,
    data_parallel,
    mesh_shape,
    rank_infos,
    role_groups,
)

LAYOUTS = [
    Topology(dp=dp, tp=tp, pp=pp, cp=cp)
    for dp, tp, pp, cp in product(range(1, 9), repeat=4)
    if dp * tp * pp * cp <= 8
]
every_layout = pytest.mark.parametrize(
    "topology", LAYOUTS, ids=lambda t: f"dp{t.dp}tp{t.tp}pp{t.pp}cp{t.cp}"
)


@every_layout
def test_infos_follow_the_formula(topology: Topology) -> None:
    infos = rank_infos(topology)
    assert [info.rank for info in infos] == list(range(topology.world_size))
    for info in infos:
        stage_and_replica = info.pp_rank * info.dp_size + info.dp_rank
        place = (stage_and_replica * info.cp_size + info.cp_rank) * info.tp_size + info.tp_rank
        assert info.rank == place
        sizes = Topology(dp=info.dp_size, tp=info.tp_size, pp=info.pp_size, cp=info.cp_size)
        assert sizes == topology
        assert info.world_size == topology.world_size


@every_layout
def test_each_kind_of_group_partitions_the_ranks(topology: Topology) -> None:
    groups = role_groups(topology)
    expected = {name for name in ("dp", "tp", "pp", "cp") if getattr(topology, name) > 1}
    expected |= {"mp"} if topology.world_size > topology.dp else set()
    assert set(groups) == expected | {"world"}
    for members in groups.values():
        assert sorted(rank for group in members for rank in group) == list(
            range(topology.world_size)
        )
    assert groups["world"] == (tuple(range(topology.world_size)),)


@every_layout
def test_members_differ_only_along_their_dimension(topology: Topology) -> None:
    infos = rank_infos(topology)
    for name in {"dp", "tp", "pp", "cp"} & set(role_groups(topology)):
        others = {"dp", "tp", "pp", "cp"} - {name}
        for group in role_groups(topology)[name]:
            along = [getattr(infos[rank], f"{name}_rank") for rank in group]
            assert along == list(range(getattr(topology, name)))
            for other in others:
                assert len({getattr(infos[rank], f"{other}_rank") for rank in group}) == 1


@every_layout
def test_model_parallel_group_is_one_dp_rank_with_its_first_worker_ahead(
    topology: Topology,
) -> None:
    infos = rank_infos(topology)
    for dp_rank, group in enumerate(role_groups(topology).get("mp", ())):
        assert {infos[rank].dp_rank for rank in group} == {dp_rank}
        assert [infos[rank].is_first for rank in group] == [True] + [False] * (len(group) - 1)


@every_layout
def test_one_first_and_one_collecting_worker_per_dp_rank(topology: Topology) -> None:
    infos = rank_infos(topology)
    dp_ranks = list(range(topology.dp))
    assert sorted(info.dp_rank for info in infos if info.is_first) == dp_ranks
    collecting = [info for info in infos if info.is_collecting]
    assert sorted(info.dp_rank for info in collecting) == dp_ranks
    assert all((i.tp_rank, i.cp_rank, i.pp_rank) == (0, 0, topology.pp - 1) for i in collecting)


@every_layout
def test_mesh_multiplies_to_the_world(topology: Topology) -> None:
    names, shape = mesh_shape(topology)
    size = 1
    for name, degree in zip(names, shape, strict=True):
        assert degree == getattr(topology, name)
        size *= degree
    assert size == topology.world_size


def test_a_layout_written_out() -> None:
    topology = Topology(dp=2, tp=2, pp=2)
    assert rank_infos(topology)[6] == RankInfo(6, 8, 1, 2, 0, 2, 1, 2, 0, 1)
    assert role_groups(topology) == {
        "dp": ((0, 2), (1, 3), (4, 6), (5, 7)),
        "tp": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "pp": ((0, 4), (1, 5), (2, 6), (3, 7)),
        "mp": ((0, 1, 4, 5), (2, 3, 6, 7)),
        "world": ((0, 1, 2, 3, 4, 5, 6, 7),),
    }
    assert mesh_shape(topology) == (("pp", "dp", "tp"), (2, 2, 2))


def test_group_members_are_plain_ints() -> None:
    groups = role_groups(Topology(dp=2, tp=2))
    members = [rank for name in groups for group in groups[name] for rank in group]
    assert {type(rank) for rank in members} == {int}


def test_data_parallel_and_a_single_worker() -> None:
    assert data_parallel(5) == Topology(dp=5)
    assert data_parallel(5).world_size == 5
    assert mesh_shape(Topology()) == (("dp",), (1,))
    assert role_groups(Topology()) == {"world": ((0,),)}


@pytest.mark.parametrize("name", ["dp", "tp", "pp", "cp", "micro_batch_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
def test_wrong_degrees_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} must be an integer of at least 1"):
        Topology(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("shard", [1, 2])
def test_hybrid_sharding_has_copies_of_the_model(shard: int) -> None:
    topology = Topology(dp=4, shard=shard)
    groups = role_groups(topology)
    copies = {1: ((0,), (1,), (2,), (3,)), 2: ((0, 1), (2, 3))}[shard]
    assert groups["shard"] == copies
    assert groups["replicate"] == tuple(zip(*copies, strict=True))
    assert mesh_shape(topology) == (("replicate", "shard"), (4 // shard, shard))


def test_one_copy_of_the_model_is_no_hybrid() -> None:
    assert "shard" not in role_groups(Topology(dp=4, shard=4))
    assert mesh_shape(Topology(dp=4, shard=4)) == (("dp",), (4,))


def test_copies_of_a_model_have_equal_parts() -> None:
    with pytest.raises(ValueError, match="shard=3 must divide dp=4"):
        Topology(dp=4, shard=3)
