import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_td.algorithms import functional
from roll_td.algorithms.functional import Head, cross_entropy_sum, entropy, log_probs, logits

TOKENS, WIDTH, VOCAB = 10, 6, 13


@pytest.fixture(autouse=True)
def three_rows_a_chunk(monkeypatch):
    monkeypatch.setattr(functional, "CHUNK_BYTES", 4 * VOCAB * 3)


def inputs(dtype=torch.float32, tokens=TOKENS, bias=False, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, generator=draw).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=draw).to(dtype)
    given = [hidden, weight]
    if bias:
        given.append(torch.randn(VOCAB, generator=draw).to(dtype))
    targets = torch.randint(VOCAB, (tokens,), generator=draw)
    return [tensor.requires_grad_() for tensor in given], targets


def naive(hidden, weight, bias=None, temperature=1.0, softcap=None):
    raw = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    raw = raw.float()
    return (
        (raw if softcap is None else softcap * torch.tanh(raw / softcap)) / temperature
    ).double()


def naive_log_probs(targets, *args, **kwargs):
    return naive(*args, **kwargs).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def naive_entropy(*args, **kwargs):
    return torch.distributions.Categorical(logits=naive(*args, **kwargs)).entropy()


def grads(value, tensors):
    weights = torch.linspace(-1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return torch.autograd.grad((value * weights).sum(), tensors)


def assert_same(ours, theirs, tensors, tolerance):
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), theirs.double(), atol=tolerance, rtol=tolerance)
    pairs = zip(tensors, grads(ours, tensors), grads(theirs, tensors), strict=True)
    for tensor, mine, right in pairs:
        assert mine.dtype == tensor.dtype
        torch.testing.assert_close(mine, right, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.3, 2.0)])
def test_log_probs_and_their_gradients_are_those_of_all_logits_at_once(bias, temperature, softcap):
    tensors, targets = inputs(bias=bias)
    head = Head(*tensors[1:], softcap=softcap)
    ours = log_probs(tensors[0], head, targets, temperature)
    theirs = naive_log_probs(targets, *tensors, temperature=temperature, softcap=softcap)
    assert_same(ours, theirs, tensors, 1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.3, 2.0)])
def test_entropy_and_its_gradients_are_those_of_all_logits_at_once(bias, temperature, softcap):
    tensors, _ = inputs(bias=bias)
    head = Head(*tensors[1:], softcap=softcap)
    ours = entropy(tensors[0], head, temperature)
    theirs = naive_entropy(*tensors, temperature=temperature, softcap=softcap)
    assert_same(ours, theirs, tensors, 1e-5)


