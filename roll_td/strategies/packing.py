"""The rows of a micro-batch as a model takes them, and what is read out of its hidden states.

Packed, the real tokens of all rows lie end to end in one line, and the positions start again with
each row. Padded, the rows lie under each other; as padding is on the right and attention causal,
no real token sees it and no mask is needed. Either way the hidden states of the real tokens come
out in the same order, so that what is computed from them does not know which it was.

transformers keeps the rows of a line apart by the restart of position_ids, if it gets no mask.
flash_attention_2 then computes each row for itself. sdpa and eager get a mask over all pairs of
tokens of the line: right, but on a CPU a layer of SmolLM2 takes 1.46 times as long with it as
padded (8 rows of 128 to 1,024 tokens, forward and backward). `attend_row_by_row` takes the place
of sdpa and computes what that mask leaves over, without making it: 0.46 times. Under it, too, rows
that begin alike (samples of one prompt, the two sides of a pair) have that beginning computed once:
an update on 64 answers of 14 tokens to 8 prompts of 10 takes 0.66 times as long for it and for rows
of like length attending together. Answers may go on alike: those of the quick start's model after
its fine-tuning have 452 different beginnings in 959 tokens, and 0.56 times as long is left of that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from roll_td import models
from roll_td.algorithms import functional
from roll_td.algorithms.functional import Head
from roll_td.protocol import DataProto

Array = np.ndarray[Any, Any]

ROW_BY_ROW = "roll_td_row_by_row"
"""What transformers calls `attend_row_by_row`."""
LIKE = 7 / 8
"""Rows of so much of the longest one's length attend together, padded."""
MOST_ERROR = 1e-4
"""Of packed hidden states, relative. Over 8 model types in float32 rounding gave 5e-7 and in
bfloat16 nothing on a CPU, as each token meets the same numbers; rows that mix gave 6e-4 to 0.3."""


class Rows(NamedTuple):
    """The rows of a line, those of like length together."""

    alike: list[Tensor]
    """int64 (n, w) each: the places of n rows of at most w tokens; 0 after a row's end."""
    order: Tensor
    """int64 (N,): where each token of the line is in these, one after the other."""


@dataclass(frozen=True)
class Layout:
    """Where the real tokens of a micro-batch's rows (b, T) stand in the line of those that a model
    computes: row after row, but for what a row shares with another one that has it."""

    lengths: Tensor
    """int64 (b,): real tokens of each row."""
    taken: Tensor
    """bool (b, T): the tokens of the line, in its order."""
    places: Tensor
    """int64 (b, T): the place of each real token, with one before it or not; 0 in padding."""
    rows: Rows
    """What attention sees of them."""


@dataclass(frozen=True)
class Output:
    """What a loss_func or forward_func gets as output_tensor; only the functions below read it."""

    hidden: Tensor
    """(N, H): of the tokens of the line."""
    head: Head
    """What makes logits of them."""
    layout: Layout
    """Whose tokens these are."""


def layout(input_ids: Tensor, lengths: Tensor, *, shares: bool = False) -> Layout:
    """Of rows input_ids (b, T). With `shares` the tokens that rows have in common from the first on
    are computed once, in one of these rows: causal attention gives them the same hidden states,
    whatever follows."""
    ids, sizes = input_ids.cpu().numpy(), lengths.cpu().numpy()
    columns, own = np.arange(ids.shape[1]), np.arange(len(ids))[:, None]
    real: Array = columns < sizes[:, None]
    holders = _holders(ids, sizes, real) if shares else np.broadcast_to(own, real.shape)
    taken = real & (holders == own)
    numbers = (taken.cumsum() - 1).reshape(taken.shape)
    places = np.where(real, numbers[holders, columns], 0)
    line, at = (torch.from_numpy(each).to(input_ids.device) for each in (taken, places))
    return Layout(lengths, line, at, _rows(sizes, taken, places, input_ids.device))


def _holders(ids: Array, sizes: Array, real: Array) -> Array:
    """int64 (b, T): for each token the row that computes it, the same one for all rows that are
    alike up to it."""
    keys = [row[:size].tobytes() for row, size in zip(ids, sizes, strict=True)]
    # sorted, rows that begin alike are neighbours; one that another begins with comes after that
    by_key = sorted(range(len(keys)), key=keys.__getitem__, reverse=True)
    order = np.array(by_key, dtype=np.int64)
    ids, real, begins = ids[order], real[order], np.ones_like(real)
    alike = (ids[1:] == ids[:-1]) & real[1:] & real[:-1]
    begins[1:] = ~np.logical_and.accumulate(alike, axis=1)
    first = np.maximum.accumulate(np.where(begins, np.arange(len(ids))[:, None], 0))
    return order[first][order.argsort()]


