"""Advantages of turns. N ids: shared/cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_td.algorithms.turn_advantages import gigpo, turn_reinforce
from roll_td.algorithms.turns import turn_sums, turns


def bools(*values):
    return torch.tensor(values, dtype=torch.bool)


def close(ours, right):
    torch.testing.assert_close(ours, torch.tensor(right), rtol=0, atol=2e-6)


def test_a_turn_is_a_run_of_tokens():
    mask = bools([1, 1, 0, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 0], [0] * 7)
    found = turns(mask)
    assert found.tolist() == [[1, 1, 0, 2, 0, 0, 3], [0, 1, 1, 1, 1, 1, 0], [0] * 7]
    sums = turn_sums(torch.where(mask, torch.arange(7.0), 0.0), found)
    assert sums[:, 1:4].tolist() == [[1, 3, 6], [15, 0, 0], [0, 0, 0]]


# two rows of one group: three turns and a return of 1, two turns and a return of 0
MASK = bools([1, 1, 0, 1, 0, 1], [1, 0, 1, 1, 0, 0])
REWARDS = torch.tensor([[0.0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0]])
GROUP = torch.tensor([7, 7])


@pytest.mark.parametrize(
    ("baseline", "good", "bad"), [("rows", 0.5, -0.5), ("turns", 0.4, -0.6), ("none", 1.0, 0.0)]
)
def test_n26_baselines_by_row_and_by_turn(baseline, good, bad):  # N26
    ours = turn_reinforce(REWARDS, MASK, GROUP, gamma=1.0, baseline=baseline)["advantages"]
    close(ours, [[good, good, 0, good, 0, good], [bad, 0, bad, bad, 0, 0]])


def test_rewards_of_turns_are_discounted_by_turn():
    rewards = torch.tensor([[1.0, 0, 9, 2, 0, 4]])
    ours = turn_reinforce(rewards, MASK[:1], GROUP[:1], gamma=0.5, baseline="rows")["advantages"]
    # 4; 2 + 4/2; 1 + 2/2 + 4/4; what stands between turns has no reward; alone there is no baseline
    close(ours, [[3.0, 3, 0, 4, 0, 4]])


def gigpo_by_hand(rewards, mask, group_id, states, gamma, weight, scale, ddof):
    """As the paper has it, with lists."""
    rows = []
    for row in range(len(mask)):
        found, place = [], 0
        while place < mask.shape[1]:
            tokens = []
            while place < mask.shape[1] and mask[row, place]:
                tokens.append(place)
                place += 1
            if tokens:
                found.append({"tokens": tokens, "state": int(states[row, tokens[0]])})
            place += 1
        to_come = 0.0
        for turn in reversed(found):
            to_come = sum(float(rewards[row, t]) for t in turn["tokens"]) + gamma * to_come
            turn["return"] = to_come
        outcome = sum(float(rewards[row, t]) for turn in found for t in turn["tokens"])
        rows.append({"turns": found, "outcome": outcome, "group": int(group_id[row])})

    def relative(value, others):
        mean = sum(others) / len(others)
        squares = sum((other - mean) ** 2 for other in others)
        std = (squares / (len(others) - ddof)) ** 0.5 if len(others) > ddof else 0.0
        return (value - mean) / (std if scale == "group" and std > 1e-12 else 1.0)

    advantages = torch.zeros(mask.shape)
    for number, row in enumerate(rows):
        peers = [r for r in rows if r["group"] == row["group"] and r["turns"]]
        for turn in row["turns"]:
            same = [t["return"] for r in peers for t in r["turns"] if t["state"] == turn["state"]]
            of_row = relative(row["outcome"], [r["outcome"] for r in peers])
            value = of_row + weight * relative(turn["return"], same)
            advantages[number, turn["tokens"]] = value
    return advantages


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from(["group", "none"]),
    ddof=st.sampled_from([0, 1]),
    gamma=st.sampled_from([1.0, 0.9]),
)
def test_gigpo_is_the_papers(seed, scale, ddof, gamma):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(6, 8, generator=draw) < 0.6
    rewards = torch.randint(-1, 2, (6, 8), generator=draw).float()
    states = torch.randint(0, 3, (6, 8), generator=draw)
    group_id = torch.randint(0, 2, (6,), generator=draw)
    how = {"gamma": gamma, "scale": scale, "ddof": ddof}
    ours = gigpo(rewards, mask, group_id, states, turn_weight=0.5, **how)["advantages"]
    right = gigpo_by_hand(rewards, mask, group_id, states, gamma, 0.5, scale, ddof)
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def test_without_a_shared_state_gigpo_is_grpo():
    states = torch.arange(12).view(2, 6)
    how = {"gamma": 0.9, "turn_weight": 1.0, "scale": "group", "ddof": 1}
    ours = gigpo(REWARDS, MASK, GROUP, states, **how)["advantages"]
    high = 0.707107
    close(ours, [[high, high, 0, high, 0, high], [-high, 0, -high, -high, 0, 0]])
