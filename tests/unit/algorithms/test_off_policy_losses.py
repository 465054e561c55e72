"""Losses that weigh what older weights have sampled. N ids: shared/cases."""

import math

import pytest
import torch

from roll_td.algorithms import off_policy_losses as losses
from roll_td.algorithms.losses import cispo

STEP = 1e-6
TOPR = {"good_low": 1.0, "good_high": 1.0, "bad_low": 0.0, "bad_high": 1.0}
MASK = [[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]]


def columns(seed=0):
    draw = torch.Generator().manual_seed(seed)
    tensors = torch.randn(3, 3, 4, generator=draw, dtype=torch.float64)
    tensors[0, 1] += 1
    return *tensors, torch.tensor(MASK, dtype=torch.bool)


def weights_of(log_probs, old, mask, level):
    """Ratios, token by token, with nothing but math."""
    found = torch.ones(mask.shape, dtype=torch.float64)
    for row, tokens in enumerate(mask.tolist()):
        logs = ((log_probs[row] - old[row]) * mask[row]).tolist()
        for t, here in enumerate(tokens):
            if here:
                found[row, t] = math.exp(sum(logs) if level == "sequence" else logs[t])
    return found


def slopes(loss, log_probs):
    """d loss / d log_probs by differences, float64."""
    found = torch.zeros_like(log_probs)
    for place in range(log_probs.numel()):
        step = torch.zeros(log_probs.numel(), dtype=torch.float64)
        step[place] = STEP
        step = step.view_as(log_probs)
        found.view(-1)[place] = (loss(log_probs + step) - loss(log_probs - step)) / (2 * STEP)
    return found


def check(ours, reference):
    """The same losses, and the same gradient as that of the reference by differences."""
    log_probs, old, advantages, mask = columns()
    wanted = log_probs.clone().requires_grad_()
    tokens, metrics = ours(wanted, old, advantages, mask)
    torch.testing.assert_close(tokens.detach(), reference(log_probs), rtol=1e-9, atol=1e-12)
    (grads,) = torch.autograd.grad(tokens.sum(), wanted)
    right = slopes(lambda at: reference(at).sum(), log_probs)
    torch.testing.assert_close(grads, right, rtol=1e-6, atol=1e-7)
    return metrics


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_tis_weighs_by_the_ratio_up_to_a_cap(level):
    log_probs, old, advantages, mask = columns()
    weights = weights_of(log_probs, old, mask, level).clamp(max=2)
    assert (weights[mask] == 2).any() and (weights[mask] < 1).any()

    def ours(log_probs, *others):
        return losses.tis(log_probs, *others, cap=2.0, ratio_level=level)

    check(ours, lambda at: -weights * advantages * at * mask)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("clip_low", [None, 0.4])
def test_cispo_weighs_by_the_ratio_between_bounds(clip_low, level):
    log_probs, old, advantages, mask = columns()
    ratio = weights_of(log_probs, old, mask, level)
    weights = ratio.clamp(0 if clip_low is None else 1 - clip_low, 1.3)
    assert ((ratio > 1.3) & mask).any() and ((ratio < 0.6) & mask).any()

    def ours(log_probs, *others):
        given = {"clip_low": clip_low, "clip_high": 0.3, "ratio_level": level}
        return cispo(log_probs, *others, **given)

    check(ours, lambda at: -weights * advantages * at * mask)


def test_n20_tis():  # N20
    log_probs, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -0.5]])
    loss, _ = losses.tis(
        log_probs, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), cap=2.0,
        ratio_level="token",
    )  # fmt: skip
    torch.testing.assert_close(loss, torch.tensor([[2.0, 0.606531]]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    "bounds", [TOPR, {**TOPR, "good_low": 0.5, "good_high": 1.5, "bad_low": 0.2}]
)
def test_topr_weighs_the_bad_alone(level, bounds):
    log_probs, old, advantages, mask = columns()
    ratio = weights_of(log_probs, old, mask, level)
    weights = torch.where(
        advantages >= 0,
        ratio.clamp(bounds["good_low"], bounds["good_high"]),
        ratio.clamp(bounds["bad_low"], bounds["bad_high"]),
    )
    good = mask & (advantages >= 0)
    assert good.any() and (mask & ~good).any()

    def ours(log_probs, *others):
        return losses.topr(log_probs, *others, **bounds, ratio_level=level)

    metrics = check(ours, lambda at: -weights * advantages * at * mask)
    bad = mask & ~good
    assert metrics["bad_fraction"] == pytest.approx(bad.sum().item() / mask.sum().item())
    assert metrics["bad_weight"] == pytest.approx(weights[bad].sum().item() / mask.sum().item())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_kimi15_is_a_policy_gradient_and_a_squared_log_ratio(level):
    _, old, advantages, mask = columns()
    tau = 0.3

    def reference(at):
        found = torch.zeros_like(at)
        for row, tokens in enumerate(mask.tolist()):
            real = [t for t, here in enumerate(tokens) if here]
            logs = {t: at[row, t] - old[row, t] for t in real}
            whole = sum(logs.values())
            for t in real:
                term = whole**2 / len(real) if level == "sequence" else logs[t] ** 2
                found[row, t] = -advantages[row, t] * at[row, t] + tau / 2 * term
        return found

    def ours(log_probs, *others):
        return losses.kimi15(log_probs, *others, tau=tau, level=level)

    metrics = check(ours, reference)
    assert metrics["nearness"] > 0


def test_kimi15_pulls_a_whole_response_by_its_log_ratio():
    log_probs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    old, mask = (
        torch.tensor([[-1.5, -1.0]], dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.bool),
    )
    loss, _ = losses.kimi15(log_probs, old, torch.zeros(1, 2), mask, tau=0.1, level="sequence")
    assert loss.sum().item() == pytest.approx(0.05 * 0.5**2)
    (grads,) = torch.autograd.grad(loss.sum(), log_probs)
    assert grads.tolist() == [pytest.approx([0.1 * -0.5] * 2)]


def test_tis_is_cispo_without_a_lower_bound():
    log_probs, old, advantages, mask = columns(3)
    ours, _ = losses.tis(log_probs, old, advantages, mask, cap=1.3, ratio_level="segment")
    right, _ = cispo(
        log_probs, old, advantages, mask, clip_low=None, clip_high=0.3, ratio_level="segment"
    )
    torch.testing.assert_close(ours, right)
