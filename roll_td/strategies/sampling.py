"""The next token from logits: temperature, top-k, top-p, draw. Functions of tensors, nothing else.

A draw takes one number per row, from a generator that belongs to the sample alone, so that what
lies beside a sample in its batch does not reach it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

TOP_P_TOLERANCE = 1e-6
"""Float32 probabilities add up to top_p only so exactly: .5 and .3 reach .8."""


class Drawn(NamedTuple):
    """One token for each row."""

    tokens: Tensor
    """int64 (b,)."""
    log_probs: Tensor
    """float32 (b,): of the distribution the tokens were drawn from."""


def generator(seed: int, sample_id: int) -> np.random.Generator:
    """The random numbers of one sample: a Philox stream (Salmon et al. 2011) with this key."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, sample_id % 2**64]))


def greedy(logits: Tensor) -> Drawn:
    """The most likely token of each row, the first of equals; logits float32 (b, V).

    Its log-prob is that of softmax(logits): temperature 0 counts as 1.
    """
    tokens = logits.argmax(-1)
    return Drawn(tokens, _at(logits.log_softmax(-1), tokens))


def sample(
    logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Drawn:
    """Draw a token for each row from softmax(logits / temperature), cut to top_k, then to top_p.

    logits: float32 (b, V). uniforms: float64 (b,) in [0, 1), one a row; the row's token is the
    first whose cumulative probability exceeds it. temperature is above 0; top_k 0 and top_p 1 cut
    nothing.
    """
    log_probs, ids = kept(logits / temperature if temperature != 1 else logits, top_k, top_p)
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    # the product stays below the last one: a number below 1 is so by 2**-53 at least
    wanted = uniforms[:, None] * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, wanted, right=True).squeeze(-1)
    return Drawn(place if ids is None else _at(ids, place), _at(log_probs, place))


def kept(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the tokens that top_k and then top_p keep, and their ids; None: 0 … V-1.

    float32 and int64 (b, K), most likely first; what top_p drops is -inf, and the rest sums to 1.
    top_p keeps the fewest tokens that have this probability together, at least one.
    """
    if not top_k and top_p >= 1:
        return logits.log_softmax(-1), None
    if top_k:
        logits, ids = logits.topk(min(top_k, logits.shape[-1]))
    else:
        logits, ids = logits.sort(dim=-1, descending=True)
    if top_p < 1:
        probs = logits.softmax(-1, dtype=torch.float64)
        beyond = probs.cumsum(-1) - probs >= top_p - TOP_P_TOLERANCE
        beyond[:, 0] = False
        logits = logits.masked_fill(beyond, -torch.inf)
    return logits.log_softmax(-1), ids


def _at(table: Tensor, columns: Tensor) -> Tensor:
    return table.gather(-1, columns[:, None]).squeeze(-1)
