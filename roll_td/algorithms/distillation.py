"""Divergences of a student from its teacher, token by token.

p is the teacher's distribution over the vocabulary, q the student's. Logits and log-probs are
(n, V), of the same n tokens: those that count alone (`logits[mask]`, so that no padding is looked
at). Each divergence takes log-probs of both, from `softened`, and returns (n,), differentiable in
the student's. A log-prob may be -inf; a divergence is infinite where its formula is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from roll_td.algorithms.masking import keep


class Pair(NamedTuple):
    """Log-probs of teacher and student over the same entries, (n, K)."""

    teacher: Tensor
    student: Tensor


def softened(student: Tensor, teacher: Tensor, *, temperature: float) -> Pair:
    """Log-probs of logits / temperature, for student and teacher logits (n, V).

    Divergences of these have gradients of the usual size if multiplied by temperature² (Hinton et
    al. 2015, arXiv:1503.02531, section 2). ValueError if the vocabularies differ in width, or the
    temperature isn't above 0.
    """
    if student.shape != teacher.shape:
        shapes = f"student {list(student.shape)}, teacher {list(teacher.shape)}"
        raise ValueError(f"logits: {shapes}; cut both to the tokens that the tokenizer has")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: must be above 0")
    teacher = (teacher.detach() / temperature).log_softmax(-1)
    return Pair(teacher, (student / temperature).log_softmax(-1))


def over_entries(teacher: Tensor, student: Tensor, entries: Tensor, *, renormalise: bool) -> Pair:
    """Both over some entries of each token, (n, k), the teacher's k likeliest for example.

    teacher: its log-probs of these, (n, k). student: its log-probs of all, (n, V). entries: int64
    (n, k). As they are, a divergence leaves the others out and may be negative; renormalised, both
    are distributions over those k.
    """
    student = student.gather(-1, entries)
    if renormalise:
        return Pair(teacher.log_softmax(-1), student.log_softmax(-1))
    return Pair(teacher, student)


def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Σ p (log p - log q): the student covers what the teacher does."""
    return _kl(teacher, student)


def reverse_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Σ q (log q - log p): the student does nothing that the teacher doesn't (MiniLLM,
    arXiv:2306.08543, equation 1)."""
    return _kl(student, teacher)


def skewed_forward_kl(teacher: Tensor, student: Tensor, *, skew: float) -> Tensor:
    """KL(p ‖ skew p + (1 - skew) q) (DistiLLM, arXiv:2402.03898, section 3.1)."""
    return _kl(teacher, _mix(teacher, student, skew))


def skewed_reverse_kl(teacher: Tensor, student: Tensor, *, skew: float) -> Tensor:
    """KL(q ‖ skew q + (1 - skew) p) (DistiLLM, arXiv:2402.03898, section 3.1)."""
    return _kl(student, _mix(student, teacher, skew))


def jsd(teacher: Tensor, student: Tensor, *, beta: float) -> Tensor:
    """β KL(p ‖ m) + (1 - β) KL(q ‖ m), m = β p + (1 - β) q (GKD, arXiv:2306.13649, section 2).

    β ½: Jensen-Shannon divergence.
    """
    middle = _mix(teacher, student, beta)
    return beta * _kl(teacher, middle) + (1 - beta) * _kl(student, middle)


def adaptive_kl(teacher: Tensor, student: Tensor, *, head: float) -> Tensor:
    """Forward and reverse KL, weighted by where p and q differ: among the teacher's likeliest
    entries, up to a probability of `head` together, or among the others (AKL, arXiv:2404.02657).

    The weights are the shares of the two parts in Σ |p - q|, without a gradient.
    """
    p, order = teacher.exp().sort(dim=-1, descending=True)
    apart = (p - student.detach().exp().gather(-1, order)).abs()
    in_head = p.cumsum(-1) <= head
    in_head[..., 0] = True
    forward, total = keep(apart, in_head).sum(-1), apart.sum(-1)
    share = torch.where(total > 0, forward / total.clamp(min=1e-30), 0.5)
    return share * _kl(teacher, student) + (1 - share) * _kl(student, teacher)


def sampled_reward(teacher_log_probs: Tensor, student_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log p - log q of each sampled token, (B, T), 0 where masked, without a gradient: as an
    advantage its expected policy gradient is that of minus the reverse KL (on-policy distillation,
    arXiv:2306.13649).

    A divergence of the whole distribution in its place, the same whatever was sampled, has expected
    gradient 0.
    """
    teacher = keep(teacher_log_probs, mask)
    return (teacher - keep(student_log_probs, mask)).detach()


def _kl(of: Tensor, to: Tensor) -> Tensor:
    """Σ exp(of) (of - to) over entries with exp(of) > 0."""
    some = of > -math.inf
    of = of.masked_fill(~some, 0)
    return keep(of.exp() * (of - to.masked_fill(~some, 0)), some).sum(-1)


def _mix(first: Tensor, second: Tensor, share: float) -> Tensor:
    """log(share exp(first) + (1 - share) exp(second)) of log-probs; finite where both are -inf, as
    there logaddexp has no gradient and _kl leaves the entry out."""
    if share in (0, 1):
        return first if share else second
    none = (first == -math.inf) & (second == -math.inf)
    first, second = first.masked_fill(none, 0), second.masked_fill(none, 0)
    return torch.logaddexp(first + math.log(share), second + math.log1p(-share))