def _rows(sizes: Array, taken: Array, places: Array, device: torch.device) -> Rows:
    """The rows that compute a token, longest first, as many together as are LIKE of the longest."""
    alike, line = [], []
    numbers = np.argsort(-sizes, kind="stable")
    numbers = numbers[taken[numbers].any(-1)]
    while len(numbers):
        width = sizes[numbers[0]]
        count = int((sizes[numbers] >= LIKE * width).sum())
        of, numbers = numbers[:count], numbers[count:]
        alike.append(places[of, :width])
        line.append(np.where(taken[of, :width], alike[-1], -1).ravel())
    where = np.concatenate(line) if line else np.empty(0, dtype=np.int64)
    order = np.empty(int(taken.sum()), dtype=np.int64)
    order[where[where >= 0]] = np.flatnonzero(where >= 0)
    to = [torch.from_numpy(each).to(device) for each in (*alike, order)]
    return Rows(to[:-1], to[-1])


def arrange(micro: DataProto, *, packs: bool, wants_rows: bool) -> tuple[Layout, dict[str, Any]]:
    """Where the tokens of a micro-batch (columns input_ids, lengths) stand, and the arguments with
    which a model takes them. wants_rows: what keep_rows_apart says of the model; it alone can
    share."""
    ids, lengths = micro["input_ids"], micro["lengths"]
    found = layout(ids, lengths, shares=packs and wants_rows)
    if not packs:
        return found, padded(ids, found)
    inputs: dict[str, Any] = packed(ids, found)
    return found, inputs | ({"rows": found.rows} if wants_rows else {})


def packed(input_ids: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Arguments of a model for the tokens of a line, out of input_ids (b, T): int64 (1, N)."""
    positions = _columns(input_ids).expand_as(input_ids)
    return {
        "input_ids": input_ids[layout.taken][None],
        "position_ids": positions[layout.taken][None],
    }


def padded(input_ids: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Arguments of a model for the rows of input_ids (b, T), cut to the longest."""
    return {"input_ids": input_ids[:, : int(layout.lengths.max())]}


def line_states(hidden: Tensor, layout: Layout) -> Tensor:
    """The hidden states (N, H) of the line's tokens out of those that `packed` (1, N, H) or
    `padded` (b, T, H) arguments gave."""
    if len(hidden) != len(layout.lengths):
        return hidden[0]
    return hidden[layout.taken[:, : hidden.shape[1]]]


def attend_row_by_row(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a line, as transformers calls an attention function.

    query, key, value: (b, heads, N, size), fewer heads for key and value where they are shared.
    rows: those of the one line; None: each line is one row. A token sees the last sliding_window
    tokens, itself among them. Returns (b, N, heads, size).
    """
    assert attention_mask is None, "transformers makes no mask for a function it has none for"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = None
        if sliding_window is not None and sliding_window < q.shape[2]:
            at = torch.arange(q.shape[2], device=q.device)
            back = at[:, None] - at
            window = (back >= 0) & (back < sliding_window)
        found = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=window,
            dropout_p=dropout,
            is_causal=window is None,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return found.transpose(1, 2)

    if rows is None or not rows.alike:
        return attend(query, key, value), None
    # rows of one length, which share nothing, are used as they lie
    in_line = len(rows.alike) == 1 and rows.alike[0].numel() == query.shape[2]

    def of_rows(states: Tensor, places: Tensor) -> Tensor:
        table = states[0].transpose(0, 1)
        if in_line:
            return table.unflatten(0, places.shape).transpose(1, 2)
        # as index_select, whose gradient takes several times as long on a CPU
        return embedding(places, table.flatten(1)).unflatten(2, table.shape[1:]).transpose(1, 2)

    found = []
    for places in rows.alike:
        of_all = attend(*(of_rows(states, places) for states in (query, key, value)))
        found.append(of_all.flatten(2).flatten(0, 1))
    line = found[0] if in_line else embedding(rows.order, torch.cat(found))
    return line.unflatten(1, (-1, value.shape[3]))[None], None


def keep_rows_apart(model: Any) -> bool:
    """Have a model of transformers, on the CPU, compute packed rows each for itself; whether it
    wants the layout's rows for that.

    ValueError if it does not: layers that carry a state along the line (convolutions, recurrences),
    or masks made without position_ids. Two rows of 3 and 4 tokens are tried; attention that does
    not run on a CPU is believed.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    attention = model.config._attn_implementation
    wants_rows = attention == "sdpa" and kinds <= {"full_attention", "sliding_attention"}
    if wants_rows:
        models.attend_with(model, ROW_BY_ROW, attend_row_by_row)
    mixes = sorted(kinds - {"full_attention", "sliding_attention", "chunked_attention"})
    runs_here = attention in ("sdpa", "eager")
    if mixes or (runs_here and _error(model, wants_rows) > MOST_ERROR):
        raise ValueError(
            f"model_type {model.config.model_type} with attn_implementation {attention} does not "
            f"keep packed rows apart{f', for its layers {mixes}' if mixes else ''}; "
            "set training.packing: false"
        )
    return wants_rows


@torch.no_grad()
def _error(model: Any, wants_rows: bool) -> float:
    """Of packed hidden states, relative to padded ones."""
    ids = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]])
    rows = layout(ids, torch.tensor([3, 4]))
    body, _ = models.body_and_head(model)
    model.eval()
    inputs: dict[str, Any] = packed(ids, rows)
    if wants_rows:
        inputs["rows"] = rows.rows
    one_line, two_lines = (
        line_states(body(**given, use_cache=False).last_hidden_state, rows).float()
        for given in (inputs, padded(ids, rows))
    )
    return float((one_line - two_lines).norm() / two_lines.norm())


