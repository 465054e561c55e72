"""Rows into a strategy and out of it: micro-batches and their columns, responses to prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roll_td.columns import TOKEN_COLUMNS, object_column, pad_value
from roll_td.plan import LocalPlan, default_plan, local
from roll_td.protocol import DataProto


def by_micro_batch(
    batch: DataProto,
    micro_batch_size: int,
    device: torch.device,
    columns: Callable[[DataProto], Mapping[str, Tensor]],
) -> DataProto:
    """The columns of each micro-batch, rows in their order, where ranks do not step together.

    Micro-batches are those of batch.plan, its fillers left out, else of micro_batch_size rows; they
    are moved to `device`. No rows give no columns.
    """
    plan = (
        batch.plan
        if isinstance(batch.plan, LocalPlan)
        else local(default_plan(len(batch), 1, micro_batch_size, {}), 0)
    )
    real = plan.micro_batches[: len(plan.micro_batches) - plan.fillers]
    parts = [dict(columns(batch[list(rows)].to(device))) for rows in real]
    return DataProto.concat(list(map(DataProto.from_single_dict, parts))) if parts else DataProto()


@dataclass
class Response:
    """What was sampled after one prompt."""

    tokens: list[int] = field(default_factory=list)
    """As sampled, the end token included."""
    log_probs: list[float] = field(default_factory=list)
    """Of each token, in the distribution it was drawn from."""
    finish_reason: str = ""
    """stop or length; empty while it is being sampled."""


def with_responses(
    batch: DataProto, responses: Sequence[Response], weight_version: int
) -> DataProto:
    """The rows of `batch`, each as often as there are responses to it, with these appended.

    Rows are right-padded prompts: input_ids int64 (B, T), lengths int64 (B); responses are in row
    order, n for each. Returns B · n rows with input_ids, lengths, response_mask, infer_log_probs,
    weight_version (int32 (B, T): 0 where no response is, as no weights made a prompt) and
    finish_reason of the result; other columns are repeated, and padded where they go by token.
    """
    rows = batch.repeat(len(responses) // max(len(batch), 1))
    ids, lengths = rows["input_ids"], rows["lengths"]
    ends = [n + len(r.tokens) for n, r in zip(lengths.tolist(), responses, strict=True)]
    extra = max([0, *(end - ids.shape[1] for end in ends)])
    for name in TOKEN_COLUMNS & set(rows.keys()):
        padding = [0, 0] * (rows[name].ndim - 2) + [0, extra]
        rows.update({name: torch.nn.functional.pad(rows[name], padding, value=pad_value(name))})
    ids = rows["input_ids"]
    new_lengths, at = torch.tensor(ends, dtype=lengths.dtype), torch.arange(ids.shape[1])
    mask = (at >= lengths[:, None]) & (at < new_lengths[:, None])
    log_probs = torch.zeros_like(ids, dtype=torch.float32)
    # all at once, row after row: a write for each row takes three times as long
    ids[mask] = torch.tensor([t for r in responses for t in r.tokens], dtype=ids.dtype)
    log_probs[mask] = torch.tensor([p for r in responses for p in r.log_probs])
    rows.update(
        {
            "input_ids": ids,
            "lengths": new_lengths,
            "response_mask": mask,
            "infer_log_probs": log_probs,
            "weight_version": mask.int() * weight_version,
            "finish_reason": object_column("finish_reason", [r.finish_reason for r in responses]),
        }
    )
    return rows
