"""How the ranks of a job find each other, and agree that the job can start."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import pickle
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from roll_td.config.base import BaseConfig
from roll_td.distributed.world import World
from roll_td.placement import WorldLayout, world_layout
from roll_td.platform import physical_device
from roll_td.runtime import control
from roll_td.runtime.control import Connection, Hub
from roll_td.runtime.failure import say, write_error_file

JOIN_S = 300.0
"""How long ranks wait for each other at the start: imports from a slow disk take minutes."""
REFUSE_S = 30.0
"""How long a rank that can't take part looks for the others, to tell them."""
SEAL_BYTES = 32
PART_S = 5.0
"""How long rank 0 waits until all have heard that the job can't start."""


SECRET = "ROLL_TD_SECRET"
"""The variable in which the launcher hands all ranks of one job the same secret."""


class SealedStore:
    """The store, for objects: what was not put there with the job's secret is not unpickled.

    Whoever can reach the store can still remove things, or read them. Without a secret (ranks
    that were started by hand) this guards against accidents alone.
    """

    def __init__(self, store: Any, secret: bytes):
        self.store, self._secret = store, secret

    def put(self, key: str, value: object) -> None:
        """Pickle and seal. The seal holds for this key alone."""
        data = pickle.dumps(value, 5)
        self.store.set(key, self._seal(key, data) + data)

    def take(self, key: str) -> Any:
        """Wait for what is under `key`; ValueError if its seal is not this job's."""
        return self._open(key, self.store.get(key))

    def take_all(self, keys: Sequence[str]) -> list[Any]:
        """`take` of each, waiting once."""
        found = self.store.multi_get(keys)
        return [self._open(key, sealed) for key, sealed in zip(keys, found, strict=True)]

    def answer(self, challenge: str) -> str:
        """What only this job's ranks can make of a text that others may know."""
        seal = self._seal("answer", challenge.encode())
        return seal.hex()[: control.TOKEN_CHARS]

    def _seal(self, key: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + data, "sha256")

    def _open(self, key: str, sealed: bytes) -> Any:
        seal, data = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(key, data)):
            raise ValueError(
                f"{key!r} was put into the store by a process that does not know this job's "
                f"{SECRET}; give all ranks the same one, and each job its own MASTER_PORT"
            )
        return pickle.loads(data)


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs."""

    node: int
    local_rank: int
    host: str
    address: str
    """Where other ranks reach its host."""
    device: str | None
    """The physical device of its local rank; None without a list of visible ones."""
    pid: int
    name_is_loopback: bool = False
    """Whether its host's name resolves to loopback, and gloo goes by that name."""


@dataclass(frozen=True)
class Meeting:
    """All ranks of the job, met."""

    world: World
    store: SealedStore
    places: list[RankPlace]
    """By global rank."""
    layout: WorldLayout


def meet(world: World, config: BaseConfig) -> Meeting | None:
    """Meet the other ranks; None if the job can't start, which rank 0 has then said.

    It can't if the world doesn't fit the config, or a rank calls `refuse`. Raises RuntimeError
    (torch's DistError) or TimeoutError if ranks don't come.
    """
    store = _store(world, JOIN_S)
    address = _own_addresses(world, config.num_nodes)[0]
    device = physical_device(world.local_rank)
    host = socket.gethostname()
    place = RankPlace(
        world.node, world.local_rank, host, address, device, os.getpid(), _name_is_loopback()
    )
    agreed = _agree(store, world, place, config)
    if isinstance(agreed, str):
        _part(store, world, agreed)
        return None
    return Meeting(world, store, agreed, _layout(agreed, config))


def refuse(world: World, text: str) -> None:
    """Tell the other ranks why this one can't take part; rank 0 says it, and the job is over."""
    try:
        store = _store(world, REFUSE_S)
        agreed = _agree(store, world, text, None)
        assert isinstance(agreed, str)
        _part(store, world, agreed)
    except (RuntimeError, ValueError):  # the others are not there, or there is no port to meet at
        say(text)
        write_error_file(text, full=True)


