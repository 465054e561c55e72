"""The reward role: a CPU role of two workers in a job of threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from roll_td import BaseConfig, Cluster, DataProto, Mean, ResourceManager, Sum, WorkerError
from roll_td.config.rewards import RewardArgs, Rewards, RewardWorkerConfig
from roll_td.placement import planned_places
from roll_td.runtime.inprocess import LocalJob
from roll_td.workers.reward import RewardWorker

MINE = "tests.unit.rewards.reward_functions."


@dataclass
class Config(BaseConfig):
    """A pipeline's, as far as rewards go."""

    rewards: Rewards = field(default_factory=dict)
    reward: RewardWorkerConfig = field(default_factory=lambda: RewardWorkerConfig(world_size=2))


MakeRole = Callable[[Rewards], Cluster]


@pytest.fixture
def role() -> Iterator[MakeRole]:
    with LocalJob(planned_places(1, 0, 3), 1, 0):

        def make(rewards: Rewards) -> Cluster:
            config = Config(rewards=rewards)
            cluster = Cluster("reward", RewardWorker, ResourceManager(1, 0), config.reward)
            cluster.initialize(config)
            return cluster

        yield make


def rows() -> DataProto:
    columns = {
        "response": ["#3", "bad", "#4", "ab", "#3"],
        "ground_truth": ["3", 1, "3", 4, "3"],
        "domain": ["sums", "mine", "sums", "mine", "sums"],
        "prompt": [f"prompt {i}" for i in range(5)],
    }
    return DataProto(None, columns)


def rewards(policy: Any) -> Rewards:
    return {
        "sums": RewardArgs("exact_match", {"after": "#"}),
        "mine": RewardArgs(MINE + "raises_on_bad", on_error=policy),
    }


@pytest.mark.parametrize(("policy", "score"), [("skip", math.nan), ("zero", 0.0)])
def test_g11_scores_of_all_ranks_in_order(role: MakeRole, policy: str, score: float) -> None:  # G11
    result = role(rewards(policy)).compute_rewards(rows())
    assert result.keys() == ["scores"] and result["scores"].dtype == torch.float32
    assert result["scores"].tolist() == pytest.approx([1, score, 0, 0, 1], nan_ok=True)
    metrics = result.meta_info["metrics"]
    assert metrics["reward/sums/exact_match"] == pytest.approx(2 / 3)
    assert isinstance(metrics["reward/sums/exact_match"], Mean)
    errors = metrics["reward/mine/raises_on_bad/errors"]
    assert errors == 1 and isinstance(errors, Sum)


def test_g11_an_exception_ends_the_job_and_names_role_function_and_row() -> None:  # G11
    with pytest.raises(WorkerError) as caught, LocalJob(planned_places(1, 0, 3), 1, 0):
        config = Config(rewards=rewards("fail"))
        cluster = Cluster("reward", RewardWorker, ResourceManager(1, 0), config.reward)
        cluster.initialize(config)
        cluster.compute_rewards(rows())
    text = str(caught.value)
    for part in (
        "reward.compute_rewards failed (worker 0 of reward",
        "reward/mine/raises_on_bad: the function raised",
        "prompt: 'prompt 1'",
        "response: 'bad'",
        "ZeroDivisionError: one of four",
    ):
        assert part in text


def test_parts_of_a_sum_are_columns_on_every_rank(role: MakeRole) -> None:
    two: Rewards = {
        "sums": [
            RewardArgs("exact_match", {"after": "#"}),
            RewardArgs("format", {"pattern": "#[34]"}, weight=0.5),
        ],
        "mine": RewardArgs(MINE + "length"),
    }
    result = role(two).compute_rewards(rows())
    assert result.keys() == ["scores", "scores_exact_match", "scores_format", "scores_length"]
    nan = math.nan
    expected = {
        "scores": [1.5, 3, 0.5, 2, 1.5],
        "scores_exact_match": [1, nan, 0, nan, 1],
        "scores_format": [1, nan, 1, nan, 1],
        "scores_length": [nan, 3, nan, 2, nan],
    }
    for name, values in expected.items():
        assert result[name].tolist() == pytest.approx(values, nan_ok=True)


def test_fewer_rows_than_workers(role: MakeRole) -> None:
    result = role(rewards("zero")).compute_rewards(rows()[:1])
    assert result["scores"].tolist() == [1]
    assert set(result.meta_info["metrics"]) == {
        "reward/sums/exact_match" + end for end in ("", "/errors", "/timeouts", "/no_score")
    }


def test_golds_are_checked_over_all_ranks(role: MakeRole) -> None:
    cluster = role({"math": RewardArgs("math_rule")})
    golds = DataProto(None, {"ground_truth": ["1", "2", "???", "3"], "domain": ["math"] * 4})
    metrics = cluster.check_golds(golds).meta_info["metrics"]
    assert metrics["reward/math/math_rule/golds_without_meaning"] == 0.25
    assert metrics["reward/math/math_rule/golds_unequal"] == 0
    scored = cluster.compute_rewards(golds.update({"response": ["1", "3", "???", "3"]}))
    assert scored["scores"].tolist() == pytest.approx([1, 0, math.nan, 1], nan_ok=True)
    assert scored.meta_info["metrics"]["reward/math/math_rule/no_score"] == 1
