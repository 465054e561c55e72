"""The role that says what responses are worth."""

from __future__ import annotations

import torch

from roll_td.config.base import BaseConfig
from roll_td.config.rewards import RewardWorkerConfig
from roll_td.protocol import DataProto
from roll_td.rewards.judge import Judge
from roll_td.runtime.dispatch import Dispatch, register
from roll_td.runtime.worker import Worker


class RewardWorker(Worker):
    """Scores responses by the `rewards` of the pipeline's config."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: BaseConfig) -> None:
        """Import the functions and check their settings. ValueError where that fails."""
        super().initialize(pipeline_config)
        assert isinstance(self.worker_config, RewardWorkerConfig), "the role's config section"
        rewards = pipeline_config.rewards  # type: ignore[attr-defined]
        self.judge = Judge(rewards, self.worker_config.processes, self.logger)

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def compute_rewards(self, data: DataProto) -> DataProto:
        """Columns for each row: `scores` float32 (B), NaN is "no score"; where some domain has
        several functions, of each `scores_<label>` float32 (B), NaN too where it wasn't asked.

        Takes the object columns that the functions name (response, ground_truth, …) and domain.
        Metrics and exceptions as Judge.score.
        """
        verdict = self.judge.score(data.non_tensor_batch)
        columns = {"scores": verdict.scores}
        columns |= {f"scores_{label}": values for label, values in verdict.parts.items()}
        made = {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}
        return DataProto(made, meta_info={"metrics": verdict.metrics})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def check_golds(self, data: DataProto) -> DataProto:
        """Metrics, no rows, on the object columns ground_truth and domain: see Judge.check_golds.
        Each distinct ground truth is looked at once by each worker that has it."""
        return DataProto(meta_info={"metrics": self.judge.check_golds(data.non_tensor_batch)})
