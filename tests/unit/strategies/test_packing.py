"""Packed rows compute what each row computes alone; what is read out of hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from roll_td.algorithms.functional import Head
from roll_td.config.model import ModelConfig
from roll_td.models import body_and_head, load_model
from roll_td.strategies import packing

LENGTHS = torch.tensor([5, 1, 7, 3])
REAL = torch.arange(7) < LENGTHS[:, None]
IDS = torch.where(REAL, torch.randint(0, 64, (4, 7), generator=torch.Generator().manual_seed(0)), 0)
LAYOUT = packing.layout(IDS, LENGTHS)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def test_packed_written_out() -> None:
    ids = torch.tensor([[7, 8, 0], [9, 0, 0], [4, 5, 6]])
    inputs = packing.packed(ids, packing.layout(ids, torch.tensor([2, 1, 3])))
    assert inputs["input_ids"].tolist() == [[7, 8, 9, 4, 5, 6]]
    assert inputs["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2]]


def test_padded_is_cut_to_the_longest_row() -> None:
    assert packing.padded(IDS[:2], packing.layout(IDS[:2], LENGTHS[:2]))["input_ids"].shape == (
        2,
        5,
    )


@pytest.mark.parametrize("lengths", [LENGTHS, torch.tensor([4, 4, 4, 4])], ids=["uneven", "even"])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_attention_row_by_row_is_that_under_a_mask(window: int | None, lengths: Tensor) -> None:
    random = torch.Generator().manual_seed(1)
    rows = packing.layout(torch.zeros(4, 7).long(), lengths).rows
    q, k, v = (torch.randn(1, heads, 16, 8, generator=random) for heads in (4, 2, 2))
    row = torch.repeat_interleave(torch.arange(4), lengths)
    back = torch.arange(16)[:, None] - torch.arange(16)
    allowed = (row[:, None] == row) & (back >= 0) & (back < (window or 99))

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = (q @ k.transpose(2, 3) * 0.3).masked_fill(~allowed, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    def by_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packing.attend_row_by_row(
            torch.nn.Module(),
            q,
            k,
            v,
            None,
            rows=rows,
            scaling=0.3,
            sliding_window=window,
        )[0]

    weight = torch.randn(1, 16, 4, 8, generator=random)
    results = []
    for attend in (masked, by_row):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*inputs)
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for got, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen3", "head_dim": 8, **SIZES},
        {"model_type": "mistral", "sliding_window": 3, **SIZES},
        {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 2, **SIZES},
        {
            "model_type": "gpt2",
            "vocab_size": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ],
    ids=lambda fields: fields["model_type"],
)
def test_packed_equals_padded_in_loss_and_gradients(fields: dict[str, Any], attention: str) -> None:
    config = ModelConfig(config=fields, attn_implementation=attention)
    labels = torch.where(REAL, IDS, -100)
    results = {}
    for layout in (packing.padded, packing.packed):
        model = load_model(config, 3)
        inputs: dict[str, Any] = layout(IDS, LAYOUT)
        if layout is packing.packed:
            wants_rows = packing.keep_rows_apart(model)
            assert wants_rows == (attention == "sdpa")
            if wants_rows:
                inputs["rows"] = LAYOUT.rows
        body, head = body_and_head(model)
        hidden = body(**inputs, use_cache=False).last_hidden_state
        output = packing.Output(packing.line_states(hidden, LAYOUT), head(), LAYOUT)
        loss = packing.language_loss(output, labels)
        loss.backward()
        results[layout] = [loss, *(p.grad for p in model.parameters())]
    for got, wanted in zip(results[packing.packed], results[packing.padded], strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"], **SIZES}, r"\['conv'\]"),
        (
            {"model_type": "bloom", "vocab_size": 64, "hidden_size": 32, "n_head": 4},
            "packing: false",
        ),
    ],
    ids=["convolution", "positions from the mask"],
)
def test_a_model_that_mixes_packed_rows_is_refused(fields: dict[str, Any], message: str) -> None:
    model = load_model(ModelConfig(config=fields, attn_implementation="eager"), 0)
    with pytest.raises(ValueError, match=message):
        packing.keep_rows_apart(model)


@pytest.fixture
def output() -> packing.Output:
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(int(LENGTHS.sum()), 6, generator=random)
    return packing.Output(hidden, Head(torch.randn(64, 6, generator=random)), LAYOUT)


def logs(output: packing.Output, temperature: float) -> list[Tensor]:
    """Of each row, log p of the next token after each of its tokens: (length, V)."""
    every = (output.hidden @ output.head.weight.T / temperature).log_softmax(-1)
    return list(every.split(LENGTHS.tolist()))


def test_log_probs_and_entropy_stand_where_their_token_is(output: packing.Output) -> None:
    got = packing.log_probs(output, IDS, 0.5)
    spread = packing.entropy(output, 0.5)
    assert got.shape == spread.shape == (4, 7)
    for row, after in enumerate(logs(output, 0.5)):
        for t in range(7):
            inside = 0 < t < int(LENGTHS[row])
            p = after[t - 1] if inside else torch.zeros(64)
            torch.testing.assert_close(got[row, t], p[IDS[row, t]])
            wanted = -(p.exp() * p).sum()
            torch.testing.assert_close(spread[row, t], wanted, atol=1e-5, rtol=1e-5)


def test_values_are_of_the_tokens_before(output: packing.Output) -> None:
    weight = torch.randn(1, 6, generator=torch.Generator().manual_seed(3))
    # what comes in a lower dtype is multiplied in float32
    hidden, head = output.hidden.bfloat16(), Head(weight.bfloat16())
    got = packing.values(packing.Output(hidden, head, LAYOUT))
    assert got.shape == (4, 7) and got.dtype == torch.float32
    every = hidden.double() @ head.weight.double().T
    for row, of_row in enumerate(every.squeeze(-1).split(LENGTHS.tolist())):
        wanted = torch.zeros(7, dtype=torch.float64)
        wanted[1 : len(of_row)] = of_row[:-1]
        torch.testing.assert_close(got[row].double(), wanted, atol=1e-6, rtol=1e-6)


def test_language_loss_leaves_out_padding_and_first_tokens(
    output: packing.Output,
) -> None:
    labels = IDS.clone()
    labels[2, 3:5] = -100
    wanted = torch.zeros(())
    for row, after in enumerate(logs(output, 1.0)):
        for t in range(1, int(LENGTHS[row])):
            if labels[row, t] != -100:
                wanted -= after[t - 1, labels[row, t]]
    torch.testing.assert_close(packing.language_loss(output, labels), wanted)


def test_a_batch_without_labels_has_loss_0_and_gradients_0(output: packing.Output) -> None:
    hidden = output.hidden.clone().requires_grad_()
    given = packing.Output(hidden, output.head, LAYOUT)
    loss = packing.language_loss(given, torch.full((4, 7), -100))
    loss.backward()
    assert loss == 0 and hidden.grad is not None and not hidden.grad.any()


@pytest.mark.parametrize("chunk_bytes", [4 * 64, 3 * 4 * 64, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_of_logits_and_their_gradients(
    output: packing.Output, chunk_bytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing.functional, "CHUNK_BYTES", chunk_bytes)
    wanted = (torch.arange(7) > 0) & REAL
    wanted[2, 3:5] = False
    count, sizes = int(wanted.sum()), []
    factors = torch.arange(1.0, count + 1)

    def entropies(logits: Tensor, rows: slice) -> Tensor:
        sizes.append(len(logits))
        p = logits.log_softmax(-1)
        return factors[rows] * -(p.exp() * p).sum(-1)

    leaves = [x.to(dtype).requires_grad_() for x in (output.hidden, output.head.weight)]
    head = Head(leaves[1], softcap=4.0)
    got = packing.map_logits(packing.Output(leaves[0], head, LAYOUT), wanted, entropies)
    assert max(sizes) == min(max(1, chunk_bytes // 256), count)
    got.sum().backward()

    plain = [x.detach().float().requires_grad_() for x in leaves]
    after = (torch.tanh(plain[0] @ plain[1].T / 4) * 4).split(LENGTHS.tolist())
    before = [(r, t - 1) for r in range(4) for t in range(7) if wanted[r, t]]
    of_all = entropies(torch.stack([after[r][t] for r, t in before]), slice(None))
    of_all.sum().backward()
    exact = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.6, "rtol": 0.05}
    torch.testing.assert_close(got, of_all, **exact)
    for leaf, wanted_leaf in zip(leaves, plain, strict=True):
        assert leaf.grad is not None and wanted_leaf.grad is not None
        torch.testing.assert_close(leaf.grad.float(), wanted_leaf.grad, **exact)
    with torch.no_grad():
        same = packing.map_logits(packing.Output(leaves[0], head, LAYOUT), wanted, entropies)
    assert torch.equal(same, got)


def test_functions_of_no_logits_have_a_gradient_of_0(output: packing.Output) -> None:
    hidden = output.hidden.clone().requires_grad_()
    given = packing.Output(hidden, output.head, LAYOUT)
    none = torch.zeros(4, 7, dtype=torch.bool)
    found = packing.map_logits(given, none, lambda logits, _: logits.sum(-1))
    assert found.shape == (0,)
    found.sum().backward()
    assert hidden.grad is not None and not hidden.grad.any()


def test_a_token_that_nothing_predicts_is_our_own_mistake(output: packing.Output) -> None:
    for place in ((0, 0), (1, 1)):
        wanted = torch.zeros(4, 7, dtype=torch.bool)
        wanted[place] = True
        with pytest.raises(AssertionError, match="nothing predicts"):
            packing.states_before(output, wanted)


SHARED_LENGTHS = torch.tensor([6, 4, 7, 5, 6, 2])


def shared_rows() -> Tensor:
    """Rows 0, 1 and 3 begin alike, 1 and 3 longer; so do 2 and 4, and row 5 is how these begin."""
    ids = torch.randint(0, 64, (6, 7), generator=torch.Generator().manual_seed(3))
    ids[[1, 3], :3] = ids[0, :3]
    ids[3, 3] = ids[1, 3]
    ids[4:, :2] = ids[2, :2]
    return ids * (torch.arange(7) < SHARED_LENGTHS[:, None])


def test_what_rows_share_is_in_the_line_once() -> None:
    ids = torch.tensor([[7, 8, 1, 0], [7, 8, 2, 3], [9, 8, 4, 0], [7, 8, 5, 0], [7, 8, 2, 0]])
    found = packing.layout(ids, torch.tensor([3, 4, 3, 3, 3]), shares=True)
    inputs = packing.packed(ids, found)
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 9, 8, 4, 7, 8, 5]]
    assert inputs["position_ids"].tolist() == [[2, 2, 3, 0, 1, 2, 0, 1, 2]]
    assert found.places.tolist() == [
        [6, 7, 0, 0], [6, 7, 1, 2], [3, 4, 5, 0], [6, 7, 8, 0], [6, 7, 1, 0],
    ]  # fmt: skip
    # row 4 computes nothing, so it does not attend
    assert [len(places) for places in found.rows.alike] == [1, 3]


@pytest.mark.parametrize(
    "lengths",
    [SHARED_LENGTHS, torch.tensor([4, 4, 0, 0, 0, 3])],
    ids=["uneven", "as many places in a part as tokens in all"],
)
@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen3", "head_dim": 8, **SIZES},
        {"model_type": "mistral", "sliding_window": 3, **SIZES},
    ],
    ids=lambda fields: fields["model_type"],
)
def test_rows_that_begin_alike_learn_as_if_each_were_alone(
    fields: dict[str, Any], lengths: Tensor
) -> None:
    ids, weights = shared_rows(), torch.randn(6, 7, generator=torch.Generator().manual_seed(4))
    real = torch.arange(7) < lengths[:, None]
    labels = torch.where(real, ids, -100)
    wanted = real & (torch.arange(7) > 0)
    results = []
    rows_of = [tuple(row[:n]) for row, n in zip(ids.tolist(), lengths.tolist(), strict=True)]
    different = {row[:n] for row in rows_of for n in range(1, len(row) + 1)}
    for shares in (False, True):
        model = load_model(ModelConfig(config=fields), 3)
        assert packing.keep_rows_apart(model)
        rows = packing.layout(ids, lengths, shares=shares)
        body, head = body_and_head(model)
        states = body(**packing.packed(ids, rows), rows=rows.rows, use_cache=False)
        output = packing.Output(packing.line_states(states.last_hidden_state, rows), head(), rows)
        assert len(output.hidden) == (len(different) if shares else lengths.sum())
        found = [
            packing.log_probs(output, ids, 0.7),
            packing.entropy(output, 0.7),
            packing.language_loss(output, labels),
            packing.map_logits(output, wanted, lambda logits, _: logits[:, 5]),
        ]
        (sum((of * weights).sum() for of in found[:2]) + found[2] + found[3].sum()).backward()
        results.append([*found, *(p.grad for p in model.parameters())])
    for got, alone in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, alone, atol=1e-5, rtol=1e-5)
