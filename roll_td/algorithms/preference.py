"""Losses that learn from pairs of responses, one preferred to the other.

A pair is seen through the log ratio of each side, policy less reference: chosen, rejected float32
(P), from `log_ratios` of their rows. Each function returns the losses of the pairs, float32 (P);
their sum over the number of pairs of the whole batch is the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from roll_td.algorithms.choosing import named
from roll_td.algorithms.masking import keep
from roll_td.metrics import Mean, Metric


def _sums(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return log_ratio.sum(-1)


def _means(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return log_ratio.sum(-1) / mask.sum(-1).clamp(min=1)


OVER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": _sums, "mean": _means}
"""How the tokens of a response make one number."""


def log_ratios(
    log_probs: Tensor, ref_log_probs: Tensor | None, response_mask: Tensor, *, over: str
) -> Tensor:
    """log policy - log reference of each response, (B), over the tokens of its mask alone.

    All (B, T), response_mask bool. ref_log_probs None: reference-free, log policy alone. over:
    "sum", the response as a whole; "mean", a token of it.
    """
    log_ratio = keep(log_probs, response_mask)
    if ref_log_probs is not None:
        log_ratio = log_ratio - keep(ref_log_probs, response_mask).detach()
    return named("over", over, OVER)(log_ratio, response_mask)


def sigmoid(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """-log sigmoid(β m), m = chosen - rejected (DPO, arXiv:2305.18290, equation 7).

    label_smoothing ε, the probability that a pair is the wrong way round: -(1 - ε) log sigmoid(β m)
    - ε log sigmoid(-β m) (conservative DPO, ericmitchell.ai/cdpo.pdf, equation 3).
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def hinge(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """max(0, 1 - β m), m = chosen - rejected (RSO, arXiv:2309.06657)."""
    return torch.relu(1 - beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """(m - 1 / (2 β))², m = chosen - rejected (IPO, arXiv:2310.12036, equation 17, there τ for β).

    Of sums, as in the paper, or of means over tokens, so that β does not depend on length.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def pair_metrics(chosen: Tensor, rejected: Tensor, *, beta: float) -> dict[str, Metric]:
    """Means over pairs: the rewards β · log ratio of both sides, their margin, and the share of
    pairs that are in the right order (equal ones are not)."""
    margin = chosen - rejected
    values = (beta * chosen, beta * rejected, beta * margin, (margin > 0).to(margin.dtype))
    names = ("chosen_reward", "rejected_reward", "reward_margin", "accuracy")
    count = len(chosen)
    means = (torch.stack(values).detach().double().sum(-1) / max(count, 1)).tolist()
    return {name: Mean(mean, count) for name, mean in zip(names, means, strict=True)}
