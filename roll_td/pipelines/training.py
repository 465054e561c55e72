"""What pipelines share that train on batches of a data set, one optimiser step each."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from roll_td.config.base import WorkerConfig
from roll_td.config.evaluation import EvaluatedConfig
from roll_td.data.encode import Purpose
from roll_td.data.loader import load_data
from roll_td.metrics import Last, Mean, Metric
from roll_td.models import load_tokenizer
from roll_td.pipelines.answering import start_roles
from roll_td.pipelines.base import BasePipeline
from roll_td.pipelines.evaluation import Evaluation
from roll_td.pipelines.recording import Recorder
from roll_td.protocol import DataProto
from roll_td.runtime.cluster import Cluster


def is_validation_due(config: Any, step: int) -> bool:
    """Whether to validate after `step`: after each eval_steps, and the last of max_steps."""
    done, every = step + 1, config.eval_steps
    return done == config.max_steps or (every is not None and done % every == 0)


class TextTraining(BasePipeline):
    """A subclass starts its roles, says what a step is and what validation tells. What prompts are
    answered is told under the number of steps that are done, as in RLVR."""

    purpose: Purpose
    """What the data is for."""
    trained: Cluster
    """The role that is trained, checkpointed and exported."""

    def __init__(self, pipeline_config: EvaluatedConfig) -> None:
        super().__init__(pipeline_config)
        config = pipeline_config
        self.tokenizer: Any = load_tokenizer(config.model)
        data = load_data(config.data, self.tokenizer, self.purpose, config.batch_size, config.seed)
        self.train_data, self.validation_data = data.train, data.validation
        config.max_steps = config.max_steps or data.train.steps(config.epochs or 1)
        self.evaluation: Evaluation | None = None
        self.recorder = Recorder(self.run_dir, config.record_steps)

    def start(self, trained: WorkerConfig, *others: WorkerConfig) -> list[Cluster]:
        """Start the role that is trained, others, and those that answer prompts if there are any.
        Returns the clusters of `others`."""
        config = self.pipeline_config
        trying = [] if config.prompts is None else [config.actor_infer, config.reward]
        clusters = start_roles(self, trained, *others, *trying, *config.judges.values())
        self.trained, rest = clusters[0], clusters[1 + len(others) :]
        self.set_checkpoint_clusters(self.trained)
        if trying:
            self.evaluation = Evaluation(config, self.tokenizer, *rest)
            self.set_model_update_pair(self.trained, rest[0], config=config.model_update)
        return clusters[1 : 1 + len(others)]

    @abstractmethod
    def train_step(self, step: int, batch: DataProto) -> dict[str, Metric]:
        """One optimiser step on the batch of a step; what it tells."""

    @abstractmethod
    def look(self, step: int, batch: DataProto) -> dict[str, Tensor]:
        """What the weights before a step make of each row of its batch: columns for its record."""

    def places(self, step: int) -> Tensor:
        """The place in the stream of data of each row of a step, int64 (B); both rows of a pair
        have one."""
        size, sides = self.pipeline_config.batch_size, self.train_data.rows.sides
        return torch.arange(step * size, (step + 1) * size).repeat_interleave(sides)

    @abstractmethod
    def validate(self) -> dict[str, Metric]:
        """What the validation data tells, each row counted once."""

    def run(self) -> None:
        """Train, validate, save; at the end export."""
        for step in self.steps(self.pipeline_config.max_steps):
            if step == 0:
                self.evaluate(step)
            batch, seen = self.train_data.batch(step), {}
            if self.recorder.is_due(step):
                seen = {"sample_id": self.places(step), **self.look(step, batch)}
            began = time.monotonic()
            told = self.train_step(step, batch)
            self.log({**told, **self.progress(batch, began)})
            if seen:
                batch.update(seen)
                self.recorder.save(step, batch, told)
            if is_validation_due(self.pipeline_config, step):
                if self.validation_data is not None:
                    self.log(self.validate())
                self.evaluate(step + 1)
            self.do_checkpoint(step)
        if self.pipeline_config.export_dir is not None:
            self.trained.export(self.pipeline_config.export_dir)

    def evaluate(self, done: int) -> None:
        """If there are prompts, have them answered by the weights after so many steps."""
        if self.evaluation is not None:
            began, metrics = time.monotonic(), self.model_update(done)
            metrics |= self.evaluation()
            self.log({**metrics, "time/evaluation_s": Mean(time.monotonic() - began)}, done)

    def progress(self, batch: DataProto, began: float) -> dict[str, Metric]:
        """Epochs done, and how fast: tokens are real ones, learnt from or not."""
        seconds = time.monotonic() - began
        return {
            "epoch": Last(self.train_data.epoch_of(self.global_step + 1)),
            "time/step_s": Mean(seconds),
            "time/tokens_per_s": Mean(batch["lengths"].sum().item() / seconds),
        }
