"""The data plane: bytes between ranks, by torch.distributed or inside one process.

A transport moves flat uint8 tensors between two ranks of a group, and from one to the rest of
it. Both ends have agreed on sizes before (a receive buffer that is too short ends the process
in gloo, one that is too long is filled in part, silently), and have said that they are ready.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from roll_td.platform import current_platform

Ranks = tuple[int, ...]


class Group(NamedTuple):
    """A process group: those with equal members and timeouts are one."""

    ranks: Ranks
    """Global ranks, in the group's order."""
    timeout_s: float

    def rank_of(self, rank: int) -> int:
        """The rank in the group of a global rank."""
        return self.ranks.index(rank)


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Block until done; raises where the peer is gone."""


class Transport(Protocol):
    """Moves bytes for one rank."""

    rank: int

    def make_groups(self, groups: Sequence[Group]) -> None:
        """Make process groups; every rank calls this, in the same order."""

    def group(self, group: Group) -> Any:
        """The process group."""

    def isend(self, data: torch.Tensor, peer: int, group: Group, tag: int) -> Work:
        """Send bytes to a rank of the group."""

    def irecv(self, into: torch.Tensor, peer: int, group: Group, tag: int) -> Work:
        """Receive bytes from a rank of the group."""

    def broadcast(self, data: torch.Tensor, source: int, group: Group) -> Work:
        """Bytes of `source` to all of the group, in place; every member calls it."""


class Mailboxes:
    """Buffers handed over inside one process, by a key such as (source, target, tag)."""

    def __init__(self) -> None:
        self._boxes: dict[Any, deque[torch.Tensor]] = {}
        self._changed = threading.Condition()

    def put(self, key: Any, data: torch.Tensor) -> None:
        """Leave a buffer for whoever takes that key."""
        with self._changed:
            self._boxes.setdefault(key, deque()).append(data)
            self._changed.notify_all()

    def take(self, key: Any) -> torch.Tensor:
        """Wait for a buffer; those of one key come in order."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._boxes)
            data = self._boxes[key].popleft()
            if not self._boxes[key]:
                del self._boxes[key]
            return data


class _Sent:
    def wait(self) -> None:
        return None


class _Pickup:
    def __init__(self, into: torch.Tensor, mail: Mailboxes, key: Any):
        self._into, self._mail, self._key = into, mail, key

    def wait(self) -> None:
        self._into.copy_(self._mail.take(self._key))


class LocalTransport:
    """Ranks that are threads of one process. Receivers own their bytes, as anywhere."""

    def __init__(self, rank: int, mailboxes: Mailboxes):
        self.rank = rank
        self._mail = mailboxes

    def make_groups(self, groups: Sequence[Group]) -> None:
        return None

    def group(self, group: Group) -> Ranks:
        return group.ranks

    def isend(self, data: torch.Tensor, peer: int, group: Group, tag: int) -> Work:
        self._mail.put((self.rank, peer, tag), data)
        return _Sent()

    def irecv(self, into: torch.Tensor, peer: int, group: Group, tag: int) -> Work:
        return _Pickup(into, self._mail, (peer, self.rank, tag))

    def broadcast(self, data: torch.Tensor, source: int, group: Group) -> Work:
        if source != self.rank:
            return _Pickup(data, self._mail, (source, self.rank, group))
        for peer in group.ranks:
            if peer != source:
                self._mail.put((source, peer, group), data.clone())
        return _Sent()


class GlooTransport:
    """Point-to-point and broadcast over gloo groups; a rank to itself by a mailbox.

    Groups are cached: each costs a member 3 threads and 5 to 8 descriptors.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self._groups: dict[Group, Any] = {}
        self._self = LocalTransport(rank, Mailboxes())

    def make_groups(self, groups: Sequence[Group]) -> None:
        for group in groups:
            if group not in self._groups:
                self._groups[group] = dist.new_group(
                    list(group.ranks),
                    timeout=timedelta(seconds=group.timeout_s),
                    backend=current_platform.backend,
                    sort_ranks=False,
                )

    def group(self, group: Group) -> Any:
        return self._groups[group]

    def isend(self, data: torch.Tensor, peer: int, group: Group, tag: int) -> Work:
        if peer == self.rank:
            return self._self.isend(data, peer, group, tag)
        work = dist.isend(data, group=self._groups[group], group_dst=group.rank_of(peer), tag=tag)
        assert work is not None, f"rank {self.rank} is not in the data group {group}"
        return work

    def irecv(self, into: torch.Tensor, peer: int, group: Group, tag: int) -> Work:
        if peer == self.rank:
            return self._self.irecv(into, peer, group, tag)
        work = dist.irecv(into, group=self._groups[group], group_src=group.rank_of(peer), tag=tag)
        assert work is not None, f"rank {self.rank} is not in the data group {group}"
        return work

    def broadcast(self, data: torch.Tensor, source: int, group: Group) -> Work:
        members, first = self._groups[group], group.rank_of(source)
        work = dist.broadcast(data, group=members, group_src=first, async_op=True)
        assert work is not None, f"rank {self.rank} is not in the group {group}"
        return work
