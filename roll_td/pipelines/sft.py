"""Supervised fine-tuning: a model learns the answers of a data set."""

from __future__ import annotations

from torch import Tensor

from roll_td.config.sft import SFTConfig
from roll_td.metrics import Mean, Metric
from roll_td.pipelines.training import TextTraining
from roll_td.protocol import DataProto


class SFTPipeline(TextTraining):
    """Roles: actor_train, and with prompts those of EvaluatedConfig. A step is one optimiser step
    on batch_size rows."""

    purpose = "answers"

    def __init__(self, pipeline_config: SFTConfig) -> None:
        super().__init__(pipeline_config)
        self.start(pipeline_config.actor_train)

    def train_step(self, step: int, batch: DataProto) -> dict[str, Metric]:
        """One optimiser step on the rows of a step."""
        metrics: dict[str, Metric] = self.trained.train_step(batch).meta_info["metrics"]
        return metrics

    def look(self, step: int, batch: DataProto) -> dict[str, Tensor]:
        """The loss of each row, a sum over its labels, and how many these are."""
        rows = self.trained.val_step(batch)
        return {name: rows[name] for name in ("loss", "tokens")}

    def validate(self) -> dict[str, Metric]:
        """The mean loss over all labels of the validation data, each counted once."""
        assert self.validation_data is not None, "is_validation_due says no"
        loss, tokens = 0.0, 0
        for batch in self.validation_data.batches(self.pipeline_config.batch_size):
            rows = self.trained.val_step(batch)
            loss += rows["loss"].double().sum().item()
            tokens += int(rows["tokens"].sum())
        return {"val/loss": Mean(loss / tokens, tokens)}
