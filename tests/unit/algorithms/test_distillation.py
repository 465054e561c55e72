"""Divergences of student and teacher. N, J, F ids: shared/cases."""

import math

import pytest
import torch

from roll_td.algorithms.choosing import call
from roll_td.algorithms.distillation import (
    Pair,
    adaptive_kl,
    forward_kl,
    jsd,
    over_entries,
    reverse_kl,
    sampled_reward,
    skewed_forward_kl,
    skewed_reverse_kl,
    softened,
)
from roll_td.config.classes import import_object
from roll_td.config.functions import DIVERGENCES, DivergenceArgs

INF, NAN = math.inf, math.nan


def logs(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


TEACHER, STUDENT = logs(0.9, 0.1), logs(0.6, 0.4)


def value(right):
    return pytest.approx(right, abs=1e-6)


def divergence(name, pair):
    args = DivergenceArgs(name)
    return call(import_object(args.path), pair._asdict(), args.arguments)


def test_n23_j05_forward_reverse_and_jsd():
    assert forward_kl(TEACHER, STUDENT).item() == value(0.226289)
    assert reverse_kl(TEACHER, STUDENT).item() == value(0.311239)
    assert jsd(TEACHER, STUDENT, beta=0.5).item() == value(0.063288)


def test_skewed_divergences_are_from_the_mixture():
    p, q = TEACHER.exp(), STUDENT.exp()
    mixed = (0.1 * p + 0.9 * q).log()
    ours = skewed_forward_kl(TEACHER, STUDENT, skew=0.1).item()
    assert ours == value((p * (TEACHER - mixed)).sum().item())
    mixed = (0.1 * q + 0.9 * p).log()
    ours = skewed_reverse_kl(TEACHER, STUDENT, skew=0.1).item()
    assert ours == value((q * (STUDENT - mixed)).sum().item())
    for of, to in ((skewed_forward_kl, forward_kl), (skewed_reverse_kl, reverse_kl)):
        assert of(TEACHER, STUDENT, skew=0.0).item() == to(TEACHER, STUDENT).item()


def test_adaptive_kl_weighs_by_the_gaps_of_head_and_tail():
    teacher, student = logs(0.1, 0.4, 0.3, 0.2), logs(0.2, 0.1, 0.2, 0.5)
    # head: .4 (with .3 it would pass .5), its gap .3; the others' gaps .1 + .1 + .3
    share = 0.3 / 0.8
    forward, reverse = forward_kl(teacher, student).item(), reverse_kl(teacher, student).item()
    ours = adaptive_kl(teacher, student, head=0.5).item()
    assert ours == value(share * forward + (1 - share) * reverse)
    # the likeliest entry is in the head though it passes it alone
    assert adaptive_kl(TEACHER, STUDENT, head=0.5).item() == value((0.226289 + 0.311239) / 2)
    assert adaptive_kl(TEACHER, TEACHER, head=0.5).item() == 0


def top_k(pair, *, k, renormalise):
    teacher, entries = pair.teacher.topk(k)
    return over_entries(teacher, pair.student, entries, renormalise=renormalise)


def test_n23_top_k():
    ours = reverse_kl(*top_k(Pair(TEACHER, STUDENT), k=1, renormalise=False))
    assert ours.item() == value(-0.243279)
    pair = Pair(logs(0.7, 0.2, 0.1), logs(0.5, 0.3, 0.2))
    assert forward_kl(*top_k(pair, k=2, renormalise=False)).item() == value(0.154438)
    assert forward_kl(*top_k(pair, k=2, renormalise=True)).item() == value(0.053814)


def test_n23_temperature():
    pair = softened(torch.tensor([[1.0, 0]]), torch.tensor([[2.0, 0]]), temperature=2)
    assert 2**2 * forward_kl(*pair).item() == value(0.105378)
    with pytest.raises(ValueError, match="temperature=0: must be above 0"):
        softened(STUDENT, TEACHER, temperature=0)


def test_n23_j03_the_gradient_is_in_what_was_sampled():
    logits = STUDENT.clone().requires_grad_()
    loss = reverse_kl(*softened(logits, TEACHER, temperature=1)).sum()
    (direct,) = torch.autograd.grad(loss, logits)
    assert direct[0].tolist() == value([-0.430022, 0.430022])

    def expected(penalty_of_token):
        """Mean over sampled tokens of penalty · d log q(token) / d logits."""
        total = torch.zeros_like(logits)
        for token in range(2):
            log_q = logits.log_softmax(-1)[0, token]
            (score,) = torch.autograd.grad(log_q, logits)
            total += log_q.exp().detach() * penalty_of_token(token) * score
        return total[0].tolist()

    mask = torch.tensor([[True]])

    def of_the_sample(token):
        return -sampled_reward(TEACHER[:, token : token + 1], STUDENT[:, token : token + 1], mask)

    assert expected(of_the_sample) == value([-0.430022, 0.430022])
    assert expected(lambda token: loss.detach()) == value([0, 0])


def test_f19_j06_a_sampled_reward_is_0_where_masked():
    teacher = torch.tensor([[-1.0, -2, NAN]])
    student = torch.tensor([[-1.5, -1, -INF]], requires_grad=True)
    ours = sampled_reward(teacher, student, torch.tensor([[True, True, False]]))
    assert ours.tolist() == [[0.5, -1, 0]] and not ours.requires_grad


def test_j01_vocabularies_of_different_width_are_refused():
    with pytest.raises(ValueError, match=r"student \[1, 5\], teacher \[1, 6\]; cut both to the"):
        softened(torch.zeros(1, 5), torch.zeros(1, 6), temperature=1)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("bad", [-1e10, -INF, INF, NAN])
def test_f17_what_is_at_a_pad_never_matters(name, bad):
    draw = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 4, 6, generator=draw)
    mask = torch.rand(3, 4, generator=draw) < 0.6
    right = divergence(name, softened(student[mask], teacher[mask], temperature=1.5)).sum()
    student[~mask], teacher[~mask] = bad, NAN
    student.requires_grad_()
    ours = divergence(name, softened(student[mask], teacher[mask], temperature=1.5)).sum()
    (grads,) = torch.autograd.grad(ours, student)
    assert ours.item() == right.item() and math.isfinite(right)
    assert grads.isfinite().all() and not grads[~mask].any() and grads[mask].any()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_entries_that_neither_has_add_nothing(name):
    draw = torch.Generator().manual_seed(1)
    student, teacher = torch.randn(2, 3, 4, generator=draw)
    right = divergence(name, softened(student, teacher, temperature=1))
    gone = torch.full((3, 2), -INF)
    wide = torch.cat([student, gone], -1).requires_grad_()
    ours = divergence(name, softened(wide, torch.cat([teacher, gone], -1), temperature=1))
    torch.testing.assert_close(ours, right)
    (grads,) = torch.autograd.grad(ours.sum(), wide)
    assert grads.isfinite().all() and not grads[:, 4:].any()


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "adaptive_kl"])
def test_gradients_are_those_of_finite_differences(name):
    draw = torch.Generator().manual_seed(2)
    student, teacher = torch.randn(2, 3, 5, generator=draw, dtype=torch.float64)
    student.requires_grad_()
    torch.autograd.gradcheck(
        lambda student: divergence(name, softened(student, teacher, temperature=0.7)), student
    )


