"""How ranks meet: each a thread here, over a store of this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from roll_td.config.base import BaseConfig
from roll_td.distributed.world import World
from roll_td.runtime import rendezvous
from roll_td.runtime.control import Kind
from roll_td.runtime.rendezvous import (
    Meeting,
    RankPlace,
    SealedStore,
    meet,
    open_channel,
    refuse,
)


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_ERROR_FILE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def worlds(*nodes: int) -> list[World]:
    """A world whose nodes have so many ranks each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = [(node, local) for node, count in enumerate(nodes) for local in range(count)]
    return [
        World(
            rank,
            len(where),
            local,
            nodes[node],
            node,
            len(nodes),
            "127.0.0.1",
            port,
            "user",
            False,
            0,
        )
        for rank, (node, local) in enumerate(where)
    ]


def at_once(worlds: list[World], *each: Callable[[World], Any]) -> list[Any]:
    """What each rank's function gives; the last one is that of all further ranks."""
    actions = [*each, *[each[-1]] * (len(worlds) - len(each))]
    with ThreadPoolExecutor(len(worlds)) as pool:
        futures = [
            pool.submit(action, world) for action, world in zip(actions, worlds, strict=True)
        ]
        return [future.result(30) for future in futures]


def config(**given: Any) -> BaseConfig:
    return BaseConfig(**({"num_gpus_per_node": 1} | given))


def test_all_ranks_learn_the_same_places_and_layout() -> None:
    met = at_once(worlds(2, 1), lambda world: meet(world, config(num_nodes=2)))
    assert all(isinstance(m, Meeting) for m in met)
    places = met[0].places
    assert [(p.node, p.local_rank) for p in places] == [(0, 0), (0, 1), (1, 0)]
    assert all(m.places == places and m.layout == met[0].layout for m in met)
    assert (met[0].layout.driver_rank, met[0].layout.num_nodes) == (1, 2)
    assert places[0].host == socket.gethostname()


def test_on_one_node_all_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    met = at_once(worlds(2), lambda world: meet(world, config()))
    assert [p.address for p in met[0].places] == ["127.0.0.1"] * 2
    assert [p.device for p in met[0].places] == ["4", "5"]


def test_a_world_that_does_not_fit_is_refused_by_all_and_said_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    two = config(num_gpus_per_node=2, num_nodes=2)
    assert at_once(worlds(2, 1), lambda world: meet(world, two)) == [None] * 3
    said = capfd.readouterr().err
    assert said.count("roll-td: ") == 1
    assert "roll-td: node 1 has 1 ranks, its 2 devices" in said


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_rank_that_cannot_take_part_stops_all(
    refusing: int, capfd: pytest.CaptureFixture[str]
) -> None:
    actions: list[Callable[[World], Any]] = [lambda world: meet(world, config())] * 3
    actions[refusing] = lambda world: refuse(world, "roll-td: no turnips")
    assert at_once(worlds(3), *actions) == [None] * 3
    assert [line for line in capfd.readouterr().err.splitlines() if "roll-td" in line] == [
        "roll-td: no turnips"
    ]


def test_a_rank_that_finds_nobody_says_itself_why_it_cannot_take_part(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "REFUSE_S", 1.0)
    refuse(worlds(2)[1], "roll-td: no turnips")
    assert "roll-td: no turnips\n" in capfd.readouterr().err


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_S", 1.0)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not come within 1 s"):
        meet(worlds(2)[0], config())


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        world = worlds(1)[0]
        world = World(**(vars(world) | {"master_port": server.getsockname()[1]}))
        with pytest.raises(ValueError, match=f"MASTER_PORT={world.master_port}: another program"):
            meet(world, config())


def test_the_channel_joins_every_rank_to_the_driver() -> None:
    meetings = []  # the store ends with that of rank 0

    def join(world: World) -> Any:
        meeting = meet(world, config())
        assert meeting is not None
        meetings.append(meeting)
        return open_channel(meeting, node_timeout_s=30)

    lines = at_once(worlds(3), join)
    hubs = [hub for _, _, hub in lines]
    assert hubs[0] is None and hubs[1] is not None and hubs[2] is None  # the first CPU rank
    for rank, (link, _, _) in enumerate(lines):
        hubs[1].sender(rank).send(Kind.GO, b"to %d" % rank)
        frame = link.receive()
        assert bytes(frame.head) == b"to %d" % rank
    for link, lifeline, _ in lines:
        link.close()
        lifeline.close()
    for end in (*hubs[1].connections, *hubs[1].lifelines):
        end.close()


def test_addresses_for_other_nodes_come_before_this_machines_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (world,) = worlds(1)
    assert rendezvous._own_addresses(world, 1) == ["127.0.0.1", socket.gethostname()]
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu7")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.1.2.3")
    # the way to rank 0 leads over loopback: another node could not come back by it
    assert rendezvous._own_addresses(world, 2) == ["gpu7", "10.1.2.3", "127.0.0.1"]
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert rendezvous._own_addresses(world, 2) == ["gpu7", "127.0.0.1"]


def test_a_place_says_where_its_rank_is() -> None:
    (met,) = at_once(worlds(1), lambda world: meet(world, config()))
    (place,) = met.places
    host = socket.gethostname()
    assert place == RankPlace(0, 0, host, "127.0.0.1", None, place.pid, place.name_is_loopback)


class Strange:
    """Leaves a trace where it is unpickled."""

    unpickled = 0

    def __reduce__(self) -> Any:
        return _be_unpickled, ()


def _be_unpickled() -> None:
    Strange.unpickled += 1


def test_what_does_not_know_the_secret_is_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLL_TD_SECRET", "ours")
    (world,) = worlds(1)
    ours = rendezvous._store(world, 5)
    theirs = SealedStore(ours.store, b"theirs")
    theirs.put("driver", Strange())
    with pytest.raises(ValueError, match="'driver' was put into the store by a process that"):
        ours.take("driver")
    ours.store.set("driver", b"short")
    with pytest.raises(ValueError, match="give all ranks the same one"):
        ours.take("driver")
    assert Strange.unpickled == 0
    ours.put("driver", Strange())
    assert ours.take("driver") is None and Strange.unpickled == 1
    ours.put("place/0", 1)
    ours.store.set("place/1", ours.store.get("place/0"))
    with pytest.raises(ValueError, match="'place/1'"):  # a seal is no good elsewhere
        ours.take_all(["place/0", "place/1"])


def test_who_reads_the_store_cannot_answer_the_driver() -> None:
    ours, theirs = SealedStore(None, b"ours"), SealedStore(None, b"")
    assert ours.answer("a" * 32) == SealedStore(None, b"ours").answer("a" * 32)
    assert len(ours.answer("a" * 32)) == 32
    assert len({ours.answer("a" * 32), ours.answer("b" * 32), theirs.answer("a" * 32)}) == 3


def test_k11_hosts_that_would_wait_at_their_own_loopback_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = RankPlace(0, 0, "a", "10.0.0.1", None, 1, True)
    there = RankPlace(1, 0, "b", "10.0.0.2", None, 1, False)
    with pytest.raises(ValueError, match=r"the names of \['a'\] resolve to loopback"):
        rendezvous._check_names([here, there])
    rendezvous._check_names([here, here])
    rendezvous._check_names([there])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for addresses, is_loopback in (
        (["127.0.1.1"], True),
        (["::1", "127.0.0.1"], True),
        (["fe80::1%eth0", "127.0.1.1"], False),
    ):
        found = [(None, None, None, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=found, **__: found)
        assert rendezvous._name_is_loopback() is is_loopback
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert not rendezvous._name_is_loopback()