def _store(world: World, timeout_s: float) -> SealedStore:
    hosts = world.rank == 0 and not world.agent_store
    try:
        tcp = dist.TCPStore(
            world.master_addr,
            world.master_port,
            world.world_size,
            is_master=hosts,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except dist.DistNetworkError as error:
        if not (hosts and "EADDRINUSE" in str(error)):
            raise
        raise ValueError(
            f"MASTER_PORT={world.master_port}: another program of this machine has this port; set "
            "MASTER_PORT to a free one, the same on all ranks"
        ) from error
    prefixed = dist.PrefixStore(f"roll_td/{world.restart}", tcp)
    return SealedStore(prefixed, os.environ.get(SECRET, "").encode())


def _layout(places: list[RankPlace], config: BaseConfig) -> WorldLayout:
    where = [(p.node, p.local_rank) for p in places]
    return world_layout(where, config.num_nodes, config.num_gpus_per_node or 0)


def _agree(
    store: SealedStore, world: World, mine: RankPlace | str, config: BaseConfig | None
) -> list[RankPlace] | str:
    """Everybody's place, or why the job can't start. Through rank 0: each reads one key, not one
    of every rank."""
    store.put(f"place/{world.rank}", mine)
    if world.rank == 0:
        agreed = mine if isinstance(mine, str) else _gather(store, world.world_size)
        if isinstance(agreed, list) and config is not None:
            try:
                _layout(agreed, config)
                _check_names(agreed)
            except ValueError as error:
                agreed = f"roll-td: {error}"
        if isinstance(agreed, str):
            say(agreed)
        store.put("agreed", agreed)
    agreed = store.take("agreed")
    assert isinstance(agreed, (list, str))
    return agreed


def _check_names(places: Sequence[RankPlace]) -> None:
    """ValueError if other hosts would look for one of them at their own loopback."""
    hosts = dict.fromkeys(place.host for place in places if place.name_is_loopback)
    if hosts and len({place.host for place in places}) > 1:
        raise ValueError(
            f"the names of {list(hosts)[:5]} resolve to loopback on these hosts themselves, which "
            "is where gloo would wait for the others; mend /etc/hosts there, or set "
            "GLOO_SOCKET_IFNAME to the interface between the nodes"
        )


def _name_is_loopback() -> bool:
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return False
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:  # gloo then takes loopback too
        return True
    return all(ipaddress.ip_address(str(info[4][0]).split("%")[0]).is_loopback for info in found)


def _gather(store: SealedStore, world_size: int) -> list[RankPlace] | str:
    """All places, or the first refusal."""
    keys = [f"place/{rank}" for rank in range(world_size)]
    try:
        places = store.take_all(keys)
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.store.check([key])]
        raise TimeoutError(
            f"ranks {missing[:20]} of {world_size} did not come within {JOIN_S:.0f} s: see what "
            "they have printed; a firewall between nodes does this too"
        ) from error
    return next((p for p in places if isinstance(p, str)), places)


def _part(store: SealedStore, world: World, text: str) -> None:
    """Leave a job that can't start. A launcher ends all ranks once one has gone: nobody goes
    before rank 0 has spoken, and rank 0, which may host the store, goes last."""
    write_error_file(text, full=world.rank == 0)
    with contextlib.suppress(RuntimeError):  # the store has gone
        if world.rank != 0:
            store.store.add("heard", 1)
            return
        deadline = time.monotonic() + PART_S
        while store.store.add("heard", 0) < world.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)


def join_collectives(meeting: Meeting) -> None:
    """Make the default process group, of all ranks."""
    dist.init_process_group(
        "gloo",
        store=meeting.store.store,
        rank=meeting.world.rank,
        world_size=meeting.world.world_size,
        timeout=timedelta(seconds=JOIN_S),
    )


def open_channel(
    meeting: Meeting, node_timeout_s: int
) -> tuple[Connection, socket.socket, Hub | None]:
    """This rank's link and lifeline to the driver, and on the driver's rank the hub."""
    world, layout = meeting.world, meeting.layout
    server = None
    if world.rank == layout.driver_rank:
        server = control.listen()
        token = secrets.token_hex(control.TOKEN_CHARS // 2)
        addresses = _own_addresses(world, layout.num_nodes)
        meeting.store.put("driver", (addresses, server.getsockname()[1], token))
    addresses, port, token = meeting.store.take("driver")
    token = meeting.store.answer(token)  # the store can be read by who does not know the secret
    link, lifeline = control.connect(addresses, port, token, world.rank, node_timeout_s)
    if server is None:
        return link, lifeline, None
    with server:
        hub = control.accept(server, token, world.world_size, JOIN_S, node_timeout_s)
        return link, lifeline, hub


def _own_addresses(world: World, num_nodes: int) -> list[str]:
    """Where other ranks may reach this one, best first."""
    if num_nodes == 1:
        return ["127.0.0.1", socket.gethostname()]
    found = []
    with contextlib.suppress(OSError):
        info = socket.getaddrinfo(
            world.master_addr, world.master_port or 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
            probe.connect(info[4])  # sends nothing; picks the interface
            found.append(str(probe.getsockname()[0]))
    found.append(socket.gethostname())
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return [*dict.fromkeys(a for a in found if not a.startswith("127.")), "127.0.0.1"]
