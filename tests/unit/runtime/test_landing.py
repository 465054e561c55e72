"""Results: joined in place, kept as they were given, checked while they travel; random batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_td import (
    Cluster,
    DataProto,
    Dispatch,
    Worker,
    WorkerConfig,
    get,
    register,
)
from roll_td.columns import TOKEN_COLUMNS, same_values
from roll_td.placement import planned_places
from roll_td.runtime.cluster import ResourceManager
from roll_td.runtime.inprocess import LocalJob
from roll_td.runtime.transport import LocalTransport

MakeRole = Callable[..., Cluster]
SENT_ROWS = 20_000
"""Rows of a column that is too large for the control message."""


class Keeps(Worker):
    """Returns tensors that it owns, and writes into them later."""

    state = torch.zeros(SENT_ROWS)
    hold = threading.Event()

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def write(self, value: float) -> DataProto:
        mine = self.mine()
        mine.fill_(value)
        return DataProto({"w": mine}, None, {"metrics": {"v": value}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raw(self, value: float) -> torch.Tensor:
        return self.mine().fill_(value)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def wait_and_read(self, data: DataProto) -> Any:
        Keeps.hold.wait(5)
        return [float(x) for x in data["x"][:1]]

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def echo(self, data: DataProto) -> DataProto:
        return data

    def mine(self) -> torch.Tensor:
        if not hasattr(self, "own"):
            self.own = torch.zeros(SENT_ROWS)
        return self.own


@pytest.mark.parametrize("method", ["write", "raw"])
def test_a_result_stays_although_the_worker_overwrites_its_tensor(
    role: MakeRole, method: str
) -> None:
    call = getattr(role(Keeps, 2), method)
    pending = [call(float(i), blocking=False) for i in range(6)]
    for i, refs in reversed(list(enumerate(pending))):
        value = get(refs)
        tensors = value if method == "raw" else [value["w"]]
        assert all(bool((t == i).all()) for t in tensors), i
    kept = call(1.0)
    call(2.0)
    first = kept[0] if method == "raw" else kept["w"]
    assert bool((first == 1.0).all()), "a result already fetched is the driver's own"


def test_a_result_stays_while_its_bytes_are_on_their_way(
    role: MakeRole, job: LocalJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is slow to take them; the worker goes on with the next command."""
    cluster = role(Keeps, 2)
    irecv = LocalTransport.irecv

    class Slow:
        def __init__(self, work: Any):
            self.work = work

        def wait(self) -> None:
            time.sleep(0.05)
            self.work.wait()

    def slow(self: LocalTransport, *args: Any) -> Any:
        work = irecv(self, *args)
        return Slow(work) if self.rank == job.layout.driver_rank else work

    monkeypatch.setattr(LocalTransport, "irecv", slow)
    pending = []
    for i in range(4):
        pending.append(cluster.write(float(i), blocking=False))
        time.sleep(0.01)  # the bytes of this result are on their way when the next call comes
    assert [set(get(refs)["w"].tolist()) for refs in pending] == [{0.0}, {1.0}, {2.0}, {3.0}]


def test_a_column_written_while_in_flight_is_an_error_that_names_it() -> None:
    Keeps.hold.clear()
    column = torch.zeros(SENT_ROWS)
    other = torch.zeros(SENT_ROWS)
    message = r"role.wait_and_read: column 'x' was written in place.*give the call a clone"
    with pytest.raises(ValueError, match=message), LocalJob(planned_places(1, 1, 1), 1, 1):
        config = WorkerConfig(name="role", device_mapping=[0])
        cluster = Cluster("role", Keeps, ResourceManager(1, 1), config)
        first = cluster.wait_and_read(DataProto({"x": other}), blocking=False)
        second = cluster.wait_and_read(DataProto({"x": column}), blocking=False)
        column.fill_(5.0)  # its bytes have not left: the worker is busy with the first
        Keeps.hold.set()
        assert get(first) == [0.0]
        get(second)


def test_a_column_written_while_its_bytes_leave_is_an_error_too() -> None:
    Keeps.hold.clear()
    column = torch.zeros(SENT_ROWS * 100)
    message = r"role.wait_and_read: column 'x' was written in place.*give the call a clone"
    with pytest.raises(ValueError, match=message), LocalJob(planned_places(1, 1, 1), 1, 1):
        config = WorkerConfig(name="role", device_mapping=[0])
        cluster = Cluster("role", Keeps, ResourceManager(1, 1), config)
        refs = cluster.wait_and_read(DataProto({"x": column}), blocking=False)
        column.fill_(5.0)  # the worker has nothing else to do: its bytes are on their way
        Keeps.hold.set()
        get(refs)


