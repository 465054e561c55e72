"""Losses of the policy and the critic. N, F … ids: shared/cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_td.algorithms import losses
from roll_td.algorithms.aggregation import AGGREGATIONS, aggregate, denominators
from roll_td.algorithms.choosing import call
from roll_td.algorithms.kl import ESTIMATORS, divergence
from roll_td.algorithms.masking import token_means
from roll_td.algorithms.ratios import LEVELS, gap, importance_weights, off_policy_mask, within
from roll_td.config.classes import import_object
from roll_td.config.functions import POLICY_LOSSES, PolicyLossArgs
from roll_td.config.signatures import columns_of
from roll_td.metrics import Max, Mean, merge_metrics

NAN, INF = math.nan, math.inf
WANTED = {
    **{name: {} for name in POLICY_LOSSES},
    "cispo": {"clip_high": 0.3},
    "kimi15": {"tau": 0.1},
    "cispo low": {"clip_high": 0.3, "clip_low": 0.2},
    "ppo dual": {"dual_clip": 1.5, "clip_high": 0.28},
    **{f"ppo {level}": {"ratio_level": level} for level in LEVELS},
}
"""What is to hold of every loss is tried on these."""
WEIGHING = ("cispo", "tis", "topr")
"""Their ratios have no gradient."""


def loss_of(wanted, columns):
    args = PolicyLossArgs(wanted.split()[0], WANTED[wanted])
    return call(import_object(args.path), columns, args.arguments)


def bools(*values):
    return torch.tensor(values, dtype=torch.bool)


def close(ours, right, tolerance=2e-6):
    right = torch.tensor(right, dtype=ours.dtype)
    torch.testing.assert_close(ours, right, rtol=0, atol=tolerance)


def random_columns(seed, rows=6, width=7, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    log_probs = ("log_probs", "old_log_probs", "ref_log_probs", "infer_log_probs")
    names = (*log_probs, "advantages", "entropy")
    numbers = torch.randn(len(names), rows, width, generator=draw, dtype=torch.float64).to(dtype)
    mask = torch.rand(rows, width, generator=draw) < 0.7
    mask[0], mask[1] = False, True
    return {**dict(zip(names, numbers, strict=True)), "response_mask": mask}


def whole_loss(columns, counts, mode="token-mean", wanted="ppo"):
    """Everything an actor may add up, as its worker does."""
    mask = columns["response_mask"]
    policy, _ = loss_of(wanted, columns)
    weights = importance_weights(
        columns["old_log_probs"], columns["infer_log_probs"], mask, level="token", cap=2.0
    )
    kl = divergence(columns["log_probs"], columns["ref_log_probs"], mask, estimator="k3")
    tokens = policy * weights + 0.04 * kl - 0.01 * columns["entropy"]
    return aggregate(tokens, mask, counts, mode=mode)


def one_token(wanted_settings, ratio, advantage):
    """Loss and its slope in the log-prob of a token."""
    log_probs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(1, 1, dtype=torch.float64), bools([1])
    loss, metrics = losses.ppo(log_probs, old, torch.tensor([[advantage]]), mask, **wanted_settings)
    (slope,) = torch.autograd.grad(loss.sum(), log_probs)
    return loss.item(), slope.item(), metrics


PPO = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None, "ratio_level": "token"}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 1.0, -1.2, -1.2),
        (1.5, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -0.5),
        (0.9, -1.0, 0.9, 0.9),
        (0.5, -1.0, 0.8, 0.0),
        (5.0, -1.0, 5.0, 5.0),
    ],
)
def test_ppo_clips_low_and_high(ratio, advantage, loss, slope):
    ours = one_token(PPO, ratio, advantage)
    assert ours[:2] == (pytest.approx(loss), pytest.approx(slope))
    metrics = ours[2]
    assert metrics["clip_high_fraction"] == float(ratio > 1.28 and advantage > 0)
    assert metrics["clip_low_fraction"] == float(ratio < 0.8 and advantage < 0)
    assert metrics["ratio"] == pytest.approx(ratio)
    assert metrics["old_kl"] == pytest.approx(ratio - 1 - math.log(ratio))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "cut"),
    [
        (5.0, -1.0, 3.0, 0.0, 1.0),
        (2.0, -1.0, 2.0, 2.0, 0.0),
        (0.5, -1.0, 0.8, 0.0, 0.0),
        (5.0, 1.0, -1.28, 0.0, 0.0),
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens(ratio, advantage, loss, slope, cut):
    ours = one_token(PPO | {"dual_clip": 3.0}, ratio, advantage)
    assert ours[:2] == (pytest.approx(loss), pytest.approx(slope))
    assert ours[2]["dual_clip_fraction"] == cut


def test_gspo_takes_the_geometric_mean_of_the_row():
    log_probs = torch.tensor([[0.3, 0.1, 5.0], [-0.4, 0.0, 0.2]], dtype=torch.float64)
    log_probs.requires_grad_()
    mask = bools([1, 1, 0], [1, 1, 1])
    advantages = torch.tensor([[1.0] * 3, [2.0] * 3], dtype=torch.float64)
    settings = {"clip_low": 0.3, "clip_high": 0.3, "dual_clip": None}
    tokens, _ = losses.ppo(
        log_probs, 0 * log_probs.detach(), advantages, mask, **settings, ratio_level="sequence-mean"
    )
    first, second = math.exp(0.2), math.exp(-0.2 / 3)
    close(tokens, [[-first, -first, 0], [-2 * second] * 3])
    loss = aggregate(tokens, mask, {"rows": 2.0}, mode="seq-mean-token-mean")
    (grads,) = torch.autograd.grad(loss, log_probs)
    # d/d log p of s A is s A / tokens of the row (equation 10 of the paper), over 2 rows
    close(grads, [[-first / 4, -first / 4, 0], [-2 * second / 6] * 3])


def test_levels_of_a_ratio():
    log_ratio, mask = torch.tensor([[1.0, 3, 0, 4, 0, 0, 2]]), bools([1, 1, 0, 1, 0, 0, 1])
    right = {
        "token": [1.0, 3, 0, 4, 0, 0, 2],
        "segment": [4.0, 4, 0, 4, 0, 0, 2],
        "segment-mean": [2.0, 2, 0, 4, 0, 0, 2],
        "sequence-mean": [2.5] * 7,
        "sequence": [10.0] * 7,
    }
    assert right.keys() == LEVELS.keys()
    for level, values in right.items():
        close(LEVELS[level](log_ratio, mask)[mask], torch.tensor([values])[mask].tolist())


def test_cispo_keeps_the_gradient_of_every_token():
    log_probs = torch.tensor([[1.0, -3.0, 0.1]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(1, 3, dtype=torch.float64), bools([1, 1, 1])
    advantages = torch.tensor([[1.0, -2.0, 1.0]], dtype=torch.float64)
    for low, least in ((None, math.exp(-3)), (0.2, 0.8)):
        loss, metrics = losses.cispo(
            log_probs, old, advantages, mask, clip_low=low, clip_high=0.3, ratio_level="token"
        )
        close(loss, [[-1.3, -6 * least, -0.1 * math.exp(0.1)]])
        (grads,) = torch.autograd.grad(loss.sum(), log_probs)
        close(grads, [[-1.3, 2 * least, -math.exp(0.1)]])
        assert metrics["clip_high_fraction"] == pytest.approx(1 / 3)
        assert metrics["clip_low_fraction"] == pytest.approx(0 if low is None else 1 / 3)


def test_reinforce_is_minus_a_log_p():
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, metrics = losses.reinforce(log_probs, torch.tensor([[3.0, NAN]]), bools([1, 0]))
    (grads,) = torch.autograd.grad(loss.sum(), log_probs)
    assert (loss.tolist(), grads.tolist(), metrics) == ([[3.0, 0]], [[-3.0, 0]], {})


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [100.0, -100.0, 1e30, -1e30])
@pytest.mark.parametrize("wanted", WANTED)
def test_ratios_out_of_all_bounds_leave_loss_and_gradient_finite(wanted, gap, advantage):
    log_probs = torch.full((1, 2), gap, requires_grad=True)
    columns = {
        "log_probs": log_probs,
        "old_log_probs": torch.zeros(1, 2),
        "advantages": torch.full((1, 2), advantage),
        "response_mask": bools([1, 1]),
    }
    loss = loss_of(wanted, columns)[0].sum()
    (grads,) = torch.autograd.grad(loss, log_probs)
    assert loss.isfinite() and grads.isfinite().all()


def test_n15_value_clip():
    predicted = torch.tensor([[1.0, NAN]], requires_grad=True)
    columns = (torch.tensor([[0.5, INF]]), torch.tensor([[0.6, 0]]), bools([1, 0]))
    clipped, metrics = losses.value(predicted, *columns, clip=0.2)
    close(clipped, [[0.08, 0]])
    assert metrics["value"] == 1 and metrics["value_error"] == pytest.approx(0.16)
    assert metrics["value_clip_fraction"] == 0
    (grads,) = torch.autograd.grad(clipped.sum(), predicted)
    close(grads, [[0.4, 0]])


def test_value_clip_stops_a_critic_that_has_moved_far_enough():
    predicted = torch.tensor([[1.0]], requires_grad=True)
    old, returns, mask = torch.tensor([[0.5]]), torch.tensor([[1.1]]), bools([1])
    clipped, metrics = losses.value(predicted, old, returns, mask, clip=0.2)
    close(clipped, [[0.08]])
    assert metrics["value_clip_fraction"] == 1
    assert torch.autograd.grad(clipped.sum(), predicted)[0].item() == 0
    free, _ = losses.value(predicted, old, returns, mask, clip=None)
    close(free, [[0.005]])


@pytest.mark.parametrize(
    ("log_prob", "ref", "values", "slopes"),
    [
        (-1.0, -1.5, (0.5, 0.125, 0.106531), (1.0, 0.5, 0.393469)),
        (-2.0, -1.0, (-1.0, 0.5, 0.718282), (1.0, -1.0, 1 - math.e)),
    ],
)
def test_n10_f24_estimates_of_kl_and_their_derivatives(log_prob, ref, values, slopes):
    for estimator, value, slope in zip(("k1", "k2", "k3"), values, slopes, strict=True):
        log_probs = torch.tensor([[log_prob]], requires_grad=True)
        ours = divergence(log_probs, torch.tensor([[ref]]), bools([1]), estimator=estimator)
        close(ours, [[value]])
        close(torch.autograd.grad(ours.sum(), log_probs)[0], [[slope]])


def test_n10_f24_means_of_the_estimates():
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    means = {name: (p * f(p.log() - q.log())).sum().item() for name, f in ESTIMATORS.items()}
    assert means == pytest.approx({"k1": 0.07246, "k2": 0.056938, "k3": 0.07246}, abs=1e-6)


def test_n38_f12_without_advantage_k3_still_pulls_unless_masked():
    log_probs = torch.tensor([[-1.0], [-1.0]], requires_grad=True)
    ref, advantages = torch.full((2, 1), -1.5), torch.zeros(2, 1)

    def slopes(mask):
        policy, _ = losses.reinforce(log_probs, advantages, mask)
        tokens = policy + 0.04 * divergence(log_probs, ref, mask, estimator="k3")
        loss = aggregate(tokens, mask, denominators(mask), mode="token-mean")
        return torch.autograd.grad(loss, log_probs)[0]

    close(slopes(bools([1], [0])), [[0.015739], [0]])
    close(slopes(bools([1], [1])), [[0.015739 / 2], [0.015739 / 2]])
    assert not slopes(bools([0], [0])).any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_far_from_the_reference_is_finite(estimator):
    log_probs = torch.tensor([[-1e4, 0.0]], requires_grad=True)
    kl = divergence(log_probs, torch.tensor([[0.0, -1e4]]), bools([1, 1]), estimator=estimator)
    (grads,) = torch.autograd.grad(kl.sum(), log_probs)
    assert kl.isfinite().all() and grads.isfinite().all()


def test_n20_truncated_importance_weights():
    log_probs = torch.tensor([[-1.0, -1.0, NAN]], requires_grad=True)
    weights = importance_weights(
        log_probs, torch.tensor([[-2.0, -0.5, 1.0]]), bools([1, 1, 0]), level="token", cap=2.0
    )
    close(weights, [[2.0, 0.606531, 1]])
    assert not weights.requires_grad
    # of the whole response: e^(1 - .5)
    whole = importance_weights(
        log_probs, torch.tensor([[-2.0, -0.5, 1.0]]), bools([1, 1, 0]), level="sequence", cap=2.0
    )
    close(whole, [[1.648721, 1.648721, 1]])


def test_filter_by_the_ratio_of_trainer_and_engine():
    log_probs, engine = torch.tensor([[-1.0, -1, -1, -1]]), torch.tensor([[-2.0, -0.5, -1, NAN]])
    mask = bools([1, 1, 1, 0])
    tokens = within(log_probs, engine, mask, level="token", low=0.7, high=2)
    assert tokens.tolist() == [[False, False, True, False]]
    rows = within(log_probs, engine, mask, level="sequence-mean", low=0.7, high=2)
    assert rows.tolist() == mask.tolist()


def test_n18_f07_a_bad_sequence_that_is_far_off_goes_as_a_whole():
    new, mask = torch.tensor([[-2.0, -2, -2, NAN]] * 4), bools(*[[1, 1, 1, 0]] * 4)
    old = new + torch.tensor([[1.0], [1.0], [0.05], [1.0]])
    bad, good = [-0.5, 0.25, -0.25, 9], [0.5, -0.25, 0.25, -9]
    # the mean of the first is -.166667 over KL 1; the second is good; the third is near enough
    advantages = torch.tensor([bad, good, bad, [0.0, 0, 0, -9]])
    ours = off_policy_mask(new, old, advantages, mask, threshold=0.1)
    assert ours.any(-1).tolist() == [False, True, True, True]
    assert ours[1:].tolist() == mask[1:].tolist()


def test_gap_between_trainer_and_engine():
    ours = gap(torch.tensor([[-1.0, -2, NAN]]), torch.tensor([[-1.5, -2, 0]]), bools([1, 1, 0]))
    assert ours["log_prob_gap"] == 0.25 and isinstance(ours["log_prob_gap"], Mean)
    assert ours["log_prob_gap_max"] == 0.5 and isinstance(ours["log_prob_gap_max"], Max)
    assert ours["engine_kl"] == pytest.approx((math.exp(0.5) - 1 - 0.5) / 2)


def test_n8_sums_of_ranks_over_the_count_of_all():
    counts = {"tokens": 6.0}
    parts = [torch.full((1, 5), 2.0), torch.full((1, 1), 4.0)]
    local = [aggregate(p, p > 0, counts, mode="token-mean").item() for p in parts]
    assert sum(local) == pytest.approx(2.333333, abs=1e-6)
    # what each of two ranks contributes if its gradients are averaged
    assert [2 * x for x in local] == pytest.approx([3.333333, 1.333333], abs=1e-6)


def test_f11_truncated_samples_leave_both_parts_of_the_fraction():
    token_losses, mask = torch.ones(6, 5), torch.ones(6, 5, dtype=torch.bool)
    mask[3] = False
    counts = denominators(mask, divisor=10)
    assert counts == {"tokens": 25, "rows": 5, "constant": 50}
    right = {
        "token-mean": 1.0,
        "seq-mean-token-mean": 1.0,
        "seq-mean-token-sum": 5.0,
        "constant": 0.5,
    }
    ours = {m: aggregate(token_losses, mask, counts, mode=m).item() for m in AGGREGATIONS}
    assert ours == pytest.approx(right)


def test_the_four_aggregations_differ_where_lengths_do():
    token_losses = torch.tensor([[1.0, 2, 3], [6.0, NAN, INF], [NAN, NAN, NAN]])
    mask = bools([1, 1, 1], [1, 0, 0], [0, 0, 0])
    counts = denominators(mask, divisor=4)
    right = {
        "token-mean": 3.0,
        "seq-mean-token-mean": 4.0,
        "seq-mean-token-sum": 6.0,
        "constant": 1.5,
    }
    ours = {m: aggregate(token_losses, mask, counts, mode=m).item() for m in AGGREGATIONS}
    assert ours == pytest.approx(right)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_where_nothing_counts_the_loss_is_0(mode):
    mask = bools([0, 0])
    counts = denominators(mask, divisor=3)
    token_losses = torch.tensor([[NAN, INF]], requires_grad=True)
    loss = aggregate(token_losses, mask, counts, mode=mode)
    assert loss.item() == 0 and not torch.autograd.grad(loss, token_losses)[0].any()


def test_an_aggregation_that_is_none():
    with pytest.raises(ValueError, match="aggregation='mean': want one of token-mean, seq-"):
        aggregate(torch.ones(1, 1), bools([1]), {}, mode="mean")


@pytest.mark.parametrize("wanted", POLICY_LOSSES)
def test_c09_an_unknown_keyword_is_an_error(wanted):
    args = PolicyLossArgs(wanted, WANTED[wanted])
    function = import_object(args.path)
    with pytest.raises(TypeError, match="unexpected keyword argument 'clip_hihg'"):
        function(*[None] * len(columns_of(function)), **args.arguments, clip_hihg=1)


@pytest.mark.parametrize("wanted", [w for w in WANTED if POLICY_LOSSES[w.split()[0]].of_advantage])
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), factor=st.sampled_from([3.0, 0.5]))
def test_f09_scaling_advantages_scales_the_loss(wanted, seed, factor):
    columns = random_columns(seed)
    columns["log_probs"].requires_grad_()

    def grads(columns):
        loss = loss_of(wanted, columns)[0].sum()
        return loss, torch.autograd.grad(loss, columns["log_probs"])[0]

    loss, slopes = grads(columns)
    scaled, scaled_slopes = grads(columns | {"advantages": columns["advantages"] * factor})
    torch.testing.assert_close(scaled, loss * factor, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scaled_slopes, slopes * factor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted", WANTED)
@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    bad=st.sampled_from([NAN, INF, -INF, 1e10, -1e10]),
    mode=st.sampled_from(list(AGGREGATIONS)),
)
def test_f17_what_is_masked_never_matters(wanted, seed, bad, mode):
    columns = random_columns(seed)
    mask = columns["response_mask"]
    counts = denominators(mask, divisor=7)

    def run(fill):
        filled = {
            name: tensor.where(mask, fill) if name != "response_mask" else tensor
            for name, tensor in columns.items()
        }
        learnt = [filled[name].requires_grad_() for name in ("log_probs", "entropy")]
        loss = whole_loss(filled, counts, mode, wanted)
        return loss, torch.autograd.grad(loss, learnt), loss_of(wanted, filled)[1]

    loss, grads, metrics = run(0.0)
    ours = run(bad)
    assert ours[0].item() == loss.item() and loss.isfinite()
    torch.testing.assert_close(ours[1], grads, rtol=0, atol=0)
    assert not any(grad[~mask].any() for grad in grads)
    assert ours[2] == metrics and all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=25)
@given(data=st.data())
def test_f26_micro_batches_and_ranks_change_nothing(mode, data):
    columns = random_columns(data.draw(st.integers(0, 10**6)), rows=7, dtype=torch.float64)
    wanted = data.draw(st.sampled_from(list(WANTED)))
    order = data.draw(st.permutations(range(7)))
    cuts = sorted(data.draw(st.lists(st.integers(0, 7), max_size=4)))
    counts = denominators(columns["response_mask"], divisor=11)
    columns["log_probs"].requires_grad_()
    whole = whole_loss(columns, counts, mode, wanted)
    right = torch.autograd.grad(whole, columns["log_probs"])[0]
    loss, grads, metrics = torch.zeros(()), torch.zeros_like(right), []
    for start, end in zip([0, *cuts], [*cuts, 7], strict=True):
        part = {name: tensor[order[start:end]] for name, tensor in columns.items()}
        of_part = whole_loss(part, counts, mode, wanted)
        loss = loss + of_part.detach()
        grads += torch.autograd.grad(of_part, columns["log_probs"])[0]
        metrics.append(loss_of(wanted, part)[1])
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(grads, right, rtol=1e-9, atol=1e-12)
    assert merge_metrics(metrics) == pytest.approx(loss_of(wanted, columns)[1], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("wanted", [w for w in WANTED if w.split()[0] not in WEIGHING])
def test_gradients_are_those_of_finite_differences(wanted):
    columns = random_columns(3, rows=3, width=4, dtype=torch.float64)
    columns["log_probs"].requires_grad_()
    torch.autograd.gradcheck(
        lambda log_probs: loss_of(wanted, columns | {"log_probs": log_probs})[0].sum(),
        columns["log_probs"],
    )


def test_token_means_of_no_token_count_nothing():
    empty = token_means({"a": torch.tensor([[NAN]])}, bools([0]))
    assert merge_metrics([empty, token_means({"a": torch.tensor([[3.0]])}, bools([1]))]) == {"a": 3}
