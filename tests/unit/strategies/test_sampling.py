import math

import pytest
import torch

from roll_td.strategies.sampling import generator, greedy, kept, sample

P = torch.tensor([[0.5, 0.3, 0.15, 0.05]])


def drawn(logits, uniforms, **how):
    rows = logits.expand(len(uniforms), -1)
    return sample(rows, torch.tensor(uniforms, dtype=torch.float64), **how)


def test_a_draw_is_the_first_token_whose_cumulative_probability_exceeds_the_number():
    tokens, log_probs = drawn(P.log(), [0.0, 0.499, 0.501, 0.799, 0.801, 0.949, 0.951, 1 - 2**-53])
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    torch.testing.assert_close(log_probs, P[0].log()[tokens])


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_gives_their_log_probs():
    """N13 and F16: .5 and .3 reach .8, so the first has log(.5 / .8)."""
    tokens, log_probs = drawn(P.log(), [0.0, 0.999999], top_p=0.8)
    assert tokens.tolist() == [0, 1]
    assert log_probs.tolist() == pytest.approx([-0.470004, math.log(0.3 / 0.8)], abs=1e-6)
    assert math.exp(math.log(0.5) - log_probs[0].item()) == pytest.approx(0.8, abs=1e-6)


COUNTS = [(1e-7, 1), (0.01, 1), (0.5, 1), (0.51, 2), (0.81, 3), (0.96, 4)]


@pytest.mark.parametrize(("top_p", "count"), COUNTS)
def test_top_p_keeps_at_least_one(top_p, count):
    log_probs, ids = kept(P.log(), top_p=top_p)
    assert log_probs.isfinite().sum() == count
    assert ids[0, :count].tolist() == [0, 1, 2, 3][:count]
    assert log_probs.exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_top_p_reached_but_for_rounding_is_reached():
    """.89 comes out as .8899999986."""
    log_probs, _ = kept(torch.tensor([[0.89, 0.11]]).log(), top_p=0.89)
    assert log_probs.isfinite().sum() == 1


def test_top_k_then_top_p_with_ids_out_of_order():
    probs = torch.tensor([[0.05, 0.5, 0.15, 0.3]])
    log_probs, ids = kept(probs.log(), top_k=3)
    assert ids.tolist() == [[1, 3, 2]]
    torch.testing.assert_close(log_probs.exp(), torch.tensor([[0.5, 0.3, 0.15]]) / 0.95)
    # of the three that are left, two have .8 / .95 = .842 together
    log_probs, _ = kept(probs.log(), top_k=3, top_p=0.84)
    torch.testing.assert_close(log_probs.exp(), torch.tensor([[0.625, 0.375, 0.0]]))
    assert drawn(probs.log(), [0.0, 0.7, 0.999999], top_k=2).tokens.tolist() == [1, 3, 3]
    assert kept(probs.log(), top_k=9)[1].shape == (1, 4)


def test_temperature_divides_logits():
    logits = torch.tensor([[2.0, 0.0]])
    _, log_probs = drawn(logits, [0.0], temperature=2.0)
    assert log_probs.item() == pytest.approx(math.log(1 / (1 + math.exp(-1))), abs=1e-6)


def test_greedy_takes_the_most_likely_and_counts_as_temperature_one():
    tokens, log_probs = greedy(torch.cat([P, P.flip(-1)]).log())
    assert tokens.tolist() == [0, 3]
    torch.testing.assert_close(log_probs, torch.tensor([0.5, 0.5]).log())


def test_frequencies_are_the_probabilities():
    random = generator(3, 0)
    numbers = random.random(20_000)
    tokens, _ = drawn(P.log(), numbers)
    counts = torch.bincount(tokens, minlength=4)
    expected = P[0] * len(numbers)
    assert ((counts - expected) ** 2 / expected).sum().item() < 16.27  # χ², 3 degrees, p = .001


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 500], logits[0, 600] = 0, -3
    tokens, log_probs = drawn(logits, [*torch.rand(500).tolist(), 0.0, 1 - 2**-53])
    assert set(tokens.tolist()) == {500, 600}
    assert log_probs.isfinite().all()
    many = torch.randn(1000, 40, generator=torch.Generator().manual_seed(1))
    many[:, 30:] = -torch.inf
    tokens, _ = sample(many, torch.full((1000,), 1 - 2**-53, dtype=torch.float64))
    assert tokens.tolist() == [29] * 1000


def test_each_sample_has_its_own_stream():
    assert generator(1, 2).random(3).tolist() == generator(1, 2).random(3).tolist()
    first = {generator(seed, number).random() for seed in range(8) for number in range(8)}
    assert len(first) == 64
    assert generator(-1, 2**63).random() != generator(1, 2**63).random()
