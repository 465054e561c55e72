"""The roles of distillation, and the way of the teacher's distributions to the student.

They go from teacher ranks to student ranks, never through the driver: `hand_over` runs on all of
them together. Of each token that is the likeliest entries and their log-probs; where both roles
have the same ranks and the same rows, nothing travels, and the student's rank is given the
teacher's hidden states and head, which say the whole distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roll_td.algorithms import functional
from roll_td.algorithms.choosing import call
from roll_td.algorithms.distillation import Pair, over_entries, softened
from roll_td.algorithms.functional import Head
from roll_td.config.base import BaseConfig
from roll_td.config.classes import import_object
from roll_td.metrics import Mean, Metric
from roll_td.protocol import DataProto
from roll_td.runtime.dispatch import Dispatch, register
from roll_td.runtime.together import Here
from roll_td.runtime.transport import Group
from roll_td.workers.base import ModelWorker


@dataclass(frozen=True)
class TopK:
    """What a teacher says of n tokens."""

    log_probs: Tensor
    """float32 (n, k): of its likeliest entries, of the softened distribution over all."""
    entries: Tensor
    """int32 (n, k)."""


@dataclass(frozen=True)
class Whole:
    """All that a teacher says of n tokens."""

    hidden: Tensor
    """(n, H)."""
    head: Head


Rows = dict[int, "TopK | Whole"]
"""By the number of a row in the batch, of its tokens that count."""


class DistillWorker(ModelWorker):
    """A model that knows which of its logits are tokens."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: BaseConfig) -> None:
        """Also take the settings of the comparison from the pipeline's config."""
        super().initialize(pipeline_config)
        self.config: Any = pipeline_config
        self.rows: Rows = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_vocabulary(self, tokens: int) -> None:
        """Tell how many entries of the logits are tokens: what a model has beyond is padding, and
        counts nowhere. ValueError for a model that has fewer."""
        width = self.strategy.model.get_output_embeddings().weight.shape[0]
        if width < tokens:
            raise ValueError(
                f"role {self.context.role}: the model has logits for {width} tokens and the "
                f"tokenizer has {tokens}; they do not belong together"
            )
        self.tokens = tokens

    @property
    def top_k(self) -> int:
        """Entries of a token that are compared."""
        return min(self.config.top_k or self.tokens, self.tokens)

    def wanted(self, data: DataProto) -> Tensor:
        """Tokens that count, bool (b, T)."""
        return counted(data, self.config.learn_from)


class TeacherWorker(DistillWorker):
    """Says what it thinks of each token."""

    head: Head | None = None
    """Of the batch that it looks at, for all of its rows."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def look(self, data: DataProto) -> None:
        """Have ready what this rank's rows get from here. Columns: input_ids, lengths, labels, and
        `row` int64 (B), their numbers in the batch."""
        self.rows, self.head = {}, None
        self.strategy.forward_step(data.to(self.device), self._keep)

    def _keep(self, micro: DataProto, output: Any) -> Mapping[str, Tensor]:
        wanted = self.wanted(micro)
        made = self._whole if self.config.top_k is None else self._top
        found: Iterable[TopK | Whole] = made(output, wanted)
        for row, part in zip(micro["row"].tolist(), found, strict=True):
            self.rows[row] = part
        return {"row": micro["row"]}  # a strategy wants a column

    def _top(self, output: Any, wanted: Tensor) -> Iterable[TopK]:
        temperature, k = self.config.temperature, self.top_k

        def likeliest(logits: Tensor, _: slice) -> Tensor:
            found = (logits[:, : self.tokens] / temperature).log_softmax(-1).topk(k)
            return torch.stack([found.values, found.indices.float()], 1)  # exact below 2^24

        values, entries = self.strategy.op_map_logits(output, wanted, likeliest).unbind(1)
        sizes = wanted.sum(-1).tolist()
        return map(TopK, values.split(sizes), entries.int().split(sizes))

    def _whole(self, output: Any, wanted: Tensor) -> Iterable[Whole]:
        if self.head is None:
            self.head = self.strategy.op_keep_head(output)
        hidden = self.strategy.op_compute_states(output, wanted)
        return (Whole(part, self.head) for part in hidden.split(wanted.sum(-1).tolist()))


class StudentWorker(DistillWorker):
    """Learns what was handed over."""

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def train_step(self, data: DataProto) -> DataProto:
        """One optimiser step; returns metrics, no rows. Columns as TeacherWorker.look has them, of
        rows that were handed over. The plan's denominator `tokens` counts those that count."""
        metrics = self.strategy.train_step(data.to(self.device), self.loss_func)
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def val_step(self, data: DataProto) -> DataProto:
        """Of each row, summed over its tokens that count: `divergence` and `cross_entropy` float32
        (B); and how many these are, `tokens` int64 (B). Nothing is learnt."""
        return self.strategy.forward_step(data.to(self.device), self.row_losses).to("cpu")

    def loss_func(self, data: DataProto, output_tensor: Any) -> tuple[Tensor, dict[str, Metric]]:
        """The micro-batch's part of the mean loss of a token."""
        assert data.plan is not None, "a strategy gives each micro-batch its plan"
        share, wanted = self.config.cross_entropy_share, self.wanted(data)
        count = int(wanted.sum())
        divergence = self.divergences(data, output_tensor, wanted).sum()
        metrics: dict[str, Metric] = {"divergence": _mean(divergence, count)}
        loss = (1 - share) * divergence
        if share:
            labels = torch.where(wanted, data["input_ids"], -100)
            cross_entropy = self.strategy.op_compute_language_loss(output_tensor, labels)
            metrics["cross_entropy"] = _mean(cross_entropy, count)
            loss = loss + share * cross_entropy
        return loss / max(data.plan.denominators["tokens"], 1.0), metrics

    def row_losses(self, data: DataProto, output_tensor: Any) -> dict[str, Tensor]:
        """Columns of val_step for the rows of a micro-batch."""
        wanted = self.wanted(data)
        log_probs = self.strategy.op_compute_log_probs(output_tensor, data["input_ids"])
        of_tokens = self.divergences(data, output_tensor, wanted)
        sums = torch.zeros(wanted.shape, device=wanted.device).masked_scatter(wanted, of_tokens)
        cross_entropy = -torch.where(wanted, log_probs, 0.0).sum(-1)
        return {
            "divergence": sums.sum(-1),
            "cross_entropy": cross_entropy,
            "tokens": wanted.sum(-1),
        }

    def divergences(self, data: DataProto, output: Any, wanted: Tensor) -> Tensor:
        """temperature² · divergence of each of the n tokens, (n,), row after row."""
        config, parts = self.config, [self.rows[row] for row in data["row"].tolist()]
        function, settings = import_object(config.divergence.path), config.divergence.arguments
        compare = compared(parts, self.tokens, config.temperature, config.renormalise)

        def of_chunk(logits: Tensor, rows: slice) -> Tensor:
            return call(function, compare(logits, rows)._asdict(), settings)

        of_tokens: Tensor = self.strategy.op_map_logits(output, wanted, of_chunk)
        return config.temperature**2 * of_tokens


