"""KL divergence to a reference from the log-probs of what was sampled, and its coefficient."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from roll_td.algorithms.choosing import named
from roll_td.algorithms.masking import keep

MOST_LOG_RATIO = 20.0
"""Log ratios are cut to ± this before exp, which would overflow in float32 at 89; no gradient flows
beyond."""


def _k1(log_ratio: Tensor) -> Tensor:
    return log_ratio


def _k2(log_ratio: Tensor) -> Tensor:
    return log_ratio.square() / 2


def _k3(log_ratio: Tensor) -> Tensor:
    log_ratio = log_ratio.clamp(min=-MOST_LOG_RATIO)
    return (-log_ratio).exp() - 1 + log_ratio


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    # its mean is the KL; can be negative. As a loss its expected gradient is 0: it is for rewards
    "k1": _k1,
    # its mean isn't the KL, but as a loss its expected gradient is that of the KL
    "k2": _k2,
    # its mean is the KL; never negative. As a loss its gradient is that of KL(reference ‖ policy)
    "k3": _k3,
}
"""Functions of log policy - log reference (Schulman 2020, joschu.net/blog/kl-approx.html); what
their gradients are: Tang & Munos 2025, arXiv:2506.09477."""


def divergence(
    log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, *, estimator: str
) -> Tensor:
    """The estimate of KL(policy ‖ reference) for each token, (B, T), 0 where masked.

    All (B, T); differentiable in log_probs. estimator: a name of ESTIMATORS. It does not vanish
    with the advantage: a group without signal still gets its gradient, unless it is masked.
    """
    log_ratio = keep(log_probs, response_mask) - keep(ref_log_probs, response_mask).detach()
    return named("estimator", estimator, ESTIMATORS)(log_ratio)


def adapted_coefficient(coefficient: float, kl: float, *, target: float, gain: float) -> float:
    """The coefficient for the next step, nearer to what brings `kl` to `target`
    (Ziegler et al. 2019, arXiv:1909.08593, section 2.2, there with a gain of 0.1).

    kl: mean over the tokens of this step; NaN (nothing was measured) leaves the coefficient.
    """
    if kl != kl:
        return coefficient
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + gain * error)
