"""What a step of RLVR was, in a file from which it can be done again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll_td.config.replay import record_path
from roll_td.pipelines.estimating import Estimator
from roll_td.protocol import DataProto

SHOWN_SAMPLES = 4
"""Answers that an error names."""


@dataclass(frozen=True)
class Record:
    """One step."""

    step: int
    columns: dict[str, Any]
    """All of the batch at its end, by name: tensors, and lists of an object a row."""
    sampled_mask: Tensor
    """bool (B, T), response_mask before advantages were made."""
    estimator: dict[str, Any]
    """The estimator's state at that time."""
    kl_coefficient: float
    """Of the update."""
    parts: list[list[int]]
    """The sample_id of each row of each mini-batch, in the order of the optimiser steps."""
    metrics: dict[str, list[dict[str, float]]]
    """What actor and critic, where they have learnt, told of each of their optimiser steps."""

    def save(self, path: Path) -> None:
        """Write it; a file that is there is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(vars(self), partial)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read what `save` wrote."""
        return cls(**torch.load(path, weights_only=True))

    def check_sample(self, sample: int) -> None:
        """ValueError, with those that are near, unless there is an answer of this sample_id."""
        ids = sorted(self.columns["sample_id"].tolist())
        if sample not in ids:
            near = sorted(sorted(ids, key=lambda one: abs(one - sample))[:SHOWN_SAMPLES])
            raise ValueError(
                f"step {self.step} has no answer of sample_id {sample}: it has {len(ids)}, from "
                f"{ids[0]} to {ids[-1]}, the nearest {', '.join(map(str, near))}"
            )

    @property
    def batch(self) -> DataProto:
        """The columns as a batch of their own."""
        return DataProto.from_single_dict(dict(self.columns))


class Recorder:
    """Writes each `every`-th step of a run; None: none."""

    def __init__(self, run_dir: Path, every: int | None) -> None:
        self._run_dir, self._every = run_dir, every

    def begin(self, batch: DataProto, estimator: Estimator) -> None:
        """Before advantages are made of a batch."""
        self._sampled_mask, self._estimator = batch["response_mask"], estimator.state_dict()

    def end(
        self,
        step: int,
        batch: DataProto,
        parts: Sequence[DataProto],
        learnt: Mapping[str, Sequence[DataProto]],
        kl_coefficient: float,
    ) -> None:
        """After the updates from its parts: what actor and critic have told of each."""
        if self._every is None or step % self._every:
            return
        columns = {
            name: column if isinstance(column := batch[name], Tensor) else column.tolist()
            for name in batch.keys()  # noqa: SIM118  a DataProto's rows are what it iterates over
        }
        Record(
            step=step,
            columns=columns,
            sampled_mask=self._sampled_mask,
            estimator=self._estimator,
            kl_coefficient=kl_coefficient,
            parts=[part["sample_id"].tolist() for part in parts],
            metrics={
                name: [_floats(done.meta_info["metrics"]) for done in steps]
                for name, steps in learnt.items()
            },
        ).save(record_path(self._run_dir, step))


def _floats(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