def compared(
    parts: Sequence[TopK | Whole], tokens: int, temperature: float, renormalise: bool
) -> Callable[[Tensor, slice], Pair]:
    """What makes of logits of the student, (m, V), and which of all tokens of `parts` they are for,
    what a divergence compares."""
    if isinstance(parts[0], Whole):
        whole = [part for part in parts if isinstance(part, Whole)]
        hidden, head = torch.cat([part.hidden for part in whole]), whole[0].head

        def over_all(logits: Tensor, rows: slice) -> Pair:
            teacher = functional.logits(hidden[rows], head)[:, :tokens]
            return softened(logits[:, :tokens], teacher, temperature=temperature)

        return over_all
    top = [part for part in parts if isinstance(part, TopK)]
    log_probs = torch.cat([part.log_probs for part in top])
    entries = torch.cat([part.entries for part in top]).long()

    def over_top(logits: Tensor, rows: slice) -> Pair:
        student = (logits[:, :tokens] / temperature).log_softmax(-1)
        return over_entries(log_probs[rows], student, entries[rows], renormalise=renormalise)

    return over_top


def counted(data: DataProto, learn_from: str) -> Tensor:
    """The tokens that count, bool (B, T): those of labels, or all real ones but a row's first,
    which nothing predicts."""
    at = torch.arange(data["input_ids"].shape[1], device=data["lengths"].device)
    predicted = (at > 0) & (at < data["lengths"][:, None])
    return predicted & (data["labels"] != -100) if learn_from == "answers" else predicted


def _mean(total: Tensor, count: int) -> Mean:
    return Mean(total.item() / max(count, 1), count)


# On the ranks of both roles together


class Move(NamedTuple):
    """Rows that go from one rank to another, or stay on one."""

    source: int
    """Global rank of the teacher's worker that looked at them."""
    target: int
    """Global rank of a student's worker."""
    rows: tuple[int, ...]
    """Their numbers in the batch."""


def hand_over(
    here: Here,
    teacher: str,
    student: str,
    moves: Sequence[Move],
    counts: Mapping[int, int],
    group: Group,
) -> int:
    """Give this rank's student what the teachers have ready for its rows; the bytes that came from
    other ranks. Moves are in the same order on all ranks; counts: the tokens of each row that
    count. Without moves the student takes what its own rank's teacher has."""
    giver: Any = here.workers.get(teacher)
    taker: Any = here.workers.get(student)
    if not moves:
        taker.rows, giver.rows = giver.rows, {}
        return 0
    works: list[Any] = []
    came: list[tuple[Move, Tensor, Tensor]] = []
    k = next(iter(here.workers.values())).top_k
    for number, move in enumerate(moves):
        if move.target == here.rank:
            total = sum(counts[row] for row in move.rows)
            log_probs, entries = torch.empty(total, k), torch.empty(total, k, dtype=torch.int32)
            for tag, into in enumerate((log_probs, entries)):
                flat = into.view(-1).view(torch.uint8)
                works.append(here.transport.irecv(flat, move.source, group, 2 * number + tag))
            came.append((move, log_probs, entries))
    for number, move in enumerate(moves):
        if move.source == here.rank:
            parts = [giver.rows[row] for row in move.rows]
            for tag, name in enumerate(("log_probs", "entries")):
                flat = torch.cat([getattr(part, name) for part in parts]).cpu()
                flat = flat.view(-1).view(torch.uint8)
                works.append(here.transport.isend(flat, move.target, group, 2 * number + tag))
    for work in works:
        work.wait()
    if giver is not None:
        giver.rows = {}
    if taker is not None:
        taker.rows = dict(_unpacked(came, counts, taker.device))
    return sum(8 * len(values) * k for move, values, _ in came if move.source != here.rank)


def _unpacked(
    came: Iterable[tuple[Move, Tensor, Tensor]], counts: Mapping[int, int], device: torch.device
) -> Iterator[tuple[int, TopK]]:
    for move, log_probs, entries in came:
        sizes = [counts[row] for row in move.rows]
        parts = log_probs.to(device).split(sizes), entries.to(device).split(sizes)
        yield from zip(move.rows, map(TopK, *parts), strict=True)
