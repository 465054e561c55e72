"""The data plane: bytes between ranks, by torch.distributed or inside one process.

A transport moves flat uint8 tensors between two ranks of a group, and from one to the rest of
it. Both ends have agreed on sizes before (a receive buffer that is too short ends the process
in gloo, one that is too long is filled in part, silently), and have said that they are ready.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from roll_td.platform import current_platform

Ranks = tuple[int, ...]


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Block until done; raises where the peer is gone."""


class Transport(Protocol):
    """Moves bytes for one rank."""

    rank: int

    def make_groups(self, groups: Sequence[tuple[Ranks, float]]) -> None:
        """Make process groups (ranks, timeout_s); every rank calls this, in the same order."""

    def group(self, ranks: Ranks) -> Any:
        """The process group of these ranks."""

    def isend(self, data: torch.Tensor, peer: int, group: Ranks, tag: int) -> Work:
        """Send bytes to a rank of the group."""

    def irecv(self, into: torch.Tensor, peer: int, group: Ranks, tag: int) -> Work:
        """Receive bytes from a rank of the group."""

    def broadcast(self, data: torch.Tensor, source: int, group: Ranks) -> None:
        """Bytes of `source` to all of the group, in place; every member calls it."""


class Mailboxes:
    """Buffers handed over inside one process, by (source, target, tag)."""

    def __init__(self) -> None:
        self._boxes: defaultdict[tuple[Any, ...], SimpleQueue[torch.Tensor]] = defaultdict(
            SimpleQueue
        )
        self._lock = threading.Lock()

    def box(self, *key: Any) -> SimpleQueue[torch.Tensor]:
        with self._lock:
            return self._boxes[key]


class _Sent:
    def wait(self) -> None:
        return None


class _Pickup:
    def __init__(self, into: torch.Tensor, box: SimpleQueue[torch.Tensor]):
        self._into, self._box = into, box

    def wait(self) -> None:
        self._into.copy_(self._box.get())


class LocalTransport:
    """Ranks that are threads of one process. Receivers own their bytes, as anywhere."""

    def __init__(self, rank: int, mailboxes: Mailboxes):
        self.rank = rank
        self._mail = mailboxes

    def make_groups(self, groups: Sequence[tuple[Ranks, float]]) -> None:
        return None

    def group(self, ranks: Ranks) -> Ranks:
        return ranks

    def isend(self, data: torch.Tensor, peer: int, group: Ranks, tag: int) -> Work:
        self._mail.box(self.rank, peer, tag).put(data)
        return _Sent()

    def irecv(self, into: torch.Tensor, peer: int, group: Ranks, tag: int) -> Work:
        return _Pickup(into, self._mail.box(peer, self.rank, tag))

    def broadcast(self, data: torch.Tensor, source: int, group: Ranks) -> None:
        if source == self.rank:
            for peer in group:
                if peer != source:
                    self._mail.box("broadcast", source, peer, group).put(data.clone())
        else:
            data.copy_(self._mail.box("broadcast", source, self.rank, group).get())


class GlooTransport:
    """Point-to-point and broadcast over gloo groups; a rank to itself by a mailbox.

    Groups are cached by their ranks: each costs a member 3 threads and 5 to 8 descriptors.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self._groups: dict[Ranks, Any] = {}
        self._self = LocalTransport(rank, Mailboxes())

    def make_groups(self, groups: Sequence[tuple[Ranks, float]]) -> None:
        for ranks, timeout_s in groups:
            if ranks not in self._groups:
                self._groups[ranks] = dist.new_group(
                    list(ranks),
                    timeout=timedelta(seconds=timeout_s),
                    backend=current_platform.backend,
                    sort_ranks=False,
                )

    def group(self, ranks: Ranks) -> Any:
        return self._groups[ranks]

    def isend(self, data: torch.Tensor, peer: int, group: Ranks, tag: int) -> Work:
        if peer == self.rank:
            return self._self.isend(data, peer, group, tag)
        work = dist.isend(data, group=self._groups[group], group_dst=group.index(peer), tag=tag)
        assert work is not None, f"rank {self.rank} is not in the data group {group}"
        return work

    def irecv(self, into: torch.Tensor, peer: int, group: Ranks, tag: int) -> Work:
        if peer == self.rank:
            return self._self.irecv(into, peer, group, tag)
        work = dist.irecv(into, group=self._groups[group], group_src=group.index(peer), tag=tag)
        assert work is not None, f"rank {self.rank} is not in the data group {group}"
        return work

    def broadcast(self, data: torch.Tensor, source: int, group: Ranks) -> None:
        dist.broadcast(data, group=self._groups[group], group_src=group.index(source))
