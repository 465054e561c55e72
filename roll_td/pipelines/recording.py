"""What a step was, in a file from which it can be done again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from roll_td.config.replay import record_path
from roll_td.metrics import Metric
from roll_td.pipelines.estimating import Estimator
from roll_td.protocol import DataProto

SHOWN_SAMPLES = 4
"""Rows that an error names."""


@dataclass(frozen=True)
class Record:
    """One step."""

    step: int
    columns: dict[str, Any]
    """All of the batch at its end, by name: tensors, and lists of an object a row; sample_id int64
    (B) says which row is which."""
    metrics: dict[str, list[dict[str, float]]]
    """What each role that has learnt told of each of its optimiser steps."""

    def save(self, path: Path) -> None:
        """Write it; a file that is there is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(vars(self), partial)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote, of a record that has more too."""
        kept = torch.load(path, weights_only=True)
        return cls(**{field.name: kept[field.name] for field in fields(cls)})

    def check_sample(self, sample: int) -> None:
        """ValueError, with those that are near, unless there is a row of this sample_id."""
        ids = sorted(self.columns["sample_id"].tolist())
        if sample not in ids:
            near = sorted(sorted(ids, key=lambda one: abs(one - sample))[:SHOWN_SAMPLES])
            raise ValueError(
                f"step {self.step} has no row of sample_id {sample}: it has {len(ids)}, from "
                f"{ids[0]} to {ids[-1]}, the nearest {', '.join(map(str, near))}"
            )

    @property
    def batch(self) -> DataProto:
        """The columns as a batch of their own."""
        return DataProto.from_single_dict(dict(self.columns))


@dataclass(frozen=True)
class RolloutRecord(Record):
    """One step of RLVR."""

    sampled_mask: Tensor
    """bool (B, T), response_mask before advantages were made."""
    estimator: dict[str, Any]
    """The estimator's state at that time."""
    kl_coefficient: float
    """Of the update."""
    parts: list[list[int]]
    """The sample_id of each row of each mini-batch, in the order of the optimiser steps."""


class Recorder:
    """Writes each `every`-th step of a run, from the first on; None: none."""

    def __init__(self, run_dir: Path, every: int | None) -> None:
        self._run_dir, self._every = run_dir, every

    def is_due(self, step: int) -> bool:
        """Whether this one is written."""
        return self._every is not None and step % self._every == 0

    def save(self, step: int, batch: DataProto, metrics: dict[str, Metric]) -> None:
        """Write the batch of a step, and what its optimiser step has told."""
        told = {"train": [_floats(metrics)]}
        Record(step, _columns(batch), told).save(record_path(self._run_dir, step))

    def begin(self, batch: DataProto, estimator: Estimator) -> None:
        """Before advantages are made of a rollout."""
        self._sampled_mask, self._estimator = batch["response_mask"], estimator.state_dict()

    def end(
        self,
        step: int,
        batch: DataProto,
        parts: Sequence[DataProto],
        learnt: Mapping[str, Sequence[DataProto]],
        kl_coefficient: float,
    ) -> None:
        """After the updates from parts of a rollout: what actor and critic have told of each.
        Writes it if it is due."""
        if not self.is_due(step):
            return
        RolloutRecord(
            step=step,
            columns=_columns(batch),
            metrics={
                name: [_floats(done.meta_info["metrics"]) for done in steps]
                for name, steps in learnt.items()
            },
            sampled_mask=self._sampled_mask,
            estimator=self._estimator,
            kl_coefficient=kl_coefficient,
            parts=[part["sample_id"].tolist() for part in parts],
        ).save(record_path(self._run_dir, step))


def _columns(batch: DataProto) -> dict[str, Any]:
    return {
        name: column if isinstance(column := batch[name], Tensor) else column.tolist()
        for name in batch.keys()  # noqa: SIM118  a DataProto's rows are what it iterates over
    }


def _floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
