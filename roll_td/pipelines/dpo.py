"""Direct preference optimisation: a model learns which of two answers is preferred."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from roll_td.config.base import WorkerConfig
from roll_td.config.classes import import_object
from roll_td.config.dpo import DPOConfig
from roll_td.config.model import ModelConfig
from roll_td.data.rows import Rows
from roll_td.metrics import Mean, Metric, merge_metrics
from roll_td.pipelines.training import TextTraining
from roll_td.plan import StepPlan
from roll_td.protocol import DataProto
from roll_td.runtime.cluster import Cluster
from roll_td.workers.dpo import pair_losses

logger = logging.getLogger(__name__)
Answers = NDArray[np.float32]
"""(R, 2): of chosen and rejected answers, as AnswerWorker.compute_answers gives."""


class DPOPipeline(TextTraining):
    """Roles: actor_train, and reference unless the config does without. A step is one optimiser
    step on batch_size pairs."""

    purpose = "pairs"
    shown = (
        "loss", "accuracy", "reward_margin", "grad_norm", "val/accuracy", "val/reward_margin",
        "val/score", "val/pass@1",
    )  # fmt: skip

    def __init__(self, pipeline_config: DPOConfig) -> None:
        super().__init__(pipeline_config)
        config, role = pipeline_config, pipeline_config.reference
        self.loss = import_object(config.loss.path)
        self.files = self._cache_files()
        is_cached = bool(self.files) and all(file.exists() for file in self.files.values())
        asked = [role] if role is not None and not is_cached else []
        others = self.start(config.actor_train, *asked)
        self.reference = others[0] if others else None
        self.cached: dict[str, Answers] = {}

    def run(self) -> None:
        """Have the reference's side ready if it is to be cached, then train."""
        self.cached = {name: self._cached(name, file) for name, file in self.files.items()}
        if self.cached and self.reference is not None:
            self.reference.offload_states()
        super().run()

    def train_step(self, step: int, batch: DataProto) -> dict[str, Metric]:
        """One optimiser step on the pairs of a step."""
        self.add_reference_of_step(step, batch)
        batch.plan = plan_over_pairs(self.trained, batch)
        metrics: dict[str, Metric] = self.trained.train_step(batch).meta_info["metrics"]
        return metrics

    def look(self, step: int, batch: DataProto) -> dict[str, torch.Tensor]:
        """Of each row what its answer makes, and its reward; of its pair the margin of rewards and
        the loss."""
        self.add_reference_of_step(step, batch)
        answers = self.trained.compute_answers(batch)["answers"]
        settings = self.pipeline_config.loss.arguments
        losses, _ = pair_losses(batch, answers, self.loss, settings)
        ratios = answers - batch["reference"] if "reference" in batch else answers
        rewards = settings.get("beta", 1.0) * ratios
        pairs = batch["group_id"].unique(return_inverse=True)[1]
        gains = torch.where(batch["is_chosen"], rewards, -rewards)
        margins = torch.zeros(len(losses)).index_add(0, pairs, gains)
        found = {"answers": answers, "reward": rewards}
        return found | {"margin": margins[pairs], "loss": losses[pairs]}

    def validate(self) -> dict[str, Metric]:
        """The loss and the metrics of training over all pairs of the validation data."""
        assert self.validation_data is not None, "is_validation_due says no"
        size, parts = self.pipeline_config.batch_size, []
        for number, batch in enumerate(self.validation_data.batches(size)):
            pairs = len(batch) // 2
            batch.update({"group_id": torch.arange(pairs).repeat_interleave(2)})
            first = number * size
            self.add_reference(batch, "validation", np.arange(first, first + pairs))
            answers = self.trained.compute_answers(batch)["answers"]
            settings = self.pipeline_config.loss.arguments
            losses, metrics = pair_losses(batch, answers, self.loss, settings)
            parts.append({**metrics, "loss": Mean(losses.mean().item(), pairs)})
        return {f"val/{name}": value for name, value in merge_metrics(parts).items()}

    def add_reference_of_step(self, step: int, batch: DataProto) -> None:
        """Add the column `reference` to the batch of a step, unless it has it or there is none."""
        if "reference" not in batch:
            size = self.pipeline_config.batch_size
            self.add_reference(batch, "train", self.train_data.numbers(step * size, size))

    def add_reference(self, batch: DataProto, name: str, numbers: NDArray[np.int64]) -> None:
        """Add the column `reference`, unless there is none: of the rows with these numbers of the
        data `name`."""
        if name in self.cached:
            batch.update({"reference": torch.from_numpy(self.cached[name][numbers].reshape(-1))})
        elif not self.pipeline_config.reference_free:
            batch.update({"reference": self.ask_reference(batch)})

    def ask_reference(self, batch: DataProto) -> torch.Tensor:
        """compute_answers of the reference, float32 (B)."""
        tokens = batch.select(["input_ids", "lengths", "labels"])
        if self.pipeline_config.has_adapters:
            answers: torch.Tensor = self.trained.compute_reference(tokens)["answers"]
            return answers
        assert self.reference is not None, "not all of it was cached"
        of_role: torch.Tensor = self.reference.compute_answers(tokens)["answers"]
        return of_role

    def _rows(self) -> dict[str, Rows]:
        rows = {"train": self.train_data.rows}
        return rows if self.validation_data is None else rows | {"validation": self.validation_data}

    def _cache_files(self) -> dict[str, Path]:
        """The files of train and validation data; none without a cache."""
        config = self.pipeline_config
        if config.reference_cache is None:
            return {}
        role = config.reference or config.actor_train
        source = fingerprint(role.model or config.model, role, config.over, config.seed)
        folder = Path(config.reference_cache)
        return {name: folder / f"{_digest(source, r)}.npy" for name, r in self._rows().items()}

    def _cached(self, name: str, file: Path) -> Answers:
        """What the file has, which is made if it is not there."""
        rows = self._rows()[name]
        if file.exists():
            logger.info("%s: log-probs of the reference are taken from %s", name, file)
            kept: Answers = np.load(file)
            assert kept.shape == (len(rows), 2), "its name says what is in it"
            return kept
        logger.info("%s: log-probs of the reference go to %s", name, file)
        parts = [self.ask_reference(b) for b in rows.batches(self.pipeline_config.batch_size)]
        found: Answers = torch.cat(parts).numpy().reshape(-1, 2)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        with partial.open("wb") as open_file:
            np.save(open_file, found)
        partial.replace(file)
        return found


