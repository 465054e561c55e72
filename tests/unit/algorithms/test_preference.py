"""Losses of pairs. N, I ids: shared/cases."""

import functools
import itertools
import math

import pytest
import torch

from roll_td.algorithms.functional import Head, log_probs
from roll_td.algorithms.preference import hinge, ipo, log_ratios, pair_metrics, sigmoid

# N21: answers of 2 and 4 tokens; the sums of their log-probs
POLICY, REFERENCE = (-10.0, -12.0), (-11.0, -11.5)
LENGTHS = (2, 4)
NAN = math.nan


def pair(over, prompt=0):
    """Log ratios of N21's pair; `prompt` tokens, log ratio -1/3 each, may be left in the mask."""
    policy, reference = torch.full((2, 8), NAN), torch.full((2, 8), math.inf)
    mask = torch.zeros(2, 8, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        policy[row, :prompt], reference[row, :prompt] = -1.0, -2 / 3
        answer = slice(prompt, prompt + length)
        policy[row, answer] = POLICY[row] / length
        reference[row, answer] = REFERENCE[row] / length
        mask[row, : prompt + length] = True
    chosen, rejected = log_ratios(policy, reference, mask, over=over)
    return chosen[None], rejected[None]


def value(loss):
    return pytest.approx(loss, rel=1e-5)


def test_n21_losses_of_a_pair():
    assert sigmoid(*pair("sum"), beta=0.1, label_smoothing=0).item() == value(0.620957)
    assert sigmoid(*pair("sum"), beta=0.1, label_smoothing=0.1).item() == value(0.635957)
    assert hinge(*pair("sum"), beta=0.1).item() == value(0.85)


def test_n21_i03_ipo_of_sums_and_of_means():
    assert ipo(*pair("sum"), beta=0.1).item() == value(12.25)
    chosen, rejected = pair("mean")
    assert (chosen - rejected).item() == value(0.625)
    assert ipo(chosen, rejected, beta=0.1).item() == value(19.140625)


def test_n21_i01_a_prompt_left_in_is_seen_by_means_only():
    chosen, rejected = pair("sum", prompt=3)
    assert (chosen - rejected).item() == value(1.5)
    chosen, rejected = pair("mean", prompt=3)
    assert (chosen - rejected).item() == value(0.214286)
    assert ipo(chosen, rejected, beta=0.1).item() == value(22.903061)


def test_n21_rewards_and_accuracy():
    metrics = pair_metrics(*pair("sum"), beta=0.1)
    right = {"chosen_reward": 0.1, "rejected_reward": -0.05, "reward_margin": 0.15, "accuracy": 1}
    assert metrics == pytest.approx(right, rel=1e-5)
    equal = torch.zeros(3)
    assert pair_metrics(equal, equal, beta=0.1)["accuracy"] == 0
    assert pair_metrics(equal, equal, beta=0.1)["accuracy"].count == 3


def test_n21_i05_where_policy_is_the_reference():
    chosen, rejected = torch.zeros(1, requires_grad=True), torch.zeros(1)
    loss = sigmoid(chosen, rejected, beta=0.1, label_smoothing=0)
    assert loss.item() == value(0.693147)
    assert torch.autograd.grad(loss.sum(), chosen)[0].item() == value(-0.05)


@pytest.mark.parametrize(
    ("loss", "right", "slope"),
    [
        (lambda *pair: sigmoid(*pair, beta=0.1, label_smoothing=0.0), 0.437488, -0.035434),
        (lambda *pair: hinge(*pair, beta=0.1), 0.4, -0.1),
        (lambda *pair: ipo(*pair, beta=0.1), 1.0, 2.0),
    ],
)
def test_n21_slopes_at_a_margin_of_6(loss, right, slope):
    chosen, rejected = torch.full((1,), 6.0, requires_grad=True), torch.zeros(1)
    rejected.requires_grad_()
    ours = loss(chosen, rejected)
    assert ours.item() == value(right)
    grads = torch.autograd.grad(ours.sum(), (chosen, rejected))
    assert [grad.item() for grad in grads] == [
        pytest.approx(slope, rel=2e-5),
        pytest.approx(-slope, rel=2e-5),
    ]


def test_i05_sum_over_a_toy_with_known_logits():
    # of 3 tokens the last two are the answer; token t is told by what comes before it
    hidden, head = torch.eye(3), Head(torch.tensor([[2.0, 0, 0], [0, 1.0, 0], [1.0, 0, 3.0]]).T)
    tokens = torch.tensor([0, 2, 1])
    after_first, after_second = torch.tensor([2.0, 0, 0]), torch.tensor([0, 1.0, 0])
    hand = after_first.log_softmax(-1)[2] + after_second.log_softmax(-1)[1]
    told = torch.cat([torch.zeros(1), log_probs(hidden[:2], head, tokens[1:])])
    mask = torch.tensor([[False, True, True]])
    ours = log_ratios(told[None], None, mask, over="sum")
    assert ours.item() == pytest.approx(hand.item(), abs=1e-6)


def test_gradients_are_those_of_finite_differences():
    draw = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 4, 5, generator=draw, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=draw) < 0.7
    policy.requires_grad_()
    smoothed = functools.partial(sigmoid, label_smoothing=0.2)
    for over, loss in itertools.product(("sum", "mean"), (ipo, hinge, smoothed)):

        def total(policy, over=over, loss=loss):
            ratio = log_ratios(policy, reference, mask, over=over)
            return loss(ratio[:2], ratio[2:], beta=0.3).sum()

        torch.autograd.gradcheck(total, policy)
