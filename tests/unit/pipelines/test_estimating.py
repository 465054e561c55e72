"""From scores to advantages by an AlgorithmConfig: what each of its settings does."""

import math
from typing import Any

import pytest
import torch

from roll_td.algorithms.masking import Moments
from roll_td.config.algorithm import AlgorithmConfig
from roll_td.config.schema import read
from roll_td.pipelines.estimating import Estimator
from roll_td.protocol import DataProto

NAN = math.nan


def estimator(most: int = 4, **settings: Any) -> Estimator:
    reading = read(AlgorithmConfig, settings)
    assert reading.value is not None, reading.problems
    return Estimator(reading.value, most)


def batch(scores: list[float], lengths: list[int], groups: list[int], **more: Any) -> DataProto:
    """Prompts of one token, responses of these lengths."""
    ends = torch.tensor(lengths)[:, None]
    columns = torch.arange(1 + max(lengths))
    return DataProto(
        {
            "scores": torch.tensor(scores),
            "group_id": torch.tensor(groups),
            "response_mask": (columns >= 1) & (columns <= ends),
            **more,
        },
        {"finish_reason": ["length" if n == 4 else "stop" for n in lengths]},
    )


def advantages(of: Estimator, rows: DataProto) -> list[list[float]]:
    of.shape(rows)
    of.estimate(rows)
    return [[round(x, 6) for x in row] for row in rows["advantages"].tolist()]


def test_n1_grpo_by_default():
    rows = batch([1.0, 0.0, 0.0, 1.0], [1, 1, 1, 1], [7, 7, 7, 7])
    a = 0.866025
    assert advantages(estimator(), rows) == [[0, a], [0, -a], [0, -a], [0, a]]


def test_n2_a_row_without_score_moves_nothing():
    rows = batch([1.0, NAN, 0.0, 0.0], [1, 1, 1, 1], [7, 7, 7, 7])
    got = advantages(estimator(), rows)
    assert got == [[0, 1.154701], [0, 0], [0, -0.57735], [0, -0.57735]]
    assert rows["response_mask"].any(-1).tolist() == [True, False, True, True]


def test_truncated_rows_are_masked_before_any_statistic():
    settings = {"scores": {"mask_truncated": True}, "advantage": {"name": "rloo"}}
    rows = batch([1.0, 0.0, 9.0], [1, 1, 4], [0, 0, 0])
    assert [row[1] for row in advantages(estimator(**settings), rows)] == [1, -1, 0]
    assert rows["response_mask"].sum().item() == 2  # so it is in no denominator either


def test_long_responses_are_penalised_then_clipped():
    # buffer 2 of 4: lengths 1, 3, 4 lose 0, ½, 1
    settings = {"scores": {"overlong": {"buffer_tokens": 2}, "clip_low": -0.4}}
    rows = batch([1.0, 1.0, 0.0], [1, 3, 4], [0, 1, 2])
    of = estimator(**settings)
    of.shape(rows)
    assert rows["shaped_scores"].tolist() == pytest.approx([1.0, 0.5, -0.4])


def test_groups_without_signal_are_told_and_dropped_if_asked():
    scores, lengths, groups = [1.0, 1.0, 1.0, 0.0, NAN], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]
    rows = batch(scores, lengths, groups)
    assert estimator().shape(rows).tolist() == [False, False, True, True, False]
    assert rows["response_mask"].sum().item() == 4
    rows = batch(scores, lengths, groups)
    estimator(scores={"drop_without_signal": True}).shape(rows)
    assert rows["response_mask"].any(-1).tolist() == [False, False, True, True, False]


def test_running_statistics_go_from_step_to_step():
    settings = {"scores": {"mean": "running", "std": "running"}, "advantage": {"name": "reinforce"}}
    of = estimator(**settings)
    advantages(of, batch([0.0, 2.0], [1, 1], [0, 1]))
    assert of.running == Moments(2.0, 1.0, 2.0)
    resumed = estimator(**settings)
    resumed.load_state_dict(of.state_dict())
    # 0 2 3 3 have mean 2 and sample deviation √2
    for each in (of, resumed):
        got = advantages(each, batch([3.0, 3.0], [1, 1], [2, 3]))
        assert got == [[0, 0.707107], [0, 0.707107]]


def test_kl_in_the_reward_adapts_after_it_was_used():
    kl = {"coefficient": 0.5, "place": "reward", "estimator": "k1", "target": 0.1}
    of = estimator(kl=kl, advantage={"name": "reinforce"})
    rows = batch([1.0], [2], [0])
    rows.update({"old_log_probs": torch.tensor([[0.0, -1.0, -1.0]])})
    rows.update({"ref_log_probs": torch.tensor([[0.0, -1.5, -2.0]])})
    of.shape(rows)
    metrics = of.estimate(rows)
    # rewards 0 - ½ · ½ and 1 - ½ · 1; what is to come: ¼, ½
    assert rows["advantages"].tolist() == [[0.0, pytest.approx(0.25), pytest.approx(0.5)]]
    assert metrics["kl"] == pytest.approx(0.75) and metrics["kl_coefficient"] == 0.5
    assert of.kl_coefficient == pytest.approx(0.5 * 1.02)  # error cut to 0.2, gain 0.1
    resumed = estimator(kl=kl)
    resumed.load_state_dict(of.state_dict())
    assert resumed.kl_coefficient == of.kl_coefficient


