"""What replays share: a record, the weights that its step began with, and what is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from roll_td.checkpoint.store import fault_of
from roll_td.config.replay import record_path
from roll_td.pipelines.base import BasePipeline
from roll_td.pipelines.comparing import Compared, compare, comparison_table
from roll_td.pipelines.recording import Record
from roll_td.runtime.cluster import Cluster

EXACT, CLOSE, NEAR, ABOUT = 0.0, 1e-6, 1e-4, 1e-3
"""Tolerances: inputs and rewards; what is made of rewards; what a model says of tokens and rows,
which is rounded by how many ranks cut the work; what the engine told, and means over a
mini-batch."""
R = TypeVar("R", bound=Record)


class Replaying(BasePipeline):
    """Does a recorded step again. Each stage starts from what was recorded of the one before it, so
    that a fault shows where it is. The weights that step N began with are those of the checkpoint
    step_N of the run, and for step 0 those of the model."""

    record: Record
    """The step."""
    sample: int | None
    """The sample_id that is looked at; None: all."""
    rows: Tensor
    """Rows that are looked at, bool (B)."""
    has_weights: bool
    """Whether there are weights to compute with."""

    def open(self, record_cls: type[R], needs_weights: str) -> None:
        """Read the record. needs_weights: what can't be done without a checkpoint, for the user.
        ValueError for a sample that isn't there."""
        of = self.pipeline_config.replay
        self.record, self.sample = record_cls.load(record_path(of.run_dir, of.step)), of.sample
        ids = self.record.columns["sample_id"]
        self.rows = torch.ones(len(ids), dtype=torch.bool)
        if self.sample is not None:
            self.record.check_sample(self.sample)
            self.rows = ids == self.sample
        self.names = [f"sample {name}" for name in ids.tolist()]
        self.told: list[str] = []
        self.checkpoint = Path(of.run_dir) / "checkpoints" / f"step_{of.step}"
        fault = fault_of(self.checkpoint) if of.step else None
        if fault is not None:
            self.told.append(f"no weights, so no {needs_weights}: {self.checkpoint}: {fault}")
        self.has_weights = fault is None

    def load(self, learner: Cluster) -> None:
        """Give a role that learns the weights of the step's beginning."""
        if self.record.step:
            learner.load_checkpoint(str(self.checkpoint.absolute() / str(learner.name)))

    def compared(
        self,
        stage: str,
        name: str,
        again: Tensor,
        tolerance: float,
        where: Tensor | None = None,
    ) -> Compared:
        """A column that was computed again beside the recorded one, in the rows looked at."""
        recorded: Tensor = self.record.columns[name]
        rows = self.rows if recorded.ndim == 1 else self.rows[:, None].expand(recorded.shape)
        where = rows if where is None else rows & where
        return compare(stage, name, recorded, again, where, self.names, tolerance)

    def steps_compared(
        self,
        prefix: str,
        recorded: Sequence[Mapping[str, float]],
        again: Sequence[Mapping[str, Any]],
    ) -> Iterator[Compared]:
        """What was told of optimiser steps, metric by metric."""
        names = [f"optimiser step {number}" for number in range(len(recorded))]
        where = torch.ones(len(recorded), dtype=torch.bool)
        for metric in recorded[0]:
            old, new = (
                torch.tensor([float(one[metric]) for one in every], dtype=torch.float64)
                for every in (recorded, again)
            )
            yield compare("losses", prefix + metric, old, new, where, names, ABOUT)

    def show(self, found: Sequence[Compared]) -> None:
        """Print it."""
        print(comparison_table(found, self.told), flush=True)
