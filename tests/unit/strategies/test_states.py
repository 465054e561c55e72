from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from roll_td.strategies import states


def test_tensors_of_one_storage_leave_and_come_back_together() -> None:
    whole = torch.randn(6, 3)
    rows, padded, empty = whole[1:4], torch.randn(8)[:5], torch.empty(0, 3)
    before = [tensor.clone() for tensor in (whole, rows, padded)]
    away = states.Offloaded([whole, rows, padded, empty])
    assert [t.untyped_storage().nbytes() for t in (whole, rows, padded)] == [0, 0, 0]
    away.load()
    assert all(map(torch.equal, (whole, rows, padded), before))
    whole[1] = 7.0
    assert rows[0].tolist() == [7.0] * 3  # still one storage
    away.load()
    assert rows[0].tolist() == [7.0] * 3  # and loaded once


def test_the_padding_of_a_shard_comes_along() -> None:
    storage = torch.arange(8.0)
    away = states.Offloaded([storage[:5]])
    away.load()
    assert storage.tolist() == list(range(8))


def test_tied_weights_are_named_once_and_buffers_too() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    model.register_buffer("count", torch.zeros(1))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert [name for name, _ in states.named(model)] == ["count", "a.weight", "a.bias", "b.bias"]


def test_plain_tensors_have_no_shards() -> None:
    tensor = torch.randn(3, requires_grad=True)
    part = states.local(tensor)
    assert part.data_ptr() == tensor.data_ptr() and not part.requires_grad
    assert states.shard_like(part, tensor) is part
    assert states.cut_of(tensor) is None
    assert states.whole(tensor).data_ptr() == tensor.data_ptr()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_is_staged_is_what_was_there_then(tmp_path: Path, alone: dist.ProcessGroup) -> None:
    tensors = {"a": torch.randn(70, 300), "step": torch.tensor(3)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    staged = states.stage(tensors, alone)
    for tensor in tensors.values():
        tensor.zero_()
    (tmp_path / "saved").mkdir()
    states.write(tmp_path / "saved", staged)
    states.load(tmp_path / "saved", tensors, alone)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
