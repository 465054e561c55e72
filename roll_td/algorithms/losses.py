"""Losses of single tokens; `aggregation.aggregate` makes one number of them.

All tensors are (b, T): response_mask bool, the others float32. Each function returns the losses of
the tokens, 0 where masked, and metrics; multiplying advantages by a number multiplies a policy
loss by it. Terms add up by adding losses of tokens: KL (kl.divergence times its coefficient), less
entropy times its; weights (ratios.importance_weights) multiply the policy loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll_td.algorithms.kl import ESTIMATORS
from roll_td.algorithms.masking import keep, token_means
from roll_td.algorithms.ratios import ratios
from roll_td.metrics import Metric

Losses = tuple[Tensor, dict[str, Metric]]
"""Losses of the tokens, and metrics."""


def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    ratio_level: str,
) -> Losses:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347, equation 7; two
    bounds: DAPO, arXiv:2503.14476, equation 10); where A < 0 at most -dual_clip A (dual-clip PPO,
    arXiv:1912.09729).

    dual_clip: above 1; None: no such bound. ratio_level: what r is the ratio of, a name of
    ratios.LEVELS: "token"; "sequence-mean" for GSPO (arXiv:2507.18071, equation 5), which goes with
    the aggregation seq-mean-token-mean.
    """
    advantages = keep(advantages, response_mask)
    ratio = ratios(log_probs, old_log_probs, response_mask, level=ratio_level)
    free, bounded = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    gain = torch.minimum(free, bounded)
    shares = {
        "clip_low_fraction": (bounded < free) & (advantages < 0),
        "clip_high_fraction": (bounded < free) & (advantages > 0),
    }
    if dual_clip is not None:
        least = dual_clip * advantages
        shares["dual_clip_fraction"] = (gain < least) & (advantages < 0)
        gain = torch.where(advantages < 0, torch.maximum(gain, least), gain)
    metrics = change(log_probs, old_log_probs, response_mask) | token_means(shares, response_mask)
    return keep(-gain, response_mask), metrics


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float | None,
    clip_high: float,
    ratio_level: str,
) -> Losses:
    """-clip(r, 1 - clip_low, 1 + clip_high) A log p, without a gradient through r: no token's
    gradient is lost (CISPO, MiniMax-M1, arXiv:2506.13585, equations 4 and 5).

    clip_low None: no lower bound, as in the paper. ratio_level: as in ppo.
    """
    ratio = ratios(log_probs, old_log_probs, response_mask, level=ratio_level)
    lowest = 0.0 if clip_low is None else 1 - clip_low
    weight = ratio.clamp(lowest, 1 + clip_high)
    shares = {"clip_low_fraction": ratio < lowest, "clip_high_fraction": ratio > 1 + clip_high}
    metrics = change(log_probs, old_log_probs, response_mask) | token_means(shares, response_mask)
    return weighted(log_probs, weight * keep(advantages, response_mask), response_mask), metrics


def reinforce(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Losses:
    """-A log p (Williams 1992, doi:10.1007/BF00992696). For one update per rollout: that older
    weights sampled is not corrected for."""
    return weighted(log_probs, advantages, response_mask), {}


def value(
    predicted: Tensor,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    clip: float | None,
) -> Losses:
    """½ max((v - return)², (v clipped to values ± clip - return)²) (as in PPO's public code:
    arXiv:2005.12729, section 3).

    predicted: v, the critic's now. values: its at rollout. clip None: ½ (v - return)².
    """
    predicted, values = keep(predicted, response_mask), keep(values, response_mask)
    returns = keep(returns, response_mask)
    errors = (predicted - returns).square()
    means = {"value": predicted, "value_error": errors}
    if clip is not None:
        bounded = predicted.clamp(values - clip, values + clip)
        bounded_errors = (bounded - returns).square()
        means["value_clip_fraction"] = bounded_errors > errors
        errors = torch.maximum(errors, bounded_errors)
    return errors / 2, token_means(means, response_mask)


def weighted(log_probs: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    return -keep(log_probs, mask) * keep(weights, mask).detach()


def change(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """How far the policy has moved: mean ratio of tokens, and KL(old ‖ new) by k3."""
    moved = keep(old_log_probs, mask) - keep(log_probs.detach(), mask)
    ratio = ratios(log_probs.detach(), old_log_probs, mask, level="token")
    return token_means({"ratio": ratio, "old_kl": ESTIMATORS["k3"](moved)}, mask)
