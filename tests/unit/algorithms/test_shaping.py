"""Scores before they become advantages. N, A … ids: shared/cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_td.algorithms import rewards_shaping as shaping
from roll_td.algorithms.kl import adapted_coefficient
from roll_td.algorithms.masking import Moments, keep, moments, row_means, whiten

NAN = math.nan
one_group = torch.zeros(4, dtype=torch.int64)


def bools(*values):
    return torch.tensor(values, dtype=torch.bool)


def close(ours, right, tolerance=1e-6):
    right = torch.tensor(right, dtype=ours.dtype)
    torch.testing.assert_close(ours, right, rtol=0, atol=tolerance, equal_nan=True)


def normalised(scores, group_id, mean, std, running=None, ddof=1):
    scores = torch.tensor(scores)
    valid = ~scores.isnan()
    ids = torch.tensor(group_id)
    return shaping.normalise(scores, valid, ids, running, mean=mean, std=std, ddof=ddof)


@pytest.mark.parametrize(
    ("rewards", "ddof", "right"),
    [
        ([1.0, 0, 0, 1], 1, [0.866025, -0.866025, -0.866025, 0.866025]),
        ([1.0, 0, 0, 1], 0, [1.0, -1, -1, 1]),
        ([1.0, 1, 2], 1, [-0.577350, -0.577350, 1.154701]),
        ([1.0, 1, 2], 0, [-0.707107, -0.707107, 1.414214]),
    ],
)
def test_n1_deviation_of_the_sample_and_of_the_population(rewards, ddof, right):
    close(normalised(rewards, [5] * len(rewards), "group", "group", ddof=ddof), right)


@pytest.mark.parametrize("value", [1.0, 0.1, 0.7, 1e-30, -3e7])
@pytest.mark.parametrize("size", [2, 3, 7, 100])
@pytest.mark.parametrize("over", ["group", "batch"])
def test_n1_equal_rewards_become_exactly_0(value, size, over):
    assert not normalised([value] * size, [3] * size, over, over).any()


def test_n2_groups_go_by_id_and_a_missing_score_moves_nobody():
    close(normalised([1.0, 0, 0, 0], [7, 3, 7, 3], "group", "none"), [0.5, 0, -0.5, 0])
    with_a_gap = normalised([1.0, NAN, 0, 0], [1] * 4, "group", "group")
    close(with_a_gap, [1.154701, NAN, -0.577350, -0.577350])


def test_c07_none_group_and_batch_differ_and_false_is_none_of_them():
    scores, ids = [1.0, 0, 5, 3], [0, 0, 1, 1]
    close(normalised(scores, ids, "group", "none"), [0.5, -0.5, 1, -1])
    close(normalised(scores, ids, "group", "group"), [0.707107, -0.707107, 0.707107, -0.707107])
    deviation = 2.217356
    right = [x / deviation for x in (0.5, -0.5, 1, -1)]
    close(normalised(scores, ids, "group", "batch"), right)
    for wrong in (False, True, "None"):
        with pytest.raises(ValueError, match=f"std={wrong!r}: want one of none, group, batch"):
            normalised(scores, ids, "group", wrong)


def test_running_statistics_are_those_of_all_scores_so_far():
    steps = [torch.tensor([1.0, 4, NAN]), torch.tensor([2.0, 9, 5]), torch.tensor([NAN, NAN, NAN])]
    running = Moments()
    for scores in steps:
        running = running.merged(moments(scores, ~scores.isnan()))
    assert (running.count, running.mean) == (5, pytest.approx(4.2))
    assert running.std(ddof=1) == pytest.approx(torch.tensor([1.0, 4, 2, 9, 5]).std().item())
    close(
        normalised([2.0, NAN], [0, 1], "running", "running", running),
        [(2 - 4.2) / running.std(1), NAN],
    )
    with pytest.raises(ValueError, match="running is None; give the moments so far"):
        normalised([1.0], [0], "running", "none")


def test_one_row_has_no_deviation_to_be_divided_by():
    close(normalised([3.0, NAN], [0, 0], "none", "group"), [3.0, NAN])
    close(normalised([3.0, NAN], [0, 0], "batch", "batch"), [0.0, NAN])
    close(normalised([NAN, NAN], [0, 0], "batch", "batch"), [NAN, NAN])


@settings(max_examples=50)
@given(st.data())
def test_normalising_does_not_care_for_order_or_names_of_groups(data):
    rows = data.draw(st.integers(1, 12))
    scores = data.draw(st.lists(st.floats(-4, 4, width=32), min_size=rows, max_size=rows))
    ids = data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    order = data.draw(st.permutations(range(rows)))
    over = data.draw(st.sampled_from(["group", "batch", "none"]))
    ours = normalised(scores, ids, "group", over)
    shuffled = normalised(
        [scores[i] for i in order], [50 - 9 * ids[i] for i in order], "group", over
    )
    torch.testing.assert_close(ours[list(order)], shuffled, rtol=1e-5, atol=1e-6)


def test_a11_score_of_an_empty_response_goes_nowhere():
    scores = torch.tensor([10.0, 0.0])
    mask = bools([0, 0, 0], [1, 1, 0])
    assert not shaping.token_level_rewards(scores, mask).any()
    assert shaping.valid_rows(scores, mask).tolist() == [False, True]


def test_f04_score_is_at_the_last_token_of_the_policy_though_a_tool_ends_the_text():
    mask = bools([1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [1, 0, 0, 0, 0])
    rewards = shaping.token_level_rewards(torch.tensor([2.0, 3, NAN]), mask)
    close(rewards, [[0, 0, 0, 2.0, 0], [0, 0, 0, 0, 3.0], [NAN, 0, 0, 0, 0]])


def test_a_missing_score_is_not_valid():
    scores, mask = torch.tensor([NAN, 0.0]), torch.ones(2, 3, dtype=torch.bool)
    assert shaping.valid_rows(scores, mask).tolist() == [False, True]


def test_groups_without_signal():
    scores = torch.tensor([0.1, 1, 0.1, 0, NAN, 2, 5, 1])
    ids = torch.tensor([4, 9, 4, 9, 4, 4, 1, 9])
    valid = bools(1, 1, 1, 1, 0, 0, 1, 0)
    with_signal = shaping.has_signal(scores, valid, ids)
    assert with_signal.tolist() == [False, True, False, True, False, False, False, False]


def test_clipped_scores():
    scores = torch.tensor([-5.0, 0.5, 9, NAN])
    close(shaping.clip(scores, low=-1, high=2), [-1, 0.5, 2, NAN])
    close(shaping.clip(scores, low=None, high=2), [-5, 0.5, 2, NAN])
    close(shaping.clip(scores, low=None, high=None), [-5, 0.5, 9, NAN])


def test_overlong_penalty_grows_over_the_buffer():
    lengths = torch.tensor([10, 60, 70, 80, 100, 120])
    penalties = shaping.overlong_penalty(lengths, max_tokens=100, buffer_tokens=40, penalty=0.5)
    close(penalties, [0, 0, -0.125, -0.25, -0.5, -0.5])
    for buffer in (0, 101):
        with pytest.raises(ValueError, match=f"buffer_tokens={buffer}: want 1 to max_tokens=100"):
            shaping.overlong_penalty(lengths, max_tokens=100, buffer_tokens=buffer, penalty=1)


def test_kl_in_the_reward():
    old, ref = torch.tensor([[-1.0, -2, 7]]), torch.tensor([[-1.5, -1, NAN]])
    rewards, metrics = shaping.penalise_kl(
        torch.tensor([[0.0, 1, NAN]]), old, ref, bools([1, 1, 0]), estimator="k1", coefficient=0.1
    )
    close(rewards, [[-0.05, 1.1, 0]])
    assert metrics["kl"] == pytest.approx(-0.25) and metrics["kl"].count == 2


def test_adaptive_coefficient_moves_at_most_a_fiftieth_at_the_papers_gain():
    def adapt(kl):
        return adapted_coefficient(0.5, kl, target=0.2, gain=0.1)

    assert adapt(0.22) == pytest.approx(0.505)
    assert adapt(0.2) == 0.5
    assert (adapt(9), adapt(-9)) == (pytest.approx(0.51), pytest.approx(0.49))
    assert adapt(NAN) == 0.5


def test_n6_whitening():
    values, mask = torch.tensor([[1.0, 2, 3, 9]]), bools([1, 1, 1, 0])
    close(whiten(values, mask, ddof=1), [[-1, 0, 1, 0]])
    close(whiten(values, mask, ddof=0), [[-1.224745, 0, 1.224745, 0]])


def test_n6_whitening_over_ranks():
    parts = [torch.tensor([[1.0, 2]]), torch.tensor([[3.0, 4, 5]])]
    masks = [torch.ones_like(part, dtype=torch.bool) for part in parts]
    both = moments(parts[0], masks[0]).merged(moments(parts[1], masks[1]))
    assert both == Moments(5, 3, 10) and both.std(1) ** 2 == pytest.approx(2.5)
    ours = [whiten(p, m, ddof=1, over=both) for p, m in zip(parts, masks, strict=True)]
    close(ours[0], [[-1.264911, -0.632456]])
    close(ours[1], [[0, 0.632456, 1.264911]])
    # F02: the count is the global one, so a rank with a single token is whitened too
    close(whiten(parts[0][:, :1], masks[0][:, :1], ddof=1, over=both), [[-1.264911]])


@pytest.mark.parametrize(
    ("mask", "right"),
    [
        ([0, 0, 0], [0, 0, 0]),
        ([0, 1, 0], [0, 3.0, 0]),
        ([1, 1, 0], [-0.707107, 0.707107, 0]),
    ],
)
def test_f02_whitening_of_0_1_and_2_tokens(mask, right):
    close(whiten(torch.tensor([1.0, 3, NAN]), bools(*mask), ddof=1), right)


def test_f06_mean_of_a_row_is_over_its_mask():
    values = torch.tensor([[1.0, 1, 10, 10], [NAN, 2, 4, 5]], requires_grad=True)
    mask = bools([1, 1, 0, 0], [0, 1, 1, 0])
    means = row_means(values, mask)
    close(means, [1.0, 3.0])
    (grads,) = torch.autograd.grad(means.sum(), values)
    close(grads, [[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0]])
    assert row_means(values[:1], bools([0, 0, 0, 0])).tolist() == [0]


def test_f09_a_mask_that_is_none():
    values = torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"mask is torch.float32: want torch.bool; are the arg"):
        keep(values, values)
    with pytest.raises(ValueError, match=r"mask has shape \[2\] for values of shape \[2, 3\]"):
        keep(values, bools(1, 0))