def plan_over_pairs(cluster: Cluster, batch: DataProto) -> StepPlan:
    """How the role cuts a batch whose pairs share a group_id: as plan_for cuts rows, each of which
    stands for a pair here. The denominator `pairs` counts them."""
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(batch["group_id"].tolist()):
        rows_of.setdefault(group, []).append(row)
    pairs = list(rows_of.values())
    lengths = torch.stack([batch["lengths"][rows].sum() for rows in pairs])
    plan = cluster.plan_for(DataProto({"lengths": lengths}), {"pairs": float(len(pairs))})
    micro_batches = tuple(
        tuple(tuple(chain.from_iterable(pairs[pair] for pair in micro)) for micro in own)
        for own in plan.micro_batches
    )
    return StepPlan(micro_batches, plan.denominators, plan.fillers)


def fingerprint(model: ModelConfig, role: WorkerConfig, over: str, seed: int) -> str:
    """What the answers of a reference follow from beside the data: its config, and name, size and
    time of each of its files."""
    path = Path(model.path).expanduser() if model.path else None
    found = [path, *sorted(path.glob("*"))] if path else []
    files = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in found if f.is_file()]
    parts: list[Any] = [asdict(model), files, role.training.compute_dtype, over, seed]
    return json.dumps(parts, sort_keys=True)


def _digest(source: str, rows: Rows) -> str:
    assert rows.learn is not None, "pairs have answers"
    digest = hashlib.sha256(source.encode())
    for array in (rows.tokens, rows.learn, rows.starts, rows.lengths):
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]
