"""Does a recorded step of training on a data set again, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from roll_td.config.replay import DistillReplayConfig, DPOReplayConfig, SFTReplayConfig
from roll_td.pipelines.comparing import Compared
from roll_td.pipelines.distill import DistillPipeline
from roll_td.pipelines.dpo import DPOPipeline
from roll_td.pipelines.recording import Record
from roll_td.pipelines.replaying import EXACT, NEAR, Replaying
from roll_td.pipelines.sft import SFTPipeline
from roll_td.pipelines.training import TextTraining
from roll_td.protocol import DataProto

OF_PLACEMENT = {"teacher_mb"}
"""Metrics that follow from where roles are, and here they are elsewhere."""


class TextReplay(Replaying, TextTraining):
    """The inputs as the data gives them; then what the weights that the step began with make of the
    recorded ones, row by row and in the optimiser step."""

    def run(self) -> None:
        """Print what each stage gives."""
        self.open(Record, "rows and losses")
        inputs = self.train_data.batch(self.record.step)
        names = sorted(inputs.keys())
        found = [
            self.compared("inputs", name, column, EXACT)
            for name in names
            if isinstance(column := inputs[name], Tensor)
        ]
        if self.has_weights:
            self.load(self.trained)
            found += self.again(self.record.batch.select(names))
        self.show(found)
        if self.sample is not None:
            columns = self.record.columns
            for row in self.rows.nonzero()[:, 0].tolist():
                tokens = columns["input_ids"][row, : columns["lengths"][row]]
                print(f"text: {self.tokenizer.decode(tokens)!r}", flush=True)

    def again(self, batch: DataProto) -> Iterator[Compared]:
        """What is made of rows, by other roles too, and the optimiser step."""
        step = self.record.step
        rows: dict[str, Tensor] = self.look(step, batch)
        beside = {name: batch[name] for name in ("reference",) if name in batch}
        for name, column in (beside | rows).items():
            yield self.compared("rows", name, column, NEAR)
        if self.sample is None:
            told = self.train_step(step, batch)
            (recorded,) = self.record.metrics["train"]
            kept = {name: value for name, value in recorded.items() if name not in OF_PLACEMENT}
            yield from self.steps_compared("", [kept], [told])


class SFTReplayPipeline(TextReplay, SFTPipeline):
    """Of fine-tuning."""

    def __init__(self, pipeline_config: SFTReplayConfig) -> None:
        super().__init__(pipeline_config)


class DPOReplayPipeline(TextReplay, DPOPipeline):
    """Of learning from pairs."""

    def __init__(self, pipeline_config: DPOReplayConfig) -> None:
        super().__init__(pipeline_config)


class DistillReplayPipeline(TextReplay, DistillPipeline):
    """Of distillation."""

    def __init__(self, pipeline_config: DistillReplayConfig) -> None:
        super().__init__(pipeline_config)
