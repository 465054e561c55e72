"""The transport between threads: bytes arrive once, in order, owned by the receiver."""

from __future__ import annotations

import threading

import torch

from roll_td.runtime.transport import Group, LocalTransport, Mailboxes


def ranks(n: int) -> list[LocalTransport]:
    mailboxes = Mailboxes()
    return [LocalTransport(rank, mailboxes) for rank in range(n)]


def bytes_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_sends_of_one_pair_and_tag_arrive_in_order_whoever_is_first() -> None:
    a, b = ranks(2)
    group = Group((0, 1), 1.0)
    early = torch.zeros(2, dtype=torch.uint8)
    first = b.irecv(early, 0, group, tag=5)  # posted before anything is sent
    a.isend(bytes_of(9, 9), 1, group, tag=6).wait()
    a.isend(bytes_of(1, 2), 1, group, tag=5).wait()
    a.isend(bytes_of(3), 1, group, tag=5).wait()
    first.wait()
    late, other = torch.zeros(1, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8)
    b.irecv(late, 0, group, tag=5).wait()
    b.irecv(other, 0, group, tag=6).wait()
    assert (early.tolist(), late.tolist(), other.tolist()) == ([1, 2], [3], [9, 9])


def test_a_rank_sends_to_itself() -> None:
    (only,) = ranks(1)
    into = torch.zeros(2, dtype=torch.uint8)
    work = only.irecv(into, 0, (0,), tag=1)
    only.isend(bytes_of(4, 5), 0, (0,), tag=1)
    work.wait()
    assert into.tolist() == [4, 5]


def test_directions_and_pairs_do_not_mix() -> None:
    a, b, c = ranks(3)
    group = Group((0, 1, 2), 1.0)
    for sender, value in ((a, 10), (b, 20), (c, 30)):
        for peer in group.ranks:
            sender.isend(bytes_of(value + peer), peer, group, tag=0)
    for receiver in (c, a, b):
        for peer, value in ((2, 30), (0, 10), (1, 20)):
            into = torch.zeros(1, dtype=torch.uint8)
            receiver.irecv(into, peer, group, tag=0).wait()
            assert into.item() == value + receiver.rank


def test_a_broadcast_copies_from_its_source_to_all() -> None:  # B12
    members = ranks(4)
    inside = (3, 1, 2)  # in role order; rank 0 is outside
    data = {rank: torch.full((3,), rank, dtype=torch.uint8) for rank in inside}
    threads = [
        threading.Thread(
            target=lambda r=rank: members[r].broadcast(data[r], 3, Group(inside, 1.0)).wait()
        )
        for rank in inside
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert all(data[rank].tolist() == [3, 3, 3] for rank in inside)
    data[3].fill_(0)
    assert data[1].tolist() == [3, 3, 3], "a receiver owns what it got"
