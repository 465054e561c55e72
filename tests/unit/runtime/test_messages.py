"""Buffers that go in control messages although they are large: to idle ranks, and back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from roll_td import Cluster, DataProto, Dispatch, StepPlan, Topology, Worker, get, register
from roll_td.columns import same_values
from roll_td.runtime import cluster as clusters
from roll_td.runtime import driver as drivers
from roll_td.runtime import executor
from roll_td.runtime.arrivals import Command
from roll_td.runtime.control import Frame
from roll_td.runtime.parcel import ANSWERS_BYTES, MESSAGE_BYTES
from roll_td.runtime.transport import LocalTransport

MakeRole = Callable[..., Cluster]
KIB = 1024


class Echoes(Worker):
    opened = threading.Event()
    kept: Any = None

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def echo(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def wait_and_sum(self, data: DataProto) -> list[float]:
        Echoes.opened.wait(10)
        return [float(data["x"].sum())]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tensor(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), self.rank, dtype=torch.uint8)


class Doubled(Echoes):
    @classmethod
    def topology(cls, worker_config: Any) -> Topology:
        return Topology(dp=2, tp=2)


@pytest.fixture
def sent(by_transport: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the buffers that go by the transport, in either direction."""
    sizes: list[int] = []
    isend = LocalTransport.isend

    def record(self: LocalTransport, data: torch.Tensor, *args: Any) -> Any:
        sizes.append(data.nbytes)
        return isend(self, data, *args)

    monkeypatch.setattr(LocalTransport, "isend", record)
    monkeypatch.setattr(drivers, "MESSAGE_BYTES", MESSAGE_BYTES)
    monkeypatch.setattr(clusters, "ANSWERS_BYTES", ANSWERS_BYTES)
    return sizes


def columns(rows: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(rows, 300),
        "half": torch.randn(rows, 100).bfloat16(),
        "flags": torch.randn(rows, 301) > 0,
        "turned": torch.randn(50, rows).t(),
        "one": torch.arange(rows),
    }


def same(a: DataProto, b: DataProto) -> bool:
    return a.keys() == b.keys() and all(same_values(a[k], b[k]) for k in b.keys())  # noqa: SIM118


def test_large_columns_go_to_idle_ranks_and_back_in_messages(
    role: MakeRole, sent: list[int]
) -> None:
    data, cluster = DataProto(columns(2000), {"o": list(range(2000))}), role(Echoes, 4)
    assert same(cluster.echo(data), data)
    order = torch.randperm(2000).tolist()
    data.plan = StepPlan(tuple((tuple(order[i : i + 500]),) for i in range(0, 2000, 500)), {})
    assert same(cluster.echo(data), data)
    lengths = torch.arange(2000) % 60
    ids = torch.randint(1, 9, (2000, 100)) * (torch.arange(100) < lengths[:, None])
    packed = DataProto({"input_ids": ids, "lengths": lengths})
    assert same(cluster.echo(packed), packed)
    assert [t.tolist() for t in cluster.tensor(ANSWERS_BYTES // 4)[2:]] == [
        [2] * (ANSWERS_BYTES // 4),
        [3] * (ANSWERS_BYTES // 4),
    ]
    assert sent == []


def test_what_is_too_much_goes_by_the_transport(
    role: MakeRole, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, data = role(Echoes, 4), DataProto({"x": torch.randn(4, 100 * KIB)})
    each = 400 * KIB
    monkeypatch.setattr(drivers, "MESSAGE_BYTES", each - 1)
    assert same(cluster.echo(data), data) and sent == [each] * 4
    monkeypatch.setattr(drivers, "MESSAGE_BYTES", each)
    monkeypatch.setattr(drivers, "MESSAGES_BYTES", 3 * each)
    sent.clear()
    assert same(cluster.echo(data), data) and sent == [each], "the fourth is too much of one call"
    sent.clear()
    cluster.tensor(ANSWERS_BYTES // 4 + 1)
    assert sent == [ANSWERS_BYTES // 4 + 1] * 4


def test_a_busy_rank_and_replicas_get_theirs_by_the_transport(
    role: MakeRole, sent: list[int]
) -> None:
    cluster, data = role(Echoes, 1), DataProto({"x": torch.ones(2, 40 * KIB)})
    Echoes.opened.clear()
    first = cluster.wait_and_sum(data, blocking=False)
    second = cluster.wait_and_sum(data, blocking=False)
    assert sent == []
    Echoes.opened.set()
    assert get([first, second]) == [[80.0 * KIB]] * 2 and sent == [320 * KIB]
    sent.clear()
    assert same(role(Doubled, 4, "two").echo(data), data)
    assert sent == [160 * KIB] * 2, "to the first of each two"


def test_columns_have_left_when_the_call_returns(role: MakeRole, sent: list[int]) -> None:
    column = torch.ones(2, 40 * KIB)
    Echoes.opened.clear()
    refs = role(Echoes, 1).wait_and_sum(DataProto({"x": column}), blocking=False)
    column.fill_(5.0)
    Echoes.opened.set()
    assert get(refs) == [80.0 * KIB] and sent == []


def test_a_message_lives_no_longer_than_what_came_in_it(
    role: MakeRole, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, large = role(Echoes, 2), torch.ones(4, 40 * KIB)
    frames: list[Frame] = []

    class Noted(Command):
        def __init__(self, frame: Frame):
            frames.append(frame)
            super().__init__(frame)

    monkeypatch.setattr(executor, "Command", Noted)
    refs = cluster.echo(DataProto({"x": large}), blocking=False)
    get(refs)
    assert [frame.inline for frame in frames] == [[], []]
    assert [answer.inline for answer in refs.call.landing.answers] == [[], []]
    assert sent == []
