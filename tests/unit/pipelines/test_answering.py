"""Scores of answers, and when these are asked for one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from roll_td.config.scheduling import SchedulingConfig
from roll_td.metrics import Sum
from roll_td.pipelines.answering import score, start_scheduler
from roll_td.protocol import DataProto


class Rewards:
    """A reward role: the number of letters."""

    def compute_rewards(self, data: DataProto) -> DataProto:
        assert data.batch is None, "rewards see no tensors"
        scores = torch.tensor([float(len(text)) for text in data["response"]])
        return DataProto({"scores": scores}, meta_info={"metrics": {"asked": Sum(len(data))}})


def test_scores_are_added_to_answers() -> None:
    answers = DataProto({"input_ids": torch.ones(2, 3)}, {"response": ["ab", "abcd"]})
    assert score(Rewards(), answers) == {"asked": Sum(2)}
    assert answers["scores"].tolist() == [2.0, 4.0]


def test_without_a_reward_there_are_none() -> None:
    answers = DataProto({"input_ids": torch.ones(2, 3)}, {"response": ["ab", "abcd"]})
    assert score(None, answers) == {} and "scores" not in answers


def test_nothing_is_scheduled_where_one_call_asks_for_all() -> None:
    config: Any = SimpleNamespace(scheduling=SchedulingConfig())
    nobody: Any = None
    assert start_scheduler(config, nobody, nobody, nobody, nobody) is None