def test_tokens_that_the_engine_and_the_trainer_disagree_on_are_left_out():
    of = estimator(importance_filter={"low": 0.5, "high": 2.0})
    rows = batch([1.0, 0.0], [2, 2], [0, 0])
    rows.update({"old_log_probs": torch.tensor([[0.0, -1.0, -1.0], [0.0, -1.0, -1.0]])})
    rows.update({"infer_log_probs": torch.tensor([[0.0, -2.0, -1.0], [0.0, -1.0, -0.1]])})
    of.shape(rows)
    of.estimate(rows)
    assert rows["response_mask"].tolist() == [[False, False, True], [False, True, False]]
    assert rows["advantages"].tolist()[0][1] == 0


def test_whitened_advantages():
    of = estimator(whiten_advantages=True, advantage={"name": "reinforce"})
    # 1, 1, 1, 4 have mean 7/4 and sample deviation 3/2
    got = advantages(of, batch([1.0, 4.0], [3, 1], [0, 1]))
    assert got == [[0, -0.5, -0.5, -0.5], [0, 1.5, 0, 0]]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, [True, True, False, False]),
        ({"kl": {"coefficient": 0.1}}, [True, True, True, False]),
        ({"kl": {"coefficient": 0.1, "place": "reward"}}, [True, True, False, False]),
        ({"entropy_coefficient": 0.1}, [True, True, True, False]),
        ({"policy_loss": {"name": "roll_td.algorithms.losses.reinforce"}}, [True] * 3 + [False]),
    ],
)
def test_rows_that_matter(settings, wanted):
    # a group with signal, one of a single row, and a row without score; user's losses may do
    # anything with an advantage of 0
    rows = batch([1.0, 0.0, 1.0, NAN], [1, 1, 1, 1], [0, 0, 1, 2])
    rows.update({"old_log_probs": torch.zeros(4, 2), "ref_log_probs": torch.zeros(4, 2)})
    of = estimator(**settings)
    of.shape(rows)
    of.estimate(rows)
    assert of.matters(rows).tolist() == wanted


def test_right_answers_are_weighed_by_length_before_anything_else():
    settings = {"scores": {"length_weight": {"alpha": 0.1}, "clip_high": 1.0}}
    rows = batch([1.0, 1.0, 0.0, 1.0], [1, 3, 2, 2], [0, 0, 0, 1])
    estimator(**settings).shape(rows)
    long = math.exp(-0.1 / math.sqrt(2))
    assert rows["shaped_scores"].tolist() == pytest.approx([1, long, 0, 1]), "cut at 1"


def test_advantages_are_weighed_by_difficulty_last():
    weight = {"low": 0.0, "high": 2.0, "middle": 0.5, "steepness": 4.0}
    grpo = {"name": "grpo", "settings": {"scale": "none"}}
    rows = batch([1.0, 0.0, 0.0, 0.0], [1, 1, 1, 1], [7, 7, 7, 7])
    few, many = 2 / (1 + math.exp(-1)), 2 / (1 + math.exp(1))  # a share of 1/4, and of 3/4
    of = estimator(advantage=grpo, difficulty_weight=weight)
    right, wrong = 0.75 * few, -0.25 * many
    columns = [row[1] for row in advantages(of, rows)]
    assert columns == pytest.approx([right, wrong, wrong, wrong], abs=1e-6)


def test_a_loss_that_is_no_multiple_of_the_advantage_learns_from_all_rows():
    rows = batch([1.0, 1.0, 0.0, 1.0], [1, 1, 1, 1], [0, 0, 1, 1])
    for loss, matter in (({"name": "tis"}, [False, False, True, True]), (KIMI, [True] * 4)):
        of = estimator(policy_loss=loss)
        of.shape(rows)
        of.estimate(rows)
        assert of.matters(rows).tolist() == matter


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bare", r"bare returned a tensor of shape \(4, 2\): want \{"),
        ("of_rows", r"returned \{'advantages': a tensor of shape \(4,\)\}: want .* \(4, 2\)"),
        ("misnamed", r"misnamed returned \{'advantage': a tensor of shape \(4, 2\)\}: want \{"),
    ],
)
def test_an_advantage_of_the_users_own_that_returns_something_else(name: str, message: str):
    rows = batch([1.0, 0.0, 0.0, 1.0], [1, 1, 1, 1], [7, 7, 7, 7])
    with pytest.raises(ValueError, match=message):
        advantages(estimator(advantage={"name": f"{__name__}.{name}"}), rows)


def bare(token_level_rewards):
    """For the test above."""
    return token_level_rewards


def of_rows(token_level_rewards):
    """For the test above."""
    return {"advantages": token_level_rewards.sum(-1)}


def misnamed(token_level_rewards):
    """For the test above."""
    return {"advantage": token_level_rewards}


KIMI = {"name": "kimi15", "settings": {"tau": 0.1}}
