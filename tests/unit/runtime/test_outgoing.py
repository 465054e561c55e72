"""What the driver sends: in place where it can, copies in flight bounded, freed once arrived."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from roll_td import Cluster, DataProto, Dispatch, StepPlan, Worker, get, register
from roll_td.runtime import outgoing
from roll_td.runtime.inprocess import LocalJob
from roll_td.runtime.transport import LocalTransport

MakeRole = Callable[..., Cluster]


class Takes(Worker):
    opened = threading.Event()

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, prefetch=True)
    def echo(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait(self) -> bool:
        return Takes.opened.wait(10)


@pytest.fixture
def sent(job: LocalJob, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The buffers that leave the driver by the transport."""
    buffers: list[torch.Tensor] = []
    isend = LocalTransport.isend

    def record(self: LocalTransport, data: torch.Tensor, *args: Any) -> Any:
        if self.rank == job.layout.driver_rank:
            buffers.append(data)
        return isend(self, data, *args)

    monkeypatch.setattr(LocalTransport, "isend", record)
    return buffers


def memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def test_neighbouring_rows_are_sent_from_where_they_are(
    role: MakeRole, sent: list[torch.Tensor]
) -> None:
    column = torch.arange(400_000.0).view(4, 100_000)
    assert torch.equal(role(Takes, 4).echo(DataProto({"x": column}))["x"], column)
    start, stop = memory(column)
    assert sorted(memory(b) for b in sent) == [
        (at, at + 400_000) for at in range(start, stop, 400_000)
    ]
    sent.clear()
    in_order = StepPlan((((0,), (1,)), ((2,), (3,))), {})
    role(Takes, 2, "two").echo(DataProto({"x": column}, plan=in_order))
    assert sorted(memory(b) for b in sent) == [
        (at, at + 800_000) for at in range(start, stop, 800_000)
    ], "a plan that keeps the order copies nothing either"


def test_padding_and_small_columns_are_not_sent(role: MakeRole, sent: list[torch.Tensor]) -> None:
    ids = torch.zeros(8, 30_000, dtype=torch.int64)
    lengths = torch.full((8,), 6_000)
    data = DataProto({"input_ids": ids, "lengths": lengths, "small": torch.zeros(8, 100)})
    role(Takes, 4).echo(data)
    assert [b.nbytes for b in sent] == [2 * 6_000 * 8] * 4, "the rest travels with the command"


@pytest.mark.parametrize("budget", [1, 500_000, 2**40])
def test_copies_wait_for_their_turn_and_all_come(
    role: MakeRole, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Permuted rows need copies: with little room they go one after the other."""
    monkeypatch.setattr(outgoing, "COPY_BUDGET_BYTES", budget)
    Takes.opened.clear()
    one, two = role(Takes, 4, "one"), role(Takes, 2, "two", device_mapping=[3, 0])
    rows = np.random.default_rng(0).permutation(8).tolist()
    plan = StepPlan(tuple(((rows[2 * i], rows[2 * i + 1]),) for i in range(4)), {})
    half = StepPlan(tuple((tuple(rows[4 * i : 4 * i + 4]),) for i in range(2)), {})
    batches = [torch.randn(8, 30_000) for _ in range(4)]
    waiting = one.wait(blocking=False)
    pending = [
        (one if i % 2 else two).echo(
            DataProto({"x": x, "y": -x}, plan=plan if i % 2 else half), blocking=False
        )
        for i, x in enumerate(batches)
    ]
    Takes.opened.set()
    for x, refs in reversed(list(zip(batches, pending, strict=True))):
        out = get(refs)
        assert torch.equal(out["x"], x) and torch.equal(out["y"], -x)
    assert get(waiting) == [True] * 4


@pytest.mark.parametrize("columns", ["large", "small"])
def test_what_has_arrived_is_let_go(role: MakeRole, columns: str) -> None:
    cluster = role(Takes, 2)
    column = torch.zeros(2, 50_000 if columns == "large" else 5)
    kept = weakref.ref(column)
    refs = cluster.echo(DataProto({"x": column}), blocking=False)
    get(refs)
    del column
    for _ in range(100):  # the driver is about to hear that the rows have arrived
        if kept() is None:
            break
        time.sleep(0.01)
    assert kept() is None, "although the result is still wanted"
    assert get(refs)["x"].sum() == 0
