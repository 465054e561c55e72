"""Weights by length and difficulty."""

import math

import pytest
import torch

from roll_td.algorithms.weighting import by_difficulty, by_length

GROUP = torch.tensor([0, 1, 0, 0, 1, 0])
SCORES = torch.tensor([1.0, 1.0, 1.0, 0.0, math.nan, 2.0])
VALID = torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.bool)
LENGTHS = torch.tensor([10, 9, 30, 500, 7, 900])
WEIGHT = {"low": 0.5, "high": 1.5, "middle": 0.75, "steepness": 10.0, "right_from": 1.0}


def close(ours, right):
    torch.testing.assert_close(ours, torch.tensor(right), rtol=0, atol=2e-6, equal_nan=True)


def test_right_answers_score_by_their_length():
    # of lengths 10 and 30 of the right ones the sample's deviation is 20 / √2; neither the wrong
    # nor the invalid one counts
    ours = by_length(SCORES, LENGTHS, VALID, GROUP, alpha=0.1, right_from=1.0)
    longer = 0.1 / math.sqrt(2)
    close(ours, [math.exp(longer), 1.0, math.exp(-longer), 0.0, math.nan, 2.0])
    close(by_length(SCORES, LENGTHS, VALID, GROUP, alpha=0.0, right_from=1.0), SCORES.tolist())


def test_equal_lengths_change_nothing():
    ours = by_length(SCORES, torch.full((6,), 8), VALID, GROUP, alpha=0.5, right_from=1.0)
    close(ours, SCORES.tolist())


def test_advantages_weigh_by_what_was_to_be_expected():
    advantages = torch.tensor([[1.0, 1], [2, 0], [1, 1], [-2, -2], [0, 0], [0, 0]])
    ours = by_difficulty(advantages, SCORES, VALID, GROUP, **WEIGHT)

    def weight(share):
        return 0.5 + 1 / (1 + math.exp(10 * (share - 0.75)))

    right, wrong, always = weight(2 / 3), weight(1 / 3), weight(1.0)
    assert weight(0.75) == 1 and always == pytest.approx(0.575858, abs=1e-6)
    rows = [[right, right], [2 * always, 0.0], [right, right], [-2 * wrong, -2 * wrong]]
    close(ours, [*rows, [0.0, 0.0], [0.0, 0.0]])


def test_rows_without_a_score_move_no_weight():
    advantages = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    others = [0, 1, 2, 3]
    whole = by_difficulty(advantages, SCORES, VALID, GROUP, **WEIGHT)[others]
    alone = by_difficulty(
        advantages[others], SCORES[others], VALID[others], GROUP[others], **WEIGHT
    )
    torch.testing.assert_close(whole, alone)
