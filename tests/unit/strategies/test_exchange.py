"""Weights in parts, into a model; what shards of it do is in tests/dist/test_weights.py."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from roll_td.strategies.exchange import HoldsWeights, Incoming, Shard
from roll_td.strategies.parts import Part


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))


class Holder(HoldsWeights):
    def __init__(self) -> None:
        self.model = Model()
        self.is_away = False

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.model.state_dict().items())

    def _require_model(self) -> None:
        if self.is_away:
            raise ValueError("the model is offloaded")


def whole(model: nn.Module) -> dict[str, Part]:
    random = torch.Generator().manual_seed(1)
    return {
        name: Part(name, tuple(t.shape), 0, torch.randn(t.numel(), generator=random))
        for name, t in model.state_dict().items()
    }


def test_an_update_ends_when_all_numbers_have_come() -> None:
    holder = Holder()
    for version in (1, 2):
        parts = whole(holder.model)
        holder.update_parameter_in_bucket([p for p in parts.values() if p.name != "body.weight"])
        weight = parts["body.weight"]
        first, rest = weight.values[:5], weight.values[5:]
        holder.update_parameter_in_bucket([weight._replace(values=first)])
        with pytest.raises(ValueError, match=r"1 of 4 weights did not come .* \['body.weight'\]"):
            holder.process_weights_after_loading(9)
        assert holder.weight_version == version - 1
        holder.update_parameter_in_bucket([weight._replace(start=5, values=rest)])
        holder.process_weights_after_loading(version)
        assert holder.weight_version == version
        for name, tensor in holder.full_parameters():
            assert torch.equal(tensor.reshape(-1), parts[name].values)
    with pytest.raises(ValueError, match="4 of 4 weights did not come whole"):
        holder.process_weights_after_loading(3)
    holder.is_away = True
    with pytest.raises(ValueError, match="the model is offloaded"):
        holder.update_parameter_in_bucket([])


def test_parts_that_are_not_of_the_model_are_named() -> None:
    model = Model()
    parts = whole(model)
    body = parts["body.weight"]
    for wrong, words in (
        (body._replace(name="body.wight"), "body.wight is none of the model's; nearest: body.wei"),
        (body._replace(shape=(3, 4)), "body.weight is [3, 4], here [4, 3]; update from the same"),
        (body._replace(start=1), "body.weight: number 1 came where 0 was due; send each once"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            Incoming(model).take(wrong)
    incoming = Incoming(model)
    incoming.take(body)
    with pytest.raises(ValueError, match="number 0 came where 12 was due"):
        incoming.take(body)


def test_merged_weights_do_not_go_under_lora_layers() -> None:  # E06
    model = Model()
    model.body.lora_A = nn.ModuleDict({"default": nn.Linear(3, 1)})
    with pytest.raises(ValueError, match="has LoRA layers that would be added to them"):
        Incoming(model)


@pytest.mark.parametrize("held", [(0, 10), (3, 4), (9, 1), (5, 0)])
@pytest.mark.parametrize("sent", [(0, 10), (0, 3), (4, 2), (6, 4)])
def test_a_shard_takes_its_own_of_a_part(held: tuple[int, int], sent: tuple[int, int]) -> None:
    shard = Shard(held[0], torch.zeros(held[1]))
    values = torch.arange(10.0)[sent[0] : sent[0] + sent[1]] + 100
    shard.take(Part("w", (10,), sent[0], values))
    inside = range(sent[0], sent[0] + sent[1])
    want = [100.0 + i if i in inside else 0.0 for i in range(held[0], held[0] + held[1])]
    assert shard.values.tolist() == want
