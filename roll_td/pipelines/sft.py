"""Supervised fine-tuning: a model learns the answers of a data set."""

from __future__ import annotations

import time

from roll_td.config.sft import SFTConfig
from roll_td.data.loader import load_data
from roll_td.metrics import Last, Mean, Metric
from roll_td.models import load_tokenizer
from roll_td.pipelines.base import BasePipeline
from roll_td.protocol import DataProto
from roll_td.runtime.cluster import Cluster


class SFTPipeline(BasePipeline):
    """One role, actor_train. A step is one optimiser step on batch_size rows."""

    def __init__(self, pipeline_config: SFTConfig) -> None:
        super().__init__(pipeline_config)
        config, role = pipeline_config, pipeline_config.actor_train
        tokenizer = load_tokenizer(config.model)
        data = load_data(config.data, tokenizer, "answers", config.batch_size, config.seed)
        self.train_data, self.validation_data = data.train, data.validation
        config.max_steps = config.max_steps or data.train.steps(config.epochs or 1)
        self.actor_train = Cluster(
            str(role.name), str(role.worker_cls), self.resource_manager, role
        )
        self.actor_train.initialize(config)
        self.set_checkpoint_clusters(self.actor_train)

    def run(self) -> None:
        """Train, validate, save; at the end export."""
        for step in self.steps(self.pipeline_config.max_steps):
            began = time.monotonic()
            batch = self.train_data.batch(step)
            result = self.actor_train.train_step(batch)
            self.log({**result.meta_info["metrics"], **self.progress(batch, began)})
            if self.is_validation_due(step):
                self.log(self.validate())
            self.do_checkpoint(step)
        if self.pipeline_config.export_dir is not None:
            self.actor_train.export(self.pipeline_config.export_dir)

    def validate(self) -> dict[str, Metric]:
        """The mean loss over all labels of the validation data, each counted once."""
        assert self.validation_data is not None, "is_validation_due says no"
        loss, tokens = 0.0, 0
        for batch in self.validation_data.batches(self.pipeline_config.batch_size):
            rows = self.actor_train.val_step(batch)
            loss += rows["loss"].double().sum().item()
            tokens += int(rows["tokens"].sum())
        return {"val/loss": Mean(loss / tokens, tokens)}

    def is_validation_due(self, step: int) -> bool:
        """Whether to validate after `step`."""
        if self.validation_data is None:
            return False
        done, every = step + 1, self.pipeline_config.eval_steps
        return done == self.pipeline_config.max_steps or (every is not None and done % every == 0)

    def progress(self, batch: DataProto, began: float) -> dict[str, Metric]:
        """Epochs done, and how fast: tokens are real ones, learnt from or not."""
        seconds = time.monotonic() - began
        return {
            "epoch": Last(self.train_data.epoch_of(self.global_step + 1)),
            "time/step_s": Mean(seconds),
            "time/tokens_per_s": Mean(batch["lengths"].sum().item() / seconds),
        }
