"""The same work by Ray actors, in three ways; started by the driver of the benchmark."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict


class Saved:
    """A batch that is pickled as ROLL's DataProto is."""

    def __init__(self, batch: TensorDict):
        self.batch = batch

    def __getstate__(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(self.batch.contiguous().consolidate(), buffer)
        return buffer.getvalue()

    def __setstate__(self, state: bytes) -> None:
        self.batch = torch.load(io.BytesIO(state), weights_only=False)


class RayWorker:
    def saved(self, data):
        return Saved(self.cloned(data.batch))

    def cloned(self, data):
        return TensorDict({"log_probs": data["old_log_probs"] * 2}, data.batch_size)

    def arrays(self, ids, mask, log_probs):
        return log_probs * 2

    def empty(self):
        return None


class RaySide:
    def __init__(self, ranks: int) -> None:
        import ray

        self.ray, self.ranks = ray, ranks
        ray.init(
            num_cpus=ranks,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=3 << 30,
        )
        self.actors = [ray.remote(RayWorker).remote() for _ in range(ranks)]
        self.empty()

    def empty(self) -> None:
        self.ray.get([a.empty.remote() for a in self.actors])

    def saved(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([s.batch for s in self.ask("saved", data, Saved)])["log_probs"]

    def cloned(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat(self.ask("cloned", data, TensorDict.clone))["log_probs"]

    def ask(self, name: str, data: dict[str, torch.Tensor], of: Callable[..., Any]) -> list[Any]:
        chunks = TensorDict(data, [len(data["input_ids"])]).chunk(self.ranks)
        pairs = zip(self.actors, chunks, strict=True)
        return self.ray.get([getattr(a, name).remote(of(c)) for a, c in pairs])

    def arrays(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        import numpy as np

        parts = zip(
            *(t.numpy().reshape(self.ranks, -1, t.shape[1]) for t in data.values()), strict=True
        )
        refs = [a.arrays.remote(*p) for a, p in zip(self.actors, parts, strict=True)]
        return torch.from_numpy(np.concatenate(self.ray.get(refs)))
