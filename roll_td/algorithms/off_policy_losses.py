"""Policy losses that weigh what older weights have sampled, or that keep near these. Tensors, and
what is returned, as in `losses`."""

from __future__ import annotations

import torch
from torch import Tensor

from roll_td.algorithms.losses import Losses, change, cispo, weighted
from roll_td.algorithms.masking import keep, token_means
from roll_td.algorithms.ratios import ratios

MOST_LOG_RATIO = 1e6
"""Of a whole response, beyond which its square has no gradient: it would overflow."""


def tis(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    cap: float,
    ratio_level: str,
) -> Losses:
    """-min(r, cap) A log p, without a gradient through r (truncated importance sampling, Ionides
    2008, doi:10.1198/106186008X320456). ratio_level: what r is the ratio of, a name of
    ratios.LEVELS."""
    return cispo(
        log_probs,
        old_log_probs,
        advantages,
        response_mask,
        clip_low=None,
        clip_high=cap - 1,
        ratio_level=ratio_level,
    )


def topr(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    good_low: float,
    good_high: float,
    bad_low: float,
    bad_high: float,
    ratio_level: str,
) -> Losses:
    """-clip(r, low, high) A log p, without a gradient through r, with bounds of their own for
    tokens with A ≥ 0 and with A < 0 (TOPR, arXiv:2503.14286, section 3).

    With 1 and 1 for the good and 0 and 1 for the bad, as in the paper, what is good is imitated
    whatever the ratio, and what is bad counts no more the less likely it has become. ratio_level:
    as in tis; of the whole response in the paper.
    """
    advantages = keep(advantages, response_mask)
    ratio = ratios(log_probs.detach(), old_log_probs, response_mask, level=ratio_level)
    is_good = advantages >= 0
    weight = torch.where(is_good, ratio.clamp(good_low, good_high), ratio.clamp(bad_low, bad_high))
    shares = {"bad_fraction": ~is_good, "bad_weight": torch.where(is_good, 0.0, weight)}
    metrics = change(log_probs, old_log_probs, response_mask) | token_means(shares, response_mask)
    return weighted(log_probs, weight * advantages, response_mask), metrics


def kimi15(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau: float,
    level: str,
) -> Losses:
    """-A log p + tau / 2 · (log r)², whose gradient is that of Kimi k1.5 (arXiv:2501.12599,
    section 2.3.2), with r of the policy over the one that sampled.

    level: "sequence", as in the paper: r is that of the whole response, and its tokens share the
    term equally; "token": each has its own. Without an advantage the second term is still there.
    """
    log_ratio = keep(log_probs, response_mask) - keep(old_log_probs, response_mask).detach()
    if level == "sequence":
        whole = log_ratio.sum(-1, keepdim=True).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
        squares = whole.square() / response_mask.sum(-1, keepdim=True).clamp(min=1)
    else:
        squares = log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).square()
    nearness = keep((tau / 2 * squares).expand(response_mask.shape), response_mask)
    metrics = change(log_probs, old_log_probs, response_mask)
    metrics |= token_means({"nearness": nearness}, response_mask)
    return weighted(log_probs, advantages, response_mask) + nearness, metrics