def log_probs(output: Output, input_ids: Tensor, temperature: float) -> Tensor:
    """float32 (b, T): log p(input_ids[t] | input_ids[:t]) at a temperature above 0; 0 at index 0
    and beyond a row's length."""
    hidden, wanted = _predicting(output)
    found = functional.log_probs(hidden, output.head, input_ids[wanted], temperature)
    return _spread(found, output)


def entropy(output: Output, temperature: float) -> Tensor:
    """float32 (b, T): entropy in nats of the distribution that predicts position t; 0 at index 0
    and beyond a row's length."""
    return _spread(functional.entropy(_predicting(output)[0], output.head, temperature), output)


def values(output: Output) -> Tensor:
    """float32 (b, T): index t is what a head of one number, computed in float32, makes of the
    tokens before t; 0 at index 0 and beyond a row's length."""
    hidden = _predicting(output)[0].float()
    return _spread((hidden @ output.head.weight.float().T).squeeze(-1), output)


def language_loss(output: Output, labels: Tensor) -> Tensor:
    """float32 scalar: sum of -log p(labels[t] | tokens before t) over labels (b, T) that are not
    -100; a label at index 0 has nothing before it and counts nowhere."""
    learnt = (labels != -100) & _has_one_before(output.layout)
    hidden = states_before(output, learnt)
    return functional.cross_entropy_sum(hidden, output.head, labels[learnt])


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
    layout = output.layout
    assert not (wanted & ~_has_one_before(layout)).any(), "a token that nothing predicts"
    return output.hidden.index_select(0, layout.places[:, :-1][wanted[:, 1:]])


def _has_one_before(layout: Layout) -> Tensor:
    """bool (b, T): the real tokens but each row's first."""
    at = torch.arange(layout.taken.shape[1], device=layout.lengths.device)
    return (at > 0) & (at < layout.lengths[:, None])


def _predicting(output: Output) -> tuple[Tensor, Tensor]:
    """The hidden states (n, H) that predict tokens of the line, once however many rows share them,
    and which these n are, bool (b, T)."""
    wanted = output.layout.taken & _has_one_before(output.layout)
    return states_before(output, wanted), wanted


def _spread(found: Tensor, output: Output) -> Tensor:
    """What was found of the n tokens that _predicting names, (n,), for each row that has them."""
    layout = output.layout
    predicted = _has_one_before(layout)
    of_line = predicted[layout.taken]
    line = found.new_zeros(len(of_line)).masked_scatter(of_line, found)
    of_rows = line.index_select(0, layout.places.flatten()).view_as(layout.places)
    return of_rows.masked_fill(~predicted, 0)


def _columns(input_ids: Tensor) -> Tensor:
    return torch.arange(input_ids.shape[1], device=input_ids.device)
