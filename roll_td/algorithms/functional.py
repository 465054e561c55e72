"""Log-probs, entropy and cross-entropy of next tokens from hidden states, a few rows at a time.

The logits of all tokens, (tokens, vocabulary) in float32, are the largest thing in a training step
and are never held: each function makes those of CHUNK_BYTES at once. Logits become float32 before
anything is done with them, and the head's gradient is summed in float32, whatever the dtype of
hidden states and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 64 << 20
"""Of float32 logits at once, and of as much memory to work in. On a CPU (V 49152, H 576) a quarter
of it takes 1.14 times as long, and twice as much is no faster."""


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
    raw = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
    return raw if head.softcap is None else (raw / head.softcap).tanh() * head.softcap


def log_probs(hidden: Tensor, head: Head, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature)[targets], float32 (N,).

    hidden: (N, H), in the dtype of head.weight. targets: int64 (N,), each in 0 … V-1.
    Differentiable in hidden, head.weight and head.bias; the backward pass makes the logits again.
    ValueError if temperature is not above 0.
    """
    what = _What(_log_prob, head.softcap, temperature)
    result: Tensor = _PerToken.apply(what, hidden, head.weight, head.bias, targets)
    return result


def entropy(hidden: Tensor, head: Head, temperature: float = 1.0) -> Tensor:
    """-Σ p log p of p = softmax(logits / temperature), in nats, float32 (N,).

    As log_probs. A token whose logit is -inf counts 0.
    """
    what = _What(_entropy, head.softcap, temperature)
    result: Tensor = _PerToken.apply(what, hidden, head.weight, head.bias, hidden[:, 0])
    return result


def cross_entropy_sum(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    """Σ -log softmax(logits)[targets], float32 scalar; 0 of no rows.

    As log_probs, but the logits are made once: where gradients are wanted the forward pass makes
    these too.
    """
    what = _What(_log_prob, head.softcap, 1.0)
    how = _Sum if torch.is_grad_enabled() else _PerToken
    result: Tensor = how.apply(what, hidden, head.weight, head.bias, targets)
    return -result.sum()


_OfLogits = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""(float32 logits (n, V), memory like it, targets (n,), grad (n,) or None) → what is made of each
row (n,) and, with grad, the gradient of Σ grad · that (n, V). Logits and memory are used up."""


def _log_prob(
    logits: Tensor, memory: Tensor, targets: Tensor, grad: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    index = targets[:, None]
    p, shift = _softmax(logits, memory)
    values = (logits.gather(-1, index) - shift[0] + shift[1]).squeeze(-1)
    if grad is None:
        return values, None
    return values, p.mul_(-grad[:, None]).scatter_add_(-1, index, grad[:, None])


def _entropy(
    logits: Tensor, memory: Tensor, _: Tensor, grad: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    p, shift = _softmax(logits, memory)
    logs = logits.sub_(shift[0]).add_(shift[1])
    logs.masked_fill_(p == 0, 0)  # p log p is 0 there, not -inf · 0
    values = -(p * logs).sum(-1)
    if grad is None:
        return values, None
    return values, p.mul_(logs.add_(values[:, None])).mul_(-grad[:, None])


def _softmax(logits: Tensor, memory: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """p, in memory, and what makes log p = logits - most + log(most likely p). On a CPU logsumexp
    takes 5 times as long, and so does exp where p is often too small for a normal number."""
    p = torch.softmax(logits, -1, out=memory)
    return p, (logits.amax(-1, keepdim=True), p.amax(-1, keepdim=True).log())


@dataclass(frozen=True)
class _What:
    """A function of what comes out of the linear layer."""

    function: _OfLogits
    softcap: float | None
    temperature: float

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature}: must be above 0; greedy counts as 1")

    def __call__(
        self, raw: Tensor, memory: Tensor, targets: Tensor, grad: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """As _OfLogits, of raw logits."""
        slope = None
        if self.softcap is not None:
            raw.div_(self.softcap).tanh_()
            slope = 1 - raw.square()
            raw *= self.softcap
        if self.temperature != 1:
            raw /= self.temperature
        values, d_raw = self.function(raw, memory, targets, grad)
        if d_raw is not None and self.temperature != 1:
            d_raw /= self.temperature
        if d_raw is not None and slope is not None:
            d_raw *= slope
        return values, d_raw


class _PerToken(torch.autograd.Function):
    """A function of logits, row by row. Gradients wait for the backward pass, and for its logits,
    as the head's is a sum over rows, each times a factor known only then."""

    @staticmethod
    def forward(ctx: Any, what: _What, *inputs: Any) -> Tensor:
        ctx.what = what
        ctx.save_for_backward(*inputs)
        return _values_and_grads(what, inputs, (False,) * 3, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:4]
        return None, *_values_and_grads(ctx.what, ctx.saved_tensors, needs, grad)[1], None


class _Sum(torch.autograd.Function):
    """The sum over rows of a function of logits: all gradients but for one common factor are known
    with the logits, so they are made at once."""

    @staticmethod
    def forward(ctx: Any, what: _What, *inputs: Any) -> Tensor:
        hidden = inputs[0]
        ones = torch.ones(len(hidden), device=hidden.device)
        values, grads = _values_and_grads(what, inputs, ctx.needs_input_grad[1:4], ones)
        ctx.save_for_backward(*grads)
        return values.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if g is None else g.mul_(grad) for g in ctx.saved_tensors), None


def _values_and_grads(
    what: _What, inputs: Sequence[Any], needs: Sequence[bool], grad: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """What is made of each row; and the gradients of Σ grad · that in the first three of inputs
    (hidden, weight, bias, targets), None for what needs none."""
    hidden, weight, bias, targets = inputs
    values = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if needs[0] else None
    d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
    d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs[2] else None
    size = max(1, CHUNK_BYTES // (4 * len(weight)))
    first, second = values.new_empty(2, min(size, len(hidden)), len(weight))
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        raw = _raw_logits(first, hidden[rows], weight, bias)
        given = None if grad is None else grad[rows]
        values[rows], d_raw = what(raw, second[: len(raw)], targets[rows], given)
        if d_raw is None:
            continue
        if d_bias is not None:
            d_bias += d_raw.sum(0)
        d_raw = d_raw.to(hidden.dtype)
        if d_hidden is not None:
            torch.mm(d_raw, weight, out=d_hidden[rows])
        if d_weight is not None:
            _add_product(d_weight, d_raw.T, hidden[rows])
    pairs = zip(inputs, (d_hidden, d_weight, d_bias), strict=False)
    return values, [None if d is None else d.to(x.dtype) for x, d in pairs]


def _raw_logits(memory: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What comes out of the linear layer, float32 (n, V), in memory (n or more, V)."""
    raw = memory[: len(hidden)]
    if weight.dtype == torch.float32:
        torch.mm(hidden, weight.T, out=raw)
    else:
        raw.copy_(hidden @ weight.T)
    return raw if bias is None else raw.add_(bias)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, total in float32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right
