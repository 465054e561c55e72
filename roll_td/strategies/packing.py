"""The rows of a micro-batch as a model takes them, and what is read out of its hidden states.

Packed, the real tokens of all rows lie end to end in one line, and the positions start again with
each row. Padded, the rows lie under each other; as padding is on the right and attention causal,
no real token sees it and no mask is needed. Either way the hidden states of the real tokens come
out in the same order, so that what is computed from them does not know which it was.

transformers keeps the rows of a line apart by the restart of position_ids, if it gets no mask.
flash_attention_2 then computes each row for itself. sdpa and eager get a mask over all pairs of
tokens of the line: right, but on a CPU a layer of SmolLM2 takes 1.46 times as long with it as
padded (8 rows of 128 to 1,024 tokens, forward and backward). `attend_row_by_row` takes the place
of sdpa and computes what that mask leaves over, without making it: 0.46 times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from roll_td import models
from roll_td.algorithms import functional
from roll_td.algorithms.functional import Head

ROW_BY_ROW = "roll_td_row_by_row"
"""What transformers calls `attend_row_by_row`."""
MOST_ERROR = 1e-4
"""Of packed hidden states, relative. Over 8 model types in float32 rounding gave 5e-7 and in
bfloat16 nothing on a CPU, as each token meets the same numbers; rows that mix gave 6e-4 to 0.3."""


@dataclass(frozen=True)
class Output:
    """What a loss_func or forward_func gets as output_tensor; only the functions below read it."""

    hidden: Tensor
    """(N, H): of the real tokens, row after row."""
    head: Head
    """What makes logits of them."""
    lengths: Tensor
    """int64 (b,): real tokens of each row."""
    width: int
    """T, of the columns that come and go."""


def packed(input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Arguments of a model for the real tokens of input_ids (b, T) in one line: int64 (1, N)."""
    real = _columns(input_ids) < lengths[:, None]
    positions = _columns(input_ids).expand_as(input_ids)
    return {"input_ids": input_ids[real][None], "position_ids": positions[real][None]}


def padded(input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Arguments of a model for the rows of input_ids (b, T), cut to the longest."""
    return {"input_ids": input_ids[:, : int(lengths.max())]}


def real_states(hidden: Tensor, lengths: Tensor) -> Tensor:
    """The hidden states (N, H) of real tokens out of those that `packed` (1, N, H) or `padded`
    (b, T, H) arguments gave."""
    if len(hidden) != len(lengths):
        return hidden[0]
    real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
    return hidden[real]


def attend_row_by_row(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    row_lengths: list[int] | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a line, as transformers calls an attention function.

    query, key, value: (b, heads, N, size), fewer heads for key and value where they are shared.
    row_lengths sum to N; None: each line is one row. A token sees the last sliding_window tokens,
    itself among them. Returns (b, N, heads, size).
    """
    assert attention_mask is None, "transformers makes no mask for a function it has none for"
    lengths = row_lengths or [query.shape[2]]
    rows = zip(*(states.split(lengths, 2) for states in (query, key, value)), strict=True)
    attended = []
    for q, k, v in rows:
        window = None
        if sliding_window is not None and sliding_window < q.shape[2]:
            at = torch.arange(q.shape[2], device=q.device)
            back = at[:, None] - at
            window = (back >= 0) & (back < sliding_window)
        attended.append(
            scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=window,
                dropout_p=dropout,
                is_causal=window is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            ).transpose(1, 2)
        )
    return torch.cat(attended, 1), None


