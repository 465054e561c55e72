"""Weights out of a strategy and into one, in parts that make up buckets.

Both sides go by the names of Hugging Face, and by whole weights seen as one row of numbers: a part
is a run of them. How a rank holds them, whole or as its shard, is its own affair.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from roll_td.strategies import states
from roll_td.strategies.parts import Part, Weight

if TYPE_CHECKING:
    from roll_td.weights.plan import UpdatePlan


VERSION = "weight_version"
"""Of the weights, in a checkpoint."""


class HoldsWeights(ABC):
    """A strategy with the weights of a model in this process: it can give them and take them."""

    model: Any
    weight_version = 0
    """Number of the update that the weights came with; 0 before any."""
    _incoming: Incoming | None = None

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight once, whole, by its name, in one order; all ranks of the role together."""

    @abstractmethod
    def _require_model(self) -> None:
        """ValueError if the model is offloaded."""

    def adapter_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Those of its LoRA layers alone, as full_parameters has all. ValueError without any."""
        raise ValueError(
            f"{type(self).__name__} has no adapters to give; set strategy_config.lora: merged"
        )

    def given(self, adapters: bool) -> Iterator[tuple[str, Tensor]]:
        """What it gives: full_parameters, or adapter_parameters."""
        return self.adapter_parameters() if adapters else self.full_parameters()

    def setup_model_update(self, adapters: bool = False) -> dict[str, Weight]:
        """What `given` gives, in its order. All ranks of the role call it together."""
        return {
            name: Weight(tuple(tensor.shape), tensor.dtype) for name, tensor in self.given(adapters)
        }

    def model_update(self, plan: UpdatePlan) -> Iterator[list[Part]]:
        """The parts of each bucket of the plan in turn, in the dtype they have here. All ranks of
        the role go through it together: it gathers as it goes."""
        weights = self.given(plan.adapters)
        name, flat = "", torch.empty(0)
        for bucket in plan.buckets:
            parts = []
            for piece in bucket.pieces:
                if piece.name != name:
                    name, whole = next(weights)
                    assert (name, tuple(whole.shape)) == (piece.name, piece.shape), "another plan"
                    flat = whole.reshape(-1)
                values = flat[piece.start : piece.start + piece.count]
                parts.append(Part(name, piece.shape, piece.start, values))
            yield parts
        assert next(weights, None) is None, "weights that the plan does not have"

    def update_parameter_in_bucket(self, parts: Iterable[Part]) -> None:
        """Take parts of new weights, cast to the dtype of the old ones. The values may be
        overwritten when this returns.

        ValueError for a name or shape that is not the model's, or numbers that do not come in
        their order; the model then has some of the new weights.
        """
        if self._incoming is None:
            self._require_model()
            self._incoming = Incoming(self.model)
        for part in parts:
            self._incoming.take(part)

    def process_weights_after_loading(self, version: int) -> None:
        """All parts have come: the weights are those of update `version`. ValueError if some are
        missing."""
        incoming = self._incoming or Incoming(self.model)
        incoming.check_complete()
        self._incoming, self.weight_version = None, version


class Incoming:
    """The weights of a model while new ones come in, each number once and in order."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._own = dict(states.named(model))
        if any(".lora_A.default." in name for name in self._own):
            raise ValueError(
                "weights come merged, and this model has LoRA layers that would be added to them; "
                "give the role that receives them a model without lora"
            )
        self._shards = {name: Shard.of(tensor) for name, tensor in self._own.items()}
        self._seen = dict.fromkeys(self._own, 0)

    def take(self, part: Part) -> None:
        """Copy what of a part this rank holds."""
        name, seen = part.name, self._seen.get(part.name)
        if seen is None:
            near = ", ".join(get_close_matches(name, self._own, 1))
            raise ValueError(f"weight {name} is none of the model's; nearest: {near or 'none'}")
        if part.shape != tuple(self._own[name].shape):
            shapes = f"{list(part.shape)}, here {list(self._own[name].shape)}"
            raise ValueError(f"weight {name} is {shapes}; update from the same architecture")
        if part.start != seen:
            raise ValueError(
                f"weight {name}: number {part.start} came where {seen} was due; send each once, "
                "in order"
            )
        self._seen[name] += part.values.numel()
        self._shards[name].take(part)

    def check_complete(self) -> None:
        """ValueError that names weights of which numbers are missing."""
        missing = [n for n, tensor in self._own.items() if self._seen[n] != tensor.numel()]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(self._own)} weights did not come whole: {missing[:4]}"
            )


class Shard(NamedTuple):
    """The part of a weight that a rank holds: a run of its numbers."""

    start: int
    values: Tensor
    """(count,), in the memory of the weight itself."""

    @classmethod
    def of(cls, tensor: Tensor) -> Shard:
        """This rank's part of a weight, or all of it."""
        own, cut = states.local(tensor), states.cut_of(tensor)
        if cut is None:
            return cls(0, own.view(-1))
        assert isinstance(tensor, DTensor)
        dim, rows = cut
        first = min(rows * tensor.device_mesh.get_local_rank(dim), tensor.shape[0])
        assert own.shape[0] == min(rows, tensor.shape[0] - first), "not as torch.chunk cuts"
        return cls(first * math.prod(tensor.shape[1:]), own.view(-1))

    def take(self, part: Part) -> None:
        """Copy what is in both."""
        low = max(self.start, part.start)
        high = min(self.start + self.values.numel(), part.start + part.values.numel())
        if low < high:
            own = self.values[low - self.start : high - self.start]
            own.copy_(part.values[low - part.start : high - part.start])
