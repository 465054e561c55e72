"""Rows on their way out and back: every dtype, uneven, empty, packed; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from roll_td import DataProto, Dispatch, Mean, Sum, Topology, Worker, register
from roll_td.columns import same_values
from roll_td.runtime.cluster import Cluster

MakeRole = Callable[..., Cluster]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


class Echo(Worker):
    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def echo(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def sizes(self, data: DataProto, second: DataProto | None = None) -> tuple[int, ...]:
        return len(data), -1 if second is None else len(second)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def score(self, data: DataProto) -> DataProto:
        assert data.batch is not None
        return DataProto({"log_probs": data["input_ids"] * 0.5, "scores": data["lengths"] + 0.25})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def spoil(self, data: DataProto) -> DataProto:
        """Write into everything that came."""
        data["small"].fill_(7)
        data["large"].fill_(7)
        data.non_tensor_batch["o"][:] = None
        data.meta_info["list"].append(self.rank)
        data.meta_info["metrics"] = {"n": Sum(1), "mean": Mean(self.rank, len(data)), "bare": 2.0}
        assert data.meta_info["list"] == [0, self.rank], "the list is this worker's own"
        data.meta_info["list"] = "same"
        return data


class Doubled(Echo):
    """tp 2 below each dp rank."""

    @classmethod
    def topology(cls, worker_config: Any) -> Topology:
        return Topology(dp=2, tp=2)


def assert_same(out: DataProto, data: DataProto) -> None:
    assert out.keys() == data.keys() and len(out) == len(data)
    for key in data.keys():  # noqa: SIM118
        assert same_values(out[key], data[key]), key


def every_dtype(rows: int) -> DataProto:
    torch.manual_seed(0)
    columns = {
        str(dtype): torch.randint(0, 2, (rows, 3, 2)).to(dtype)
        if dtype is torch.bool
        else (torch.randn(rows, 3, 2) * 50).to(dtype)
        for dtype in DTYPES
    }
    columns |= {"flat": torch.randn(rows), "none_wide": torch.zeros(rows, 0, 2)}
    return DataProto(columns, {"o": [{"row": [i, None]} for i in range(rows)]}, {"k": "v"})


@pytest.mark.parametrize("worker_cls", [Echo, Doubled])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 3000])  # 3000: some columns are sent, some inline
def test_every_dtype_comes_back_as_it_was(role: MakeRole, worker_cls: type, rows: int) -> None:
    data = every_dtype(rows)
    data.update({"nan": torch.full((rows,), float("nan"))})
    out = role(worker_cls, 4).echo(data)
    assert_same(out, data)
    assert out.meta_info == {"k": "v"}


def test_views_that_are_not_contiguous_come_back_by_value(role: MakeRole) -> None:
    base = torch.arange(40_000).view(100, 400)
    data = DataProto(
        {
            "t": base.t()[:, :90].t(),
            "step": base[:90, ::3],
            "expand": torch.arange(90)[:, None].expand(90, 500),
            "grad": torch.ones(90, requires_grad=True),
        }
    )
    out = role(Echo, 3).echo(data)
    for key in ("t", "step", "expand"):
        assert torch.equal(out[key], data[key])
    assert not out["grad"].requires_grad


def test_fewer_rows_than_workers_leave_some_with_an_empty_batch(role: MakeRole) -> None:  # A01
    cluster = role(Echo, 4)
    for rows, sizes in ((0, [0, 0, 0, 0]), (2, [1, 1, 0, 0]), (7, [2, 2, 2, 1])):
        data = DataProto({"x": torch.arange(rows)})
        assert [own for own, _ in cluster.sizes(data)] == sizes
        assert cluster.sizes(data, second=data[:1]) == [
            (own, 1 if i == 0 and rows else 0) for i, own in enumerate(sizes)
        ]
        assert cluster.echo(data)["x"].tolist() == list(range(rows))
    objects = DataProto(None, {"s": ["a", "b", "c"]})
    assert cluster.echo(objects)["s"].tolist() == ["a", "b", "c"]  # A10
    assert cluster.echo(DataProto(meta_info={"a": 1})).meta_info == {"a": 1}


def test_workers_cannot_reach_the_callers_data_nor_each_others(role: MakeRole) -> None:
    data = DataProto(
        {"small": torch.arange(4), "large": torch.zeros(4, 40_000)},
        {"o": list("abcd")},
        {"list": [0], "metrics": {"n": Sum(100)}},
    )
    out = role(Echo, 4).spoil(data)
    assert data["small"].tolist() == [0, 1, 2, 3] and data["large"].sum() == 0
    assert data["o"].tolist() == list("abcd") and data.meta_info["list"] == [0]
    assert out["small"].tolist() == [7] * 4 and out["o"].tolist() == [None] * 4
    metrics = out.meta_info["metrics"]
    assert metrics == {"n": 4.0, "mean": 1.5, "bare": 2.0}, "those sent don't come back n-fold"
    assert data.meta_info["metrics"] == {"n": 100.0}
    assert "metrics" not in role(Echo, 2, "echo").echo(data).meta_info


def packed(rows: int, width: int, lengths: list[int]) -> DataProto:
    """Token columns with a padding of their own each, and columns that are not packed."""
    torch.manual_seed(1)
    given = torch.tensor(lengths, dtype=torch.int64)
    real = torch.arange(width) < given[:, None]
    ids = torch.randint(1, 1000, (rows, width)).masked_fill(~real, 9)
    return DataProto(
        {
            "input_ids": ids,
            "labels": ids.masked_fill(~real, -100),
            "response_mask": real & (ids % 2 == 0),
            "old_log_probs": -torch.rand(rows, width) * real,
            "values": torch.randn(rows, width).masked_fill(~real, float("nan")),
            "weight_version": real.int() * 3,
            "lengths": given,
            "hidden": torch.randn(rows, width),
        },
        {"o": [f"{i}" for i in range(rows)]},
    )


@pytest.mark.parametrize("worker_cls", [Echo, Doubled])
@pytest.mark.parametrize(
    "lengths",
    [[5, 0, 17, 1, 600], [0, 0, 0, 0, 0], [0], [], [1000] * 6, [1000, 3], [1]],
    ids=str,
)
def test_token_columns_come_back_without_and_with_padding(
    role: MakeRole, worker_cls: type, lengths: list[int]
) -> None:
    data = packed(len(lengths), 1000, lengths)
    cluster = role(worker_cls, 4)
    assert_same(cluster.echo(data), data)
    out = cluster.score(data)
    real = torch.arange(1000) < data["lengths"][:, None]
    assert torch.equal(out["log_probs"][real], data["input_ids"][real] * 0.5)
    assert torch.equal(out["scores"], data["lengths"] + 0.25)
    assert out["log_probs"].shape == (len(lengths), 1000)


def test_a_width_of_0_and_lengths_that_lie(role: MakeRole) -> None:
    cluster = role(Echo, 3)
    none = DataProto({"input_ids": torch.zeros(4, 0, dtype=torch.int64), "lengths": torch.zeros(4)})
    none.update({"lengths": torch.zeros(4, dtype=torch.int64)})
    assert_same(cluster.echo(none), none)
    for wrong in ([1, 11], [-1, 2]):
        ids = torch.ones(2, 10, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"10 tokens is the width .* must lie in 0..10"):
            cluster.echo(DataProto({"input_ids": ids, "lengths": torch.tensor(wrong)}))