def keep_rows_apart(model: Any) -> bool:
    """Have a model of transformers, on the CPU, compute packed rows each for itself; whether it
    wants row_lengths for that.

    ValueError if it does not: layers that carry a state along the line (convolutions, recurrences),
    or masks made without position_ids. Two rows of 3 and 4 tokens are tried; attention that does
    not run on a CPU is believed.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    attention = model.config._attn_implementation
    wants_lengths = attention == "sdpa" and kinds <= {"full_attention", "sliding_attention"}
    if wants_lengths:
        models.attend_with(model, ROW_BY_ROW, attend_row_by_row)
    mixes = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    runs_here = attention in ("sdpa", "eager")
    if mixes or (runs_here and _error(model, wants_lengths) > MOST_ERROR):
        raise ValueError(
            f"model_type {model.config.model_type} with attn_implementation {attention} does not "
            f"keep packed rows apart{f', for its layers {mixes}' if mixes else ''}; "
            "set training.packing: false"
        )
    return wants_lengths


@torch.no_grad()
def _error(model: Any, wants_lengths: bool) -> float:
    """Of packed hidden states, relative to padded ones."""
    ids, lengths = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]]), torch.tensor([3, 4])
    body, _ = models.body_and_head(model)
    model.eval()
    inputs: dict[str, Any] = packed(ids, lengths)
    if wants_lengths:
        inputs["row_lengths"] = lengths.tolist()
    one_line, two_lines = (
        real_states(body(**given, use_cache=False).last_hidden_state, lengths).float()
        for given in (inputs, padded(ids, lengths))
    )
    return float((one_line - two_lines).norm() / two_lines.norm())


def log_probs(output: Output, input_ids: Tensor, temperature: float) -> Tensor:
    """float32 (b, T): log p(input_ids[t] | input_ids[:t]) at a temperature above 0; 0 at index 0
    and beyond a row's length."""
    before, wanted = _predicted(output)
    hidden = output.hidden.index_select(0, before.nonzero().squeeze(1))
    values = functional.log_probs(hidden, output.head, input_ids[wanted], temperature)
    return _spread(values, wanted)


def entropy(output: Output, temperature: float) -> Tensor:
    """float32 (b, T): entropy in nats of the distribution that predicts position t; 0 at index 0
    and beyond a row's length."""
    before, wanted = _predicted(output)
    return _spread(functional.entropy(output.hidden[before], output.head, temperature), wanted)


def language_loss(output: Output, labels: Tensor) -> Tensor:
    """float32 scalar: sum of -log p(labels[t] | tokens before t) over labels (b, T) that are not
    -100; a label at index 0 has nothing before it and counts nowhere."""
    before, wanted = _predicted(output)
    targets = labels[wanted]
    learnt = targets != -100
    hidden = output.hidden.index_select(0, before.nonzero().squeeze(1)[learnt])
    return functional.cross_entropy_sum(hidden, output.head, targets[learnt])


def map_logits(
    output: Output, wanted: Tensor, function: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """What `function` makes of the logits that predict the n tokens at `wanted`, (n, …), row after
    row; a few tokens at a time, so that not all logits are held.

    wanted: bool (b, T), False at index 0 and beyond a row's length. function: logits float32 (m,
    V), differentiable, and which of the n they are for → (m, …). With gradients the logits are made
    again in the backward pass, and the head's gradient is summed in float32.
    """
    hidden, head = states_before(output, wanted), output.head

    def chunk(rows: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        cast = Head(weight.to(hidden.dtype), bias, head.softcap)
        return function(functional.logits(hidden, cast), rows)

    has_gradient = torch.is_grad_enabled()
    weight = head.weight.float() if has_gradient else head.weight
    size = max(1, functional.CHUNK_BYTES // (4 * len(weight)))
    parts = []
    for start in range(0, max(len(hidden), 1), size):  # once without any, for the graph
        rows = slice(start, min(start + size, len(hidden)))
        given = (rows, hidden[rows], weight, head.bias)
        if has_gradient:
            part = checkpoint(chunk, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            part = chunk(*given)
        parts.append(part)
    return torch.cat(parts)


def states_before(output: Output, wanted: Tensor) -> Tensor:
    """The hidden states (n, H) that predict the tokens at `wanted`, as map_logits takes it."""
    before, predicted = _predicted(output)
    assert not (wanted & ~predicted).any(), "a token that nothing predicts"
    return output.hidden.index_select(0, before.nonzero().squeeze(1)[wanted[predicted]])


def _predicted(output: Output) -> tuple[Tensor, Tensor]:
    """Which of the N tokens have one after them in their row, bool (N,), and where these are,
    bool (b, T), in the same order."""
    lengths = output.lengths[:, None]
    at = torch.arange(output.width, device=lengths.device)
    return (at < lengths - 1)[at < lengths], (at > 0) & (at < lengths)


def _spread(values: Tensor, wanted: Tensor) -> Tensor:
    return torch.zeros(wanted.shape, device=values.device).masked_scatter(wanted, values)


def _columns(input_ids: Tensor) -> Tensor:
    return torch.arange(input_ids.shape[1], device=input_ids.device)
