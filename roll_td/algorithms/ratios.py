"""Ratios of probabilities under two models, of a token or of what it is part of; what they weigh,
and what they leave out.

All tensors are (b, T): log-probs float32, mask bool. Two models are the policy now and the one that
sampled (losses), or the trainer and the engine that sampled with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from roll_td.algorithms.choosing import named
from roll_td.algorithms.kl import ESTIMATORS, MOST_LOG_RATIO
from roll_td.algorithms.masking import keep, row_means, token_means
from roll_td.algorithms.turns import turn_sums, turns
from roll_td.metrics import Max, Metric


def _token(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return log_ratio


def _segment(log_ratio: Tensor, mask: Tensor) -> Tensor:
    turn = turns(mask)
    return turn_sums(log_ratio, turn).gather(1, turn)


def _segment_mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    turn = turns(mask)
    counts = turn_sums(mask.to(log_ratio.dtype), turn).clamp(min=1)
    return (turn_sums(log_ratio, turn) / counts).gather(1, turn)


def _sequence_mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return row_means(log_ratio, mask)[:, None].expand(mask.shape)


def _sequence(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return log_ratio.sum(-1, keepdim=True).expand(mask.shape)


LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": _token,
    # product over a run of tokens of the policy without a gap: a turn
    "segment": _segment,
    # geometric mean over a turn
    "segment-mean": _segment_mean,
    # geometric mean over the row (GSPO, arXiv:2507.18071, equation 7)
    "sequence-mean": _sequence_mean,
    # product over the row: the ratio of the whole response
    "sequence": _sequence,
}
"""(log ratios of tokens, 0 where masked; mask) → at each token, the log ratio of what it names."""


def ratios(
    log_probs: Tensor, other_log_probs: Tensor, response_mask: Tensor, *, level: str
) -> Tensor:
    """exp(log_probs - other_log_probs) at the level at each token, differentiable in log_probs; 1
    where masked. level: a name of LEVELS."""
    of_tokens = keep(log_probs, response_mask) - keep(other_log_probs, response_mask).detach()
    log_ratio = named("level", level, LEVELS)(of_tokens, response_mask)
    return keep(log_ratio, response_mask).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def importance_weights(
    log_probs: Tensor,
    infer_log_probs: Tensor,
    response_mask: Tensor,
    *,
    level: str,
    cap: float,
) -> Tensor:
    """min(trainer / engine, cap), without a gradient: what a loss is multiplied by because the
    engine sampled from probabilities a little unlike the trainer's (truncated importance sampling,
    Ionides 2008, doi:10.1198/106186008X320456). 1 where masked.

    log_probs: the trainer's, at the weights that sampled. level: a name of LEVELS.
    """
    weights = ratios(log_probs.detach(), infer_log_probs, response_mask, level=level)
    return weights.clamp(max=cap)


def within(
    log_probs: Tensor,
    infer_log_probs: Tensor,
    response_mask: Tensor,
    *,
    level: str,
    low: float,
    high: float,
) -> Tensor:
    """The mask without tokens whose trainer / engine ratio at the level is below low or above high.

    Made before the plan, it takes them out of the denominators too.
    """
    ratio = ratios(log_probs.detach(), infer_log_probs, response_mask, level=level)
    return response_mask & (ratio >= low) & (ratio <= high)


def off_policy_mask(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    threshold: float,
) -> Tensor:
    """The mask without rows that the policy has moved away from and that were bad: mean advantage
    below 0, and mean old - new log-prob above threshold (off-policy sequence masking,
    DeepSeek-V3.2, arXiv:2512.02556, equation 9).

    The whole row goes, whatever its single tokens are. It depends on the policy of the moment, so
    the denominators, as in the paper, still count it.
    """
    moved = keep(old_log_probs, response_mask) - keep(log_probs.detach(), response_mask)
    bad = row_means(advantages, response_mask) < 0
    far = row_means(moved, response_mask) > threshold
    return response_mask & ~(bad & far)[:, None]


def gap(log_probs: Tensor, infer_log_probs: Tensor, response_mask: Tensor) -> dict[str, Metric]:
    """How far trainer and engine are apart on what the engine sampled: mean and largest difference
    of log-probs, and KL(engine ‖ trainer) by k3."""
    engine = keep(infer_log_probs, response_mask)
    difference = engine - keep(log_probs.detach(), response_mask)
    means = {"log_prob_gap": difference.abs(), "engine_kl": ESTIMATORS["k3"](difference)}
    largest = difference.abs().max().item() if difference.numel() else 0.0
    return token_means(means, response_mask) | {"log_prob_gap_max": Max(largest)}
