"""What goes from which teacher to which student, and whose tokens are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_td.config.base import WorkerConfig
from roll_td.pipelines.distill import common_vocabulary, moves_between
from roll_td.placement import planned_places
from roll_td.plan import StepPlan, default_plan, local
from roll_td.runtime.cluster import Cluster, ResourceManager
from roll_td.runtime.inprocess import LocalJob
from roll_td.runtime.together import call_together, homes
from roll_td.runtime.transport import Group
from roll_td.runtime.worker import Worker
from roll_td.workers.distill import Move, TopK

COUNTS = {0: 2, 1: 1, 2: 3, 3: 1, 4: 2}


class Giver(Worker):
    """Row r has COUNTS[r] tokens, whose entries say the row and the token."""

    top_k = 2

    def __init__(self, worker_config: WorkerConfig) -> None:
        super().__init__(worker_config)
        self.rows: dict[int, TopK] = {row: said(row) for row in COUNTS}


def said(row: int) -> TopK:
    entries = torch.tensor([[100 * row + t, t] for t in range(COUNTS[row])], dtype=torch.int32)
    return TopK(-entries.float() / 7, entries)


def rows_here(here: Any, student: str) -> dict[int, tuple[list[Any], list[Any]]]:
    """What a student's rank has got."""
    taker = here.workers.get(student)
    rows = {} if taker is None else taker.rows
    return {r: (part.entries.tolist(), part.log_probs.tolist()) for r, part in rows.items()}


@pytest.mark.parametrize(
    ("teacher", "student"),
    [([0, 1, 2], [2, 3]), ([0], [1, 2, 3]), ([3, 2], [2, 3]), ([1], [1]), ([0, 1], [2])],
)
def test_each_student_gets_its_rows_and_its_fillers(teacher, student) -> None:
    with LocalJob(planned_places(1, 4, 1), 1, 4):
        clusters = [
            Cluster(
                name,
                f"{__name__}.Giver",
                ResourceManager(1, 4),
                WorkerConfig(name=name, device_mapping=devices),
            )
            for name, devices in (("teacher", teacher), ("student", student))
        ]
        given, taken = clusters
        seen = default_plan(5, len(teacher), 2, {})
        learnt = default_plan(5, len(student), 1, {})
        moves = moves_between(given, seen, taken, learnt)
        received = call_together(
            clusters,
            "roll_td.workers.distill.hand_over",
            teacher="teacher",
            student="student",
            moves=moves,
            counts=COUNTS,
            group=Group(homes(clusters), 60.0),
        )
        found = call_together(clusters, f"{__name__}.rows_here", student="student")
    by_rank = dict(zip(homes(clusters), zip(found, received, strict=True), strict=True))
    owner = {
        row: rank for dp, rank in enumerate(teacher) for micro in seen.real(dp) for row in micro
    }
    for dp, rank in enumerate(student):
        rows, nbytes = by_rank[rank]
        wanted = local(learnt, dp).rows
        assert rows == {r: (said(r).entries.tolist(), said(r).log_probs.tolist()) for r in wanted}
        # of each token 2 entries of 8 bytes, and only from other ranks
        assert nbytes == sum(COUNTS[r] * 16 for r in wanted if owner[r] != rank)
    for rank in set(teacher) - set(student):
        assert by_rank[rank] == ({}, 0), "and teachers keep nothing"


def test_moves_written_out() -> None:
    infos = [SimpleNamespace(dp_rank=d, is_collecting=True) for d in range(3)]

    def cluster(*ranks: int) -> Any:
        seats = [SimpleNamespace(ranks=(rank,)) for rank in ranks]
        placement = SimpleNamespace(seats=seats)
        return SimpleNamespace(placement=placement, rank_info=lambda worker: infos[worker])

    seen = StepPlan((((0, 3),), ((1, 2),)), {})
    learnt = StepPlan((((0,), (1,)), ((2,), (2,)), ((3,), (0,))), {}, (0, 1, 1))
    moves = moves_between(cluster(4, 5), seen, cluster(6, 7, 4), learnt)
    assert moves == [
        Move(4, 6, (0,)), Move(5, 6, (1,)), Move(5, 7, (2,)), Move(4, 4, (3, 0)),
    ]  # fmt: skip


def tokenizer(*tokens: str, **more: int) -> Any:
    vocabulary = {token: number for number, token in enumerate(tokens)} | more
    return SimpleNamespace(get_vocab=lambda: vocabulary)


def test_j01_a_vocabulary_is_compared_token_by_token() -> None:
    assert common_vocabulary(tokenizer("a", "b"), tokenizer("a", "b")) == 2
    holes = tokenizer("a", z=7)
    assert common_vocabulary(holes, holes) == 8, "numbers may be left out"
    with pytest.raises(ValueError, match=r"2 tokens differ .* 'b' \(1, 2\), 'c' \(2, 1\)"):
        common_vocabulary(tokenizer("a", "b", "c"), tokenizer("a", "c", "b"))
    with pytest.raises(ValueError, match=r"student \(2 tokens\) and teacher \(1\): 'b' \(1, none"):
        common_vocabulary(tokenizer("a", "b"), tokenizer("a"))