def test_the_gradient_of_adaptive_kl_is_that_of_both_parts_with_their_shares_fixed():
    draw = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(2, 4, 5, generator=draw, dtype=torch.float64)
    q, p = softened(student, teacher, temperature=0.7)[::-1]
    shares = []
    for of_teacher, of_student in zip(p.exp().tolist(), q.exp().tolist(), strict=True):
        order = sorted(range(5), key=lambda entry, of=of_teacher: -of[entry])
        gaps = [abs(of_teacher[entry] - of_student[entry]) for entry in order]
        sums = [sum(of_teacher[entry] for entry in order[: n + 1]) for n in range(5)]
        head = max(1, sum(total <= 0.5 for total in sums))
        shares.append(sum(gaps[:head]) / sum(gaps))
    share = torch.tensor(shares, dtype=torch.float64)
    assert len({round(value, 3) for value in shares}) == 4

    def fixed(logits):
        pair = softened(logits, teacher, temperature=0.7)
        return (share * forward_kl(*pair) + (1 - share) * reverse_kl(*pair)).sum()

    student.requires_grad_()
    ours = adaptive_kl(*softened(student, teacher, temperature=0.7), head=0.5).sum()
    assert ours.item() == pytest.approx(fixed(student).item(), rel=1e-12)
    torch.autograd.gradcheck(fixed, student)
    torch.testing.assert_close(
        torch.autograd.grad(ours, student), torch.autograd.grad(fixed(student), student)
    )
