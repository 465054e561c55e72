"""Advantages. N, A … ids: shared/cases."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_td.algorithms import advantages
from roll_td.algorithms.choosing import call
from roll_td.algorithms.evaluation import explained_variance, pass_at_k
from roll_td.config.classes import import_object
from roll_td.config.functions import ADVANTAGES, AdvantageArgs
from roll_td.config.signatures import check_settings, columns_of

NAN, INF = math.nan, math.inf
WANTED = {
    **{name: {} for name in ADVANTAGES},
    "grpo batch": {"scale": "batch"},
    "grpo none": {"scale": "none"},
    "grpo population": {"ddof": 0},
    "reinforce .9": {"gamma": 0.9},
    "reinforce++ .9": {"gamma": 0.9},
    "gae .9": {"gamma": 0.9, "lam": 0.8},
}
"""What is to hold of every estimator is tried on these."""
COMPARING = [(advantages.grpo, {"scale": "group", "ddof": 1}), (advantages.rloo, {})]


def estimate(wanted, **columns):
    args = AdvantageArgs(wanted.split()[0], WANTED.get(wanted, {}))
    return call(import_object(args.path), columns, args.arguments)


def bools(*values):
    return torch.tensor(values, dtype=torch.bool)


def close(ours, right):
    right = torch.tensor(right, dtype=ours.dtype)
    torch.testing.assert_close(ours, right, rtol=0, atol=2e-6)


def of_outcomes(function, outcomes, group_id=None, **keywords):
    """Advantages (B) of responses of one token each."""
    rewards = torch.tensor(outcomes)[:, None]
    ids = [] if group_id is None else [torch.tensor(group_id)]
    mask = torch.ones(rewards.shape, dtype=torch.bool)
    return function(rewards, mask, *ids, **keywords)["advantages"][:, 0]


def test_n1_three_right_of_eight():
    outcomes, one = [1.0, 0, 1, 0, 0, 1, 0, 0], [0] * 8

    def of(high, low):
        return [high if outcome else low for outcome in outcomes]

    grpo = advantages.grpo
    scaled = of_outcomes(grpo, outcomes, one, scale="group", ddof=1)
    close(scaled, of(1.207615, -0.724569))
    centred = of_outcomes(grpo, outcomes, one, scale="none", ddof=1)
    close(centred, of(0.625, -0.375))
    close(of_outcomes(advantages.rloo, outcomes, one), of(0.714286, -0.428571))


def test_n1_equal_rewards_get_exactly_0():
    for function, keywords in COMPARING:
        assert not of_outcomes(function, [0.3] * 7, [2] * 7, **keywords).any()


def test_equal_sums_of_unequal_tokens_get_exactly_0():
    # a sum in float64 whose mean over 15 rows is not that sum
    rewards = torch.tensor([[1.0, -3.3e-6, 1.7e-9, 0.1]] * 15)
    mask, ids = torch.ones(15, 4, dtype=torch.bool), torch.zeros(15, dtype=torch.int64)
    ours = advantages.grpo(rewards, mask, ids, scale="group", ddof=1)
    assert not ours["advantages"].any()


def test_n2_groups_go_by_id_and_a_row_without_a_score_moves_nobody():
    keywords = {"scale": "none", "ddof": 1}
    close(of_outcomes(advantages.grpo, [1.0, 0, 0, 0], [7, 3, 7, 3], **keywords), [0.5, 0, -0.5, 0])
    keywords["scale"] = "group"
    with_a_gap = of_outcomes(advantages.grpo, [1.0, NAN, 0, 0], [1] * 4, **keywords)
    close(with_a_gap, [1.154701, 0, -0.577350, -0.577350])


def test_n4_f01_a_masked_value_bootstraps_nothing():
    ours = advantages.gae(
        torch.tensor([[0.0, 1, 0]]),
        torch.tensor([[0.0, 0, 100]]),
        bools([1, 1, 0]),
        gamma=1.0,
        lam=0.95,
    )
    close(ours["advantages"], [[0.95, 1, 0]])
    close(ours["returns"], [[0.95, 1, 0]])


def test_n5_f04_tokens_of_tools_are_passed_over():
    ours = advantages.gae(
        torch.tensor([[0.0, 0, 0, 0, 1]]),
        torch.tensor([[0.5, 0.5, 9, 9, 0.5]]),
        bools([1, 1, 0, 0, 1]),
        gamma=1.0,
        lam=0.95,
    )
    close(ours["advantages"], [[0.45125, 0.475, 0, 0, 0.5]])
    close(ours["returns"], [[0.95125, 0.975, 0, 0, 1]])


def test_n5_plain():
    ours = advantages.gae(
        torch.tensor([[0.0, 0, 2]]),
        torch.tensor([[0.3, 0.6, 1]]),
        bools([1, 1, 1]),
        gamma=0.9,
        lam=0.8,
    )
    close(ours["advantages"], [[0.9744, 1.02, 1.0]])


def loop_gae(rewards, values, mask, gamma, lam):
    """The recursion of the paper, one token at a time."""
    out = torch.zeros(rewards.shape, dtype=torch.float64)
    for row in range(len(rewards)):
        following, running = 0.0, 0.0
        for t in reversed(mask[row].nonzero()[:, 0].tolist()):
            error = rewards[row, t].item() + gamma * following - values[row, t].item()
            running = error + gamma * lam * running
            following = values[row, t].item()
            out[row, t] = running
    return out


@pytest.mark.parametrize("width", [1, 2, 7, 16, 33])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.8), (0.5, 0.0)])
def test_gae_and_reinforce_are_the_recursion_of_their_papers(width, gamma, lam):
    draw = torch.Generator().manual_seed(width)
    rewards, values = torch.randn(2, 5, width, generator=draw)
    mask = torch.rand(5, width, generator=draw) < 0.6
    ours = advantages.gae(rewards, values, mask, gamma=gamma, lam=lam)["advantages"]
    right = loop_gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(ours.double(), right, rtol=1e-6, atol=1e-6)
    returns = advantages.reinforce(rewards, mask, gamma=gamma)["advantages"]
    right = loop_gae(rewards, torch.zeros_like(values), mask, gamma, 1.0)
    torch.testing.assert_close(returns.double(), right, rtol=1e-6, atol=1e-6)


def test_n24_f19_rewards_to_come_stop_at_the_mask():
    ours = advantages.reinforce(torch.tensor([[1.5, 1, 2, 2]]), bools([1, 1, 0, 0]), gamma=1.0)
    close(ours["advantages"], [[2.5, 1, 0, 0]])


def test_n19_f14_reinforce_pp_whitens_over_all_tokens():
    rewards = torch.tensor([[1.0, NAN, NAN], [0, 0, 0]])
    ours = advantages.reinforce_pp(rewards, bools([1, 0, 0], [1, 1, 1]), gamma=1.0)
    close(ours["advantages"], [[1.5, 0, 0], [-0.5, -0.5, -0.5]])


def test_f14_a_group_of_one_has_no_baseline():
    function = advantages.reinforce_pp_baseline
    close(of_outcomes(function, [1.0, 0, 2], [0, 1, 2]), [0, -1, 1])
    # with others it has: centred [.5, -.5, 0, 1, -1], deviation .790569
    pairs = of_outcomes(function, [1.0, 0, 5, 4, 2], [0, 0, 1, 2, 2])
    centred = torch.tensor([0.5, -0.5, 5, 1, -1])
    close(pairs, ((centred - centred.mean()) / centred.std()).tolist())


def test_n26_the_baseline_is_the_mean_of_rows_so_it_depends_on_what_a_row_is():
    keywords = {"scale": "none", "ddof": 1}
    trajectories = of_outcomes(advantages.grpo, [1.0, 0], [0, 0], **keywords)
    close(trajectories, [0.5, -0.5])
    steps = of_outcomes(advantages.grpo, [1.0, 1, 1, 0, 0], [0] * 5, **keywords)
    close(steps, [0.4, 0.4, 0.4, -0.6, -0.6])


def test_a_row_alone_in_its_group_learns_nothing():
    for function, keywords in COMPARING:
        close(of_outcomes(function, [5.0, 1, 0], [0, 1, 1], **keywords)[:1], [0.0])


@pytest.mark.parametrize("wanted", ADVANTAGES)
def test_a11_an_empty_response_moves_nobody(wanted):
    rewards = torch.tensor([[10.0, 10, 10], [0, 0, 0], [0, 0, 0]])
    ours = estimate(
        wanted,
        token_level_rewards=rewards,
        response_mask=bools([0, 0, 0], [1, 1, 0], [1, 1, 1]),
        group_id=torch.tensor([1, 1, 1]),
        values=torch.zeros(3, 3),
        state_id=torch.ones(3, 3, dtype=torch.long),
    )
    assert not ours["advantages"].any()


@pytest.mark.parametrize("wanted", ADVANTAGES)
def test_c09_an_unknown_keyword_is_an_error(wanted):
    args = AdvantageArgs(wanted)
    function = import_object(args.path)
    tensors = [None] * len(columns_of(function))
    with pytest.raises(TypeError, match="unexpected keyword argument 'valid_mask'"):
        function(*tensors, **args.arguments, valid_mask=None)
    with pytest.raises(
        ValueError, match="got an unexpected keyword argument 'valid_mask'; settings"
    ):
        check_settings(function, args.arguments | {"valid_mask": 1})
    check_settings(function, args.arguments)
    assert all(p.kind is not p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def batch(data, rows, width):
    """Columns with random masks; what the masks hide is as bad as can be."""
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    mask = torch.rand(rows, width, generator=draw) < 0.6
    columns = {
        "token_level_rewards": torch.randint(-2, 3, (rows, width), generator=draw).float(),
        "values": torch.randn(rows, width, generator=draw),
        "state_id": torch.randint(0, 2, (rows, width), generator=draw),
    }
    group_id = torch.randint(0, 3, (rows,), generator=draw)
    return {**columns, "response_mask": mask, "group_id": group_id}


@pytest.mark.parametrize("wanted", WANTED)
@settings(max_examples=25)
@given(data=st.data(), bad=st.sampled_from([NAN, INF, -INF, 1e10]))
def test_c09_f17_what_is_masked_or_has_no_score_never_matters(wanted, data, bad):
    columns = batch(data, rows=6, width=5)
    mask = columns["response_mask"]
    mask[0] = False
    without_score = data.draw(st.integers(1, 5))
    if mask[without_score].any():
        token = mask[without_score].nonzero()[0, 0]
        columns["token_level_rewards"][without_score, token] = NAN
    right = estimate(wanted, **{key: value[1:] for key, value in columns.items()})
    for name in ("token_level_rewards", "values"):
        columns[name] = columns[name].where(mask, bad)
    ours = estimate(wanted, **columns)
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32 and tensor.isfinite().all()
        assert not tensor[~mask].any() and not tensor[0].any()
        assert not tensor[without_score].any()
        torch.testing.assert_close(tensor[1:], right[name], rtol=0, atol=0)
    others = [row for row in range(6) if row not in (0, without_score)]
    gone = estimate(wanted, **{key: value[others] for key, value in columns.items()})
    torch.testing.assert_close(ours["advantages"][others], gone["advantages"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("wanted", WANTED)
@settings(max_examples=25)
@given(data=st.data())
def test_order_of_rows_and_names_of_groups_do_not_matter(wanted, data):
    columns = batch(data, rows=6, width=4)
    order = torch.tensor(data.draw(st.permutations(range(6))))
    ours = estimate(wanted, **columns)
    columns["group_id"] = torch.tensor([30, 10, 20])[columns["group_id"]]
    shuffled = estimate(wanted, **{key: value[order] for key, value in columns.items()})
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor[order], shuffled[name], rtol=1e-5, atol=1e-6)


def test_a_column_that_is_missing_is_named():
    with pytest.raises(KeyError, match=r"gae needs columns \['values'\]; there are"):
        call(advantages.gae, {"token_level_rewards": 1, "response_mask": 1}, {"gamma": 1, "lam": 1})


@pytest.mark.parametrize(("k", "right"), [(1, 0.375), (2, 0.642857), (4, 0.928571)])
def test_n41_pass_at_k(k, right):
    correct = torch.tensor([3, 0, 8, 7])
    ours = pass_at_k(torch.full((4,), 8), correct, k=k)
    close(ours[:3], [right, 0, 1])
    assert ours[3] == (pytest.approx(7 / 8) if k == 1 else 1)


def test_n41_pass_at_k_of_fewer_samples_than_k():
    with pytest.raises(ValueError, match="k=4: want 1 to 3, the fewest samples of a prompt"):
        pass_at_k(torch.tensor([8, 3]), torch.tensor([1, 1]), k=4)


def test_explained_variance():
    mask = bools([1, 1, 1], [0, 1, 0])
    returns = torch.tensor([[1.0, 2, 3], [NAN, 6, INF]])
    # of 1 2 3 6 the mean is 3 and the variance 7/2
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full((2, 3), 9.0), returns, mask) == 0
    worse = torch.tensor([[3.0, 2, 1], [NAN, 6, NAN]])  # errors -2 0 2 0
    assert explained_variance(worse, returns, mask) == pytest.approx(1 - 2 / 3.5)
    assert explained_variance(worse, torch.ones(2, 3), mask) == 0
    assert explained_variance(worse, returns, bools([0, 0, 0], [0, 0, 0])) == 0


def test_n23_j03_on_average_distillation_follows_the_reverse_kl():
    teacher, logits = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.6, 0.4]).log()
    logits.requires_grad_()

    def slopes_of(loss):
        return torch.autograd.grad(loss(logits.log_softmax(-1)), logits)[0]

    # a row for each token that may be sampled
    old = logits.detach()[:, None]
    made = advantages.distillation(old, teacher[:, None], bools([1], [1]), gamma=0.0)["advantages"]
    often = old.exp().squeeze(-1)
    slopes = slopes_of(lambda student: -(often * made.squeeze(-1) * student).sum())
    close(slopes, [-0.430022, 0.430022])
    kl = slopes_of(lambda student: (student.exp() * (student - teacher)).sum())
    close(slopes, kl.tolist())
    # a penalty that is the same for all tokens of a state has none
    close(slopes_of(lambda student: -(often * 0.3 * student).sum()), [0.0, 0.0])


def test_n24_f19_what_is_still_to_come_leaves_padding_out():
    teacher, old = torch.tensor([[1.5, 1.0, NAN, 2.0]]), torch.zeros(1, 4)
    mask = bools([1, 1, 0, 0])
    for gamma, right in ((1.0, [2.5, 1, 0, 0]), (0.5, [2.0, 1, 0, 0]), (0.0, [1.5, 1, 0, 0])):
        close(advantages.distillation(old, teacher, mask, gamma=gamma)["advantages"], [right])
