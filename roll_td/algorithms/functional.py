"""Log-probs, entropy and cross-entropy of next tokens from hidden states, a few rows at a time.

The logits of all tokens, (tokens, vocabulary) in float32, are the largest thing in a training step
and are never held: each function makes those of CHUNK_BYTES at once. Logits become float32 before
anything is done with them, and the head's gradient is summed in float32, whatever the dtype of
hidden states and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 64 << 20
"""Of float32 logits at once."""


class Head(NamedTuple):
    """What turns hidden states into logits: hidden weightᵀ + bias, then the soft cap."""

    weight: Tensor
    """(V, H)."""
    bias: Tensor | None = None
    """(V,)."""
    softcap: float | None = None
    """c of c · tanh(logits / c) (Gemma 2, arXiv:2408.00118, section 2); None: no cap."""


def logits(hidden: Tensor, head: Head) -> Tensor:
    """All logits, float32 (…, V), of hidden states (…, H): for a few tokens only."""
    return _capped(_raw_logits(hidden, head.weight, head.bias), head.softcap)


def log_probs(hidden: Tensor, head: Head, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature)[targets], float32 (N,).

    hidden: (N, H), in the dtype of head.weight. targets: int64 (N,), each in 0 … V-1.
    Differentiable in hidden, head.weight and head.bias; the backward pass makes the logits again.
    ValueError if temperature is not above 0.
    """
    function = _of_raw(_log_prob, head, temperature)
    result: Tensor = _PerToken.apply(function, hidden, head.weight, head.bias, targets)
    return result


def entropy(hidden: Tensor, head: Head, temperature: float = 1.0) -> Tensor:
    """-Σ p log p of p = softmax(logits / temperature), in nats, float32 (N,).

    As log_probs. A token whose logit is -inf counts 0.
    """
    function = _of_raw(_entropy, head, temperature)
    result: Tensor = _PerToken.apply(function, hidden, head.weight, head.bias, hidden[:, 0])
    return result


def cross_entropy_sum(
    hidden: Tensor, head: Head, targets: Tensor, ignore_index: int = -100
) -> Tensor:
    """Σ -log softmax(logits)[targets] over targets other than ignore_index, float32 scalar.

    As log_probs, but the logits are made once: where gradients are wanted the forward pass makes
    these too. None are made for ignored targets; the sum is 0 if all are.
    """
    wanted = targets != ignore_index
    function = _of_raw(_log_prob, head, 1.0)
    how = _Sum if torch.is_grad_enabled() else _PerToken
    result: Tensor = how.apply(function, hidden[wanted], head.weight, head.bias, targets[wanted])
    return -result.sum()


_OfLogits = Callable[[Tensor, Tensor], Tensor]
"""(float32 logits (n, V), targets (n,)) → float32 (n,)."""


def _log_prob(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def _entropy(logits: Tensor, _: Tensor) -> Tensor:
    logs = logits.log_softmax(-1)
    # at p = 0 both p log p and its gradient are 0, but -inf · 0 is NaN
    return -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0)).sum(-1)


def _of_raw(function: _OfLogits, head: Head, temperature: float) -> _OfLogits:
    """The function of what comes out of the linear layer."""
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0; greedy counts as 1")

    def of_raw(raw: Tensor, targets: Tensor) -> Tensor:
        logits = _capped(raw, head.softcap)
        return function(logits / temperature if temperature != 1 else logits, targets)

    return of_raw


class _PerToken(torch.autograd.Function):
    """A function of logits, row by row. Gradients wait for the backward pass, and for its logits,
    as the head's is a sum over rows, each times a factor known only then."""

    @staticmethod
    def forward(ctx: Any, function: _OfLogits, *inputs: Any) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        hidden, weight, bias, targets = inputs
        values = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(hidden, weight):
            values[rows] = function(_raw_logits(hidden[rows], weight, bias), targets[rows])
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        _, grads = _values_and_grads(ctx.function, ctx.saved_tensors, needs, grad)
        return None, *grads, None


class _Sum(torch.autograd.Function):
    """The sum over rows of a function of logits: all gradients but for one common factor are known
    with the logits, so they are made at once."""

    @staticmethod
    def forward(ctx: Any, function: _OfLogits, *inputs: Any) -> Tensor:
        hidden = inputs[0]
        ones = torch.ones(len(hidden), device=hidden.device)
        values, grads = _values_and_grads(function, inputs, ctx.needs_input_grad[1:], ones)
        ctx.save_for_backward(*grads)
        return values.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if g is None else g * grad for g in ctx.saved_tensors), None


def _values_and_grads(
    function: _OfLogits, inputs: Sequence[Any], needs: Sequence[bool], grad: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """What the function gives of each row; and the gradients of Σ grad · that in the first three
    of inputs (hidden, weight, bias, targets), None for what needs none."""
    hidden, weight, bias, targets = inputs
    values = torch.empty_like(grad)
    d_hidden = torch.empty_like(hidden) if needs[0] else None
    d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
    d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs[2] else None
    for rows in _chunks(hidden, weight):
        raw = _raw_logits(hidden[rows], weight, bias).requires_grad_()
        with torch.enable_grad():
            value = function(raw, targets[rows])
        values[rows] = value.detach()
        (d_raw,) = torch.autograd.grad(value, raw, grad[rows])
        if d_bias is not None:
            d_bias += d_raw.sum(0)
        d_raw = d_raw.to(hidden.dtype)
        if d_hidden is not None:
            torch.mm(d_raw, weight, out=d_hidden[rows])
        if d_weight is not None:
            _add_product(d_weight, d_raw.T, hidden[rows])
    grads = (d_hidden, d_weight, d_bias)
    pairs = zip(inputs, grads, strict=False)
    return values, [None if d is None else d.to(x.dtype) for x, d in pairs]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, total in float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right


def _capped(raw: Tensor, softcap: float | None) -> Tensor:
    return raw if softcap is None else (raw / softcap).tanh() * softcap


def _raw_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(hidden, weight, bias).float()


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Slices of the rows, whose float32 logits take CHUNK_BYTES each."""
    size = max(1, CHUNK_BYTES // (4 * len(weight)))
    return [slice(start, start + size) for start in range(0, len(hidden), size)]