def test_small_columns_have_left_when_the_call_returns(role: MakeRole) -> None:
    Keeps.hold.clear()
    cluster = role(Keeps, 1)
    column = torch.zeros(3)
    first = cluster.wait_and_read(DataProto({"x": torch.zeros(3)}), blocking=False)
    second = cluster.wait_and_read(DataProto({"x": column}), blocking=False)
    column.fill_(5.0)
    Keeps.hold.set()
    assert (get(first), get(second)) == ([0.0], [0.0])


def test_a_column_may_be_written_once_the_result_is_there(role: MakeRole) -> None:
    Keeps.hold.set()
    cluster = role(Keeps, 2)
    data = DataProto({"x": torch.zeros(SENT_ROWS), "small": torch.zeros(2 * SENT_ROWS)[::2]})
    for value in (1.0, 2.0, 3.0):
        data["x"].fill_(value)
        assert cluster.wait_and_read(data) == [value, value]


def test_a_result_may_be_written_and_goes_out_again(role: MakeRole) -> None:
    cluster = role(Keeps, 3)
    data = DataProto({"x": torch.zeros(SENT_ROWS, 2)}, {"o": [[0] for _ in range(SENT_ROWS)]})
    for turn in range(3):
        data = cluster.echo(data)
        data["x"].add_(1)
        data["o"][0].append(turn)
    assert bool((data["x"] == 3).all()) and data["o"][0] == [0, 0, 1, 2] and data["o"][1] == [0]


class Streams(Worker):
    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, prefetch=True)
    def echo(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def derive(self, data: DataProto) -> DataProto:
        """New columns only: their padding and lengths come from the argument."""
        columns = {k: v for k, v in dict(data.batch.items()).items() if k in TOKEN_COLUMNS}  # type: ignore[union-attr]
        return DataProto({"values": next(iter(columns.values())).double()} if columns else {})


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=5), st.binary(max_size=5)
)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)
COLUMN_DTYPES = [torch.bool, torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float64]


@st.composite
def token_batches(draw: st.DrawFn) -> DataProto:
    """Random columns, dtypes and lengths; padding is one value a column."""
    rows, width = draw(st.integers(0, 12)), draw(st.sampled_from([0, 1, 7, 64, 3000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # mostly short rows, so that packing pays; sometimes all full
    most = draw(st.sampled_from([width, width // 2, width // 10, 0]))
    lengths = torch.tensor([draw(st.integers(0, most)) for _ in range(rows)], dtype=torch.int64)
    real = torch.arange(width) < lengths[:, None]
    columns: dict[str, Any] = {}
    for name in draw(st.sets(st.sampled_from([*sorted(TOKEN_COLUMNS), "other", "more"]))):
        dtype = draw(st.sampled_from(COLUMN_DTYPES))
        tail = draw(st.sampled_from([(), (), (2,)]))
        shape = (rows, width, *tail) if name in TOKEN_COLUMNS else (rows, *tail)
        tensor = torch.randint(-50, 50, shape, generator=generator).to(dtype)
        if name in TOKEN_COLUMNS:
            fill = draw(st.sampled_from([0, -100, 7]))
            tensor[~real] = torch.tensor(fill).to(dtype)
        columns[name] = tensor
    if draw(st.booleans()) or not columns:
        columns["lengths"] = lengths
    objects = {
        name: draw(st.lists(OBJECTS, min_size=rows, max_size=rows))
        for name in draw(st.sets(st.sampled_from(["o", "prompt"])))
    }
    return DataProto(columns, objects, {"temperature": 0.5})


@pytest.fixture(scope="module")
def clusters() -> Any:
    """One job for all random batches: roles of 1, 3 and 4 workers."""
    with LocalJob(planned_places(1, 4, 1), 1, 4):
        yield [
            Cluster(f"r{n}", Streams, ResourceManager(1, 4),
                    WorkerConfig(name=f"r{n}", device_mapping=list(range(n))))
            for n in (1, 3, 4)
        ]  # fmt: skip


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_random_batches_come_back_equal(clusters: list[Cluster], data: st.DataObject) -> None:
    batches = data.draw(st.lists(token_batches(), min_size=1, max_size=3))
    cluster = data.draw(st.sampled_from(clusters))
    pending = [cluster.echo(batch, blocking=False) for batch in batches]
    for batch, refs in reversed(list(zip(batches, pending, strict=True))):
        out = get(refs)
        assert out.keys() == batch.keys() and len(out) == len(batch)
        for key in batch.keys():  # noqa: SIM118
            assert same_values(out[key], batch[key]), key
        assert out.meta_info == {"temperature": 0.5}
        derived = cluster.derive(batch)
        tokens = [k for k in batch.keys() if k in TOKEN_COLUMNS]  # noqa: SIM118
        if tokens:
            assert torch.equal(derived["values"], batch[tokens[0]].double())
        assert np.array_equal(derived.keys(), ["values"] if tokens else [])