def test_entropy_in_nats():
    even = Head(torch.zeros(VOCAB, WIDTH))
    torch.testing.assert_close(
        entropy(torch.ones(4, WIDTH), even), torch.full((4,), VOCAB, dtype=torch.float32).log()
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_cross_entropy_is_the_sum_over_targets(bias, softcap):
    tensors, targets = inputs(bias=bias)
    ours = cross_entropy_sum(tensors[0], Head(*tensors[1:], softcap=softcap), targets)
    all_logits = naive(*tensors, softcap=softcap)
    theirs = torch.nn.functional.cross_entropy(all_logits, targets, reduction="sum")
    assert_same(ours, theirs, tensors, 1e-5)
    with torch.no_grad():
        again = cross_entropy_sum(tensors[0], Head(*tensors[1:], softcap=softcap), targets)
    torch.testing.assert_close(again, ours)


@pytest.mark.parametrize("function", [log_probs, cross_entropy_sum])
def test_bfloat16_logits_are_normalised_in_float32(function):
    # F21: the only error left is that of the bfloat16 products
    tensors, targets = inputs(torch.bfloat16)
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    ours = function(tensors[0], Head(tensors[1]), targets)
    rounded = (tensors[0] @ tensors[1].T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    theirs = rounded if function is log_probs else -rounded.sum()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    right = grads(function(exact[0], Head(exact[1]), targets), exact)
    for mine, true in zip(grads(ours, tensors), right, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - true).norm() < 0.01 * true.norm()


def test_the_heads_gradient_is_summed_in_float32(monkeypatch):
    # rows add 128 once and 0.5 each of 255 times; to 8 bits 128 + 0.5 is 128
    monkeypatch.setattr(functional, "CHUNK_BYTES", 1)
    hidden = torch.cat([torch.full((1, 1), 256.0), torch.ones(255, 1)]).bfloat16()
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(256, dtype=torch.int64)
    for loss in (
        cross_entropy_sum(hidden, Head(weight), targets),
        -log_probs(hidden, Head(weight), targets).sum(),
    ):
        weight.grad = None
        loss.backward()
        assert weight.grad.tolist() == [[-256.0], [256.0]]  # 255.5 to 8 bits


@settings(max_examples=25)
@given(chunk=st.integers(1, 12), tokens=st.integers(0, 9), seed=st.integers(0, 99))
def test_neither_chunks_nor_batch_size_change_a_log_prob(chunk, tokens, seed):
    # F21: one at a time or all together
    tensors, targets = inputs(tokens=tokens, seed=seed)
    head = Head(tensors[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "CHUNK_BYTES", 4 * VOCAB * chunk)
        together = log_probs(tensors[0], head, targets)
    alone = [log_probs(h[None], head, t[None]) for h, t in zip(tensors[0], targets, strict=True)]
    torch.testing.assert_close(together, torch.cat([together[:0], *alone]), atol=1e-5, rtol=0)


def test_without_tokens_the_values_are_empty_and_the_gradients_zero():
    # a rank whose rows are all fillers still takes part in the gradients' sum
    tensors, targets = inputs(tokens=0)
    head = Head(tensors[1])
    for value in (log_probs(tensors[0], head, targets), entropy(tensors[0], head)):
        assert value.shape == (0,)
        assert [g.abs().sum().item() for g in grads(value, tensors)] == [0, 0]
    loss = cross_entropy_sum(tensors[0], head, targets)
    assert loss.item() == 0
    assert [g.abs().sum().item() for g in grads(loss, tensors)] == [0, 0]


@pytest.mark.parametrize("low", [-torch.inf, -1e10])
def test_tokens_that_can_not_be_drawn_leave_the_rest_finite(low):
    # F17: a target at -inf or -1e10 that the mask leaves out
    tensors, targets = inputs(bias=True)
    with torch.no_grad():
        tensors[2][5] = low
    targets[:] = 2
    targets[4] = 5
    mask = targets != 5
    value = log_probs(tensors[0], Head(*tensors[1:]), targets)
    assert value[4].item() < -1e9
    kept = log_probs(tensors[0][mask], Head(*tensors[1:]), targets[mask])
    ours = torch.autograd.grad(value.masked_fill(~mask, 0).sum(), tensors)
    theirs = torch.autograd.grad(kept.sum(), tensors)
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)

    others = [i for i in range(VOCAB) if i != 5]
    spread = entropy(tensors[0], Head(*tensors[1:]))
    without = naive_entropy(tensors[0], tensors[1][others], tensors[2][others])
    torch.testing.assert_close(spread, without.float(), atol=1e-5, rtol=1e-5)
    assert all(g.isfinite().all() for g in grads(spread, tensors))


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_needs_no_gradient_gets_none(frozen):
    # 1: the head under LoRA; 0: the body of a head trained alone
    tensors, targets = inputs()
    right = grads(naive_log_probs(targets, *tensors), tensors)[1 - frozen]
    tensors[frozen].requires_grad_(False)
    (mine,) = grads(log_probs(tensors[0], Head(tensors[1]), targets), [tensors[1 - frozen]])
    torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)
    loss = cross_entropy_sum(tensors[0], Head(tensors[1]), targets)
    assert loss.requires_grad
    loss.backward()
    assert tensors[frozen].grad is None
    assert tensors[1 - frozen].grad is not None


def test_logits_of_any_shape():
    tensors, _ = inputs(bias=True)
    ours = logits(tensors[0].view(2, 5, WIDTH), Head(*tensors[1:], softcap=2.0))
    assert ours.dtype == torch.float32
    right = naive(*tensors, softcap=2.0).view(2, 5, VOCAB).float()
    torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature):
    tensors, targets = inputs()
    with pytest.raises(ValueError, match="must be above 0; greedy counts as 1"):
        log_probs(tensors[0], Head(tensors[1]), targets, temperature)
    with pytest.raises(ValueError, match="temperature"):
        entropy(tensors[0], Head(tensors[1]), temperature)
