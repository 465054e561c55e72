"""From scores to advantages, as an AlgorithmConfig says."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from roll_td.algorithms import rewards_shaping as shaping
from roll_td.algorithms.choosing import call, check_advantages
from roll_td.algorithms.kl import adapted_coefficient
from roll_td.algorithms.masking import Moments, moments, whiten
from roll_td.algorithms.ratios import within
from roll_td.algorithms.weighting import by_difficulty, by_length
from roll_td.config.algorithm import AlgorithmConfig
from roll_td.config.classes import import_object
from roll_td.config.signatures import check_settings, columns_of
from roll_td.metrics import Last, Metric
from roll_td.protocol import DataProto


class Estimator:
    """Makes advantages, and keeps what goes from step to step: the coefficient of the KL and the
    moments of all scores so far."""

    def __init__(self, algorithm: AlgorithmConfig, max_new_tokens: int) -> None:
        """ValueError for settings that a function of the user's own does not take."""
        self.algorithm, self.max_new_tokens = algorithm, max_new_tokens
        self.advantage = import_object(algorithm.advantage.path)
        self.policy_loss = import_object(algorithm.policy_loss.path)
        check_settings(self.advantage, algorithm.advantage.arguments)
        check_settings(self.policy_loss, algorithm.policy_loss.arguments)
        self.kl_coefficient = algorithm.kl.coefficient if algorithm.kl else 0.0
        self.running = Moments()

    def shape(self, batch: DataProto) -> Tensor:
        """Shape the scores of whole groups, and take out of response_mask what does not count.

        batch: scores float32 (B), 0 for all where nothing is scored, response_mask, group_id,
        finish_reason. Adds shaped_scores float32 (B), before any statistics. Returns which rows
        have a signal, bool (B): their group's scores differ.
        """
        config, mask = self.algorithm.scores, batch["response_mask"]
        scores = batch["scores"] if "scores" in batch else torch.zeros(len(batch))
        lengths, valid = mask.sum(-1), shaping.valid_rows(scores, mask)
        if config.mask_truncated:
            whole = [reason != "length" for reason in batch["finish_reason"]]
            valid &= valid.new_tensor(whole)
        if (weight := config.length_weight) is not None:
            scores = by_length(scores, lengths, valid, batch["group_id"], **vars(weight))
        if (overlong := config.overlong) is not None:
            most = self.max_new_tokens
            penalty = shaping.overlong_penalty(lengths, max_tokens=most, **vars(overlong))
            scores = scores + penalty
        scores = shaping.clip(scores, low=config.clip_low, high=config.clip_high)
        signal = shaping.has_signal(scores, valid, batch["group_id"])
        if config.drop_without_signal:
            valid = signal
        batch.update({"shaped_scores": scores, "response_mask": mask & valid[:, None]})
        return signal

    def estimate(self, batch: DataProto) -> dict[str, Metric]:
        """Add advantages, float32 (B, T), and what else they come with, to a batch that `shape` has
        seen. Takes old_log_probs and ref_log_probs where the algorithm asks for them."""
        algorithm, mask = self.algorithm, batch["response_mask"]
        metrics: dict[str, Metric] = {}
        if (bounds := algorithm.importance_filter) is not None:
            old, engine = batch["old_log_probs"], batch["infer_log_probs"]
            mask = within(old, engine, mask, **vars(bounds))
            batch.update({"response_mask": mask})
        scores, valid = batch["shaped_scores"], mask.any(-1)
        self.running = self.running.merged(moments(scores, valid))
        scores = shaping.normalise(
            scores,
            valid,
            batch["group_id"],
            self.running,
            mean=algorithm.scores.mean,
            std=algorithm.scores.std,
            ddof=algorithm.scores.ddof,
        )
        rewards = shaping.token_level_rewards(scores, mask)
        if algorithm.kl is not None:
            metrics["kl_coefficient"] = Last(self.kl_coefficient)
        if algorithm.kl is not None and algorithm.kl.place == "reward":
            rewards, measured = shaping.penalise_kl(
                rewards,
                batch["old_log_probs"],
                batch["ref_log_probs"],
                mask,
                estimator=algorithm.kl.estimator,
                coefficient=self.kl_coefficient,
            )
            metrics |= measured
            self.adapt(measured["kl"])
        names = batch.keys()
        columns = {name: batch[name] for name in names} | {"token_level_rewards": rewards}
        made = call(self.advantage, columns, algorithm.advantage.arguments)
        check_advantages(self.advantage, made, mask)
        if algorithm.whiten_advantages:
            made["advantages"] = whiten(made["advantages"], mask, ddof=1)
        if (weight := algorithm.difficulty_weight) is not None:
            of, groups = batch["scores"], batch["group_id"]
            made["advantages"] = by_difficulty(
                made["advantages"], of, valid, groups, **vars(weight)
            )
        batch.update({"token_level_rewards": rewards} | made)
        return metrics

    def adapt(self, kl: float) -> None:
        """Take the coefficient for the next step, given this step's mean KL of a token."""
        config = self.algorithm.kl
        if config is not None and config.target is not None:
            self.kl_coefficient = adapted_coefficient(
                self.kl_coefficient, kl, target=config.target, gain=config.gain
            )

    def matters(self, batch: DataProto) -> Tensor:
        """Rows that a loss or a gradient of this batch comes from, bool (B)."""
        algorithm, mask = self.algorithm, batch["response_mask"]
        in_loss = algorithm.kl is not None and algorithm.kl.place == "loss"
        row = algorithm.policy_loss.row
        if in_loss or algorithm.entropy_coefficient or row is None or not row.of_advantage:
            matters: Tensor = mask.any(-1)
        else:
            matters = (mask & (batch["advantages"] != 0)).any(-1)
        return matters

    @property
    def loss_columns(self) -> set[str]:
        """Columns that the policy loss names."""
        return set(columns_of(self.policy_loss))

    def state_dict(self) -> dict[str, Any]:
        """What goes from step to step."""
        return {
            "kl_coefficient": self.kl_coefficient,
            "running": dataclasses.asdict(self.running),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict gave."""
        self.kl_coefficient, self.running = state["kl_coefficient"], Moments(**state["running"])
