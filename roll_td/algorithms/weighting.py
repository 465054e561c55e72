"""What scores are weighed with by length, and advantages by difficulty (GRPO-LEAD,
arXiv:2504.09696, section 3; defaults and the kind of deviation are those of its authors' code,
github.com/aeroplanepaper/GRPO-LEAD)."""

from __future__ import annotations

import torch
from torch import Tensor

from roll_td.algorithms.rewards_shaping import in_groups, normalise


def by_length(
    scores: Tensor,
    response_lengths: Tensor,
    valid: Tensor,
    group_id: Tensor,
    *,
    alpha: float,
    right_from: float,
) -> Tensor:
    """Scores of right answers times exp(-alpha z), z how many standard deviations (of the
    sample) they are longer than the right answers of their group; float32 (B).

    scores: float32 (B), right from `right_from` on. response_lengths: int64 (B). valid: bool (B).
    A group whose right answers are equally long, and one with a single one, keeps its scores.
    """
    right = valid & (scores >= right_from)
    longer = normalise(response_lengths.float(), right, group_id, mean="group", std="group", ddof=1)
    return torch.where(right, scores * (-alpha * longer).exp(), scores)


def by_difficulty(
    advantages: Tensor,
    scores: Tensor,
    valid: Tensor,
    group_id: Tensor,
    *,
    low: float,
    high: float,
    middle: float,
    steepness: float,
    right_from: float,
) -> Tensor:
    """Advantages above 0 times w(s), the others times w(1 - s), s the share of right answers in
    their group, w(s) = low + (high - low) / (1 + exp(steepness (s - middle))); float32 (B, T).

    So for high > low a right answer counts more the fewer there are, and a wrong one the more there
    are. advantages: float32 (B, T). scores: float32 (B), before any weighting; a row that isn't
    valid, bool (B), counts in no share.
    """
    _, share, _ = in_groups((scores >= right_from).float(), valid, group_id)

    def weight(of: Tensor) -> Tensor:
        return low + (high - low) * torch.sigmoid(-steepness * (of - middle))

    good, bad = weight(share)[:, None], weight(1 - share)[:, None]
    return (advantages * torch.where(advantages > 0, good, bad)).float()
