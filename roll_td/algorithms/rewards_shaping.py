"""What is done to scores before they become advantages.

scores: float32 (B), one per response, NaN where there is none. valid: bool (B), the rows that
count. A row that doesn't count moves no statistic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from roll_td.algorithms.choosing import named
from roll_td.algorithms.kl import divergence
from roll_td.algorithms.masking import Moments, check_mask, keep, moments, token_means
from roll_td.metrics import Metric


def valid_rows(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Rows that have a score and a token to learn from, bool (B).

    response_mask: bool (B, T). What else shall not count (truncated answers, groups without
    signal) is taken out of it with `&`; `response_mask & valid[:, None]` is then the mask of every
    loss and of its denominators.
    """
    check_mask(response_mask)
    return response_mask.any(-1) & ~scores.isnan()


def clip(scores: Tensor, *, low: float | None, high: float | None) -> Tensor:
    """Scores, (B,), of at least `low` and at most `high`; None: no bound. NaN stays NaN."""
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    return scores.clamp(*bounds)


def overlong_penalty(
    response_lengths: Tensor, *, max_tokens: int, buffer_tokens: int, penalty: float
) -> Tensor:
    """What is added to the scores of long responses, float32 (B): from 0 at max_tokens -
    buffer_tokens down to -penalty at max_tokens (DAPO, arXiv:2503.14476, equation 13).

    response_lengths: int64 (B), the masked ones' true lengths too. ValueError unless buffer_tokens
    lies in 1 to max_tokens.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens={buffer_tokens}: want 1 to max_tokens={max_tokens}")
    beyond = response_lengths.float() - (max_tokens - buffer_tokens)
    return -penalty * (beyond / buffer_tokens).clamp(0, 1)


class Statistics(NamedTuple):
    """What rewards are measured against, float64 (B) or one number for all."""

    mean: Tensor | float
    std: Tensor | float
    """1 where there is none to divide by: fewer rewards than it takes, or equal ones."""


def in_groups(rewards: Tensor, valid: Tensor, group_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row's group its valid rows' count, mean, and sum of squared deviations, float64 (B).

    rewards: float32 (B). group_id: int64 (B), in any order. Of equal rewards the deviations are
    exactly 0: their sum in float64 is exact.
    """
    names, group = torch.unique(group_id, return_inverse=True)

    def total(values: Tensor) -> Tensor:
        sums = torch.zeros(len(names), dtype=torch.float64, device=values.device)
        return sums.index_add(0, group, values)[group]

    count = total(valid.double())
    mean = total(keep(rewards.double(), valid)) / count.clamp(min=1)
    return count, mean, total(keep(rewards - mean, valid).square())


def _none(*_: object) -> Statistics:
    return Statistics(0.0, 1.0)


def _group(
    rewards: Tensor, valid: Tensor, group_id: Tensor, running: Moments | None, ddof: int
) -> Statistics:
    count, mean, squares = in_groups(rewards, valid, group_id)
    std = (squares / (count - ddof).clamp(min=1)).sqrt()
    return Statistics(mean, torch.where((count > ddof) & (std > 0), std, 1.0))


def _batch(
    rewards: Tensor, valid: Tensor, group_id: Tensor, running: Moments | None, ddof: int
) -> Statistics:
    found = moments(rewards, valid)
    return Statistics(found.mean, found.std(ddof) or 1.0)


def _running(
    rewards: Tensor, valid: Tensor, group_id: Tensor, running: Moments | None, ddof: int
) -> Statistics:
    if running is None:
        raise ValueError("statistics 'running': running is None; give the moments so far")
    return Statistics(running.mean, running.std(ddof) or 1.0)


STATISTICS: dict[str, Callable[..., Statistics]] = {
    "none": _none,
    "group": _group,
    "batch": _batch,
    "running": _running,
}
"""What a mean or a standard deviation is taken of. All take the same arguments."""


def normalise(
    rewards: Tensor,
    valid: Tensor,
    group_id: Tensor,
    running: Moments | None = None,
    *,
    mean: str,
    std: str,
    ddof: int,
) -> Tensor:
    """(rewards - mean) / std, float32 (B); NaN stays NaN.

    rewards: float32 (B). valid: bool (B). group_id: int64 (B). running: the `moments` of all valid
    scores so far, this batch's merged in; for "running" only. mean, std: each a name of STATISTICS.
    ddof: 1 for the sample's deviation, 0 for the population's. ValueError for another name (False
    among them), and for "running" without it.
    """
    arguments = (rewards, valid, group_id, running, ddof)
    centre = named("mean", mean, STATISTICS)(*arguments)
    scale = centre if std == mean else named("std", std, STATISTICS)(*arguments)
    return ((rewards.double() - centre.mean) / scale.std).float()


def has_signal(scores: Tensor, valid: Tensor, group_id: Tensor) -> Tensor:
    """Valid rows of groups whose valid scores differ, bool (B) (dynamic sampling of DAPO,
    arXiv:2503.14476, equation 11).

    In the others every group-relative advantage is 0, but a KL or entropy term is not.
    """
    return valid & (in_groups(scores, valid, group_id)[2] > 0)


def token_level_rewards(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Each score at the last token of its row that the policy chose, 0 elsewhere, float32 (B, T).

    response_mask: bool (B, T). That token is the last of the mask, also where a tool's result ends
    the text; a row without any gets none. NaN stays NaN, so that it can't pass for 0.
    """
    check_mask(response_mask)
    to_come = response_mask.flip(-1).cumsum(-1).flip(-1)
    return torch.where(response_mask & (to_come == 1), scores[:, None].float(), 0.0)


def penalise_kl(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    estimator: str,
    coefficient: float,
) -> tuple[Tensor, dict[str, Metric]]:
    """Token rewards less coefficient · KL estimate of the token, float32 (B, T); and `kl`, its mean
    over tokens (Ziegler et al. 2019, arXiv:1909.08593, equation 2, there with k1).

    All (B, T). estimator: a name of kl.ESTIMATORS.
    """
    kl = divergence(old_log_probs, ref_log_probs, response_mask, estimator=estimator).detach()
    rewards = keep(token_level_rewards, response_mask) - coefficient * kl
    return rewards, token_means({"kl": kl}, response_mask)
