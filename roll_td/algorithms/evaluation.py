"""What answers say of a model, and returns of a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from roll_td.algorithms.masking import moments


def pass_at_k(samples: Tensor, correct: Tensor, *, k: int) -> Tensor:
    """Probability that of k samples of a prompt, drawn from its `samples`, at least one is right,
    float64 (P): 1 - C(samples - correct, k) / C(samples, k) (Chen et al. 2021, arXiv:2107.03374,
    equation 1). Its mean over prompts estimates pass@k without bias.

    samples, correct: int64 (P). ValueError unless k lies in 1 to the fewest samples.
    """
    fewest = int(samples.min()) if len(samples) else k
    if not 1 <= k <= fewest:
        raise ValueError(f"k={k}: want 1 to {fewest}, the fewest samples of a prompt")
    drawn = torch.arange(k, dtype=torch.float64, device=samples.device)
    wrong = (samples - correct).double()[:, None]
    # C(w, k) / C(n, k) = Π (w - i) / (n - i), i from 0 to k - 1; with w < k one factor is 0
    return 1 - ((wrong - drawn) / (samples.double()[:, None] - drawn)).prod(-1)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the mask: 1 for a critic that knows, 0 for one
    that says the same of all, less for a misleading one; 0 where all returns are equal.

    values, returns: float (B, T). mask: bool (B, T).
    """
    whole = moments(returns, mask).squares
    return 1 - moments(returns - values, mask).squares / whole if whole > 0 else 0.0
