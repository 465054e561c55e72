"""Answers of one prompt: from its row in the data to rows of a batch; how old their tokens are."""

from __future__ import annotations

import torch

from roll_td.columns import object_column
from roll_td.metrics import Max, Mean, Metric
from roll_td.protocol import DataProto
from roll_td.rollout.routing import Group
from roll_td.strategies.batches import with_responses
from roll_td.strategies.engine import Answer


def new_group(prompt: DataProto, samples: int, batch: int, lengths: Lengths) -> Group:
    """A group whose answers have not begun; `prompt` is one row with input_ids, lengths and
    group_id, which with a sample's number says its random numbers, as in
    GenerationWorker.generate. ValueError if it is empty."""
    number, length = int(prompt["group_id"][0]), int(prompt["lengths"][0])
    if not length:
        raise ValueError(f"prompt {number} is empty; give it a token to start from")
    tokens = prompt["input_ids"][0, :length].tolist()
    ids = range(number * samples, (number + 1) * samples)
    answers = {n: Answer(sample_id=n, prompt=tokens) for n in ids}
    return Group(number, answers, batch, lengths.expected(tokens))


def rows_of(prompt: DataProto, group: Group) -> DataProto:
    """A row for each answer, with the columns that GenerationWorker.generate gives; each token has
    the version of the weights that made it."""
    answers = [group.answers[n] for n in sorted(group.answers)]
    rows = with_responses(prompt, answers, 0)
    versions = [version for answer in answers for version in answer.versions]
    rows["weight_version"][rows["response_mask"]] = torch.tensor(versions, dtype=torch.int32)
    rows.update(
        {
            "sample_id": torch.tensor([answer.sample_id for answer in answers]),
            "response": object_column("response", [answer.text for answer in answers]),
        }
    )
    return rows


def is_stale(answer: Answer, oldest: int) -> bool:
    """Whether weights of an earlier version than `oldest` made some token of it."""
    return min(answer.versions, default=oldest) < oldest


def begin_anew(group: Group, sample_ids: list[int]) -> None:
    """Take from these answers what they have."""
    for n in sample_ids:
        group.answers[n] = Answer(sample_id=n, prompt=group.answers[n].prompt)


def staleness(batch: DataProto, version: int) -> dict[str, Metric]:
    """Steps that the weights which made the answers are behind this version: means over tokens
    and, of the oldest token of each, over answers; the largest."""
    mask = batch["response_mask"]
    behind = (version - batch["weight_version"]) * mask
    oldest, tokens = behind.amax(-1), int(mask.sum())
    return {
        "staleness/token": Mean(behind.sum().item() / max(tokens, 1), tokens),
        "staleness/sample": Mean(oldest.double().mean().item(), len(oldest)),
        "staleness/max": Max(oldest.max().item()),
    }


class Lengths:
    """How long answers were: to the same prompt when it came last, else to all prompts so far."""

    def __init__(self) -> None:
        self._tokens: dict[int, float] = {}
        self._sum = self._count = 0

    def expected(self, prompt: list[int]) -> float:
        """Tokens of an answer to come."""
        mean = self._sum / self._count if self._count else 0.0
        return self._tokens.get(hash(tuple(prompt)), mean)

    def observe(self, group: Group) -> None:
        """Remember its longest answer, which is what a batch waits for."""
        counts = [len(answer.tokens) for answer in group.answers.values()]
        prompt = next(iter(group.answers.values())).prompt
        self._tokens[hash(tuple(prompt))] = max(counts)
        self._sum, self._count = self._sum + max(counts), self._count + 1
