"""What a student learns of a token, against numbers written down; what teachers have ready."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from roll_td.algorithms.functional import Head
from roll_td.config.base import WorkerConfig
from roll_td.config.functions import DivergenceArgs
from roll_td.plan import default_plan, local
from roll_td.protocol import DataProto
from roll_td.strategies import packing
from roll_td.strategies.operations import Operations
from roll_td.workers.distill import StudentWorker, TeacherWorker, Whole, counted

EYE = torch.eye(4)
PAD = 9.0
"""Logit of an entry that is no token: it would matter much if it were looked at."""


def logits_of(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


class Strategy(Operations):
    """Hidden states that are the logits themselves."""

    model = SimpleNamespace(get_output_embeddings=lambda: SimpleNamespace(weight=torch.zeros(4, 4)))

    def __init__(self, states: Tensor) -> None:
        self.states = states

    def forward_step(self, data: DataProto, columns: Any) -> DataProto:
        return DataProto(dict(columns(data, output(self.states, data))))


def output(states: Tensor, data: DataProto) -> packing.Output:
    return packing.Output(states, Head(EYE), packing.layout(data["input_ids"], data["lengths"]))


def batch(labels: list[list[int]] | None = None, tokens: float = 2.0) -> DataProto:
    """Two rows of 2 tokens, of which the second is predicted by the state of the first."""
    labels = [[-100, 0], [-100, 1]] if labels is None else labels
    data = DataProto(
        {
            "input_ids": torch.tensor([[1, 0], [0, 1]]),
            "lengths": torch.tensor([2, 2]),
            "labels": torch.tensor(labels),
            "row": torch.tensor([5, 8]),
        }
    )
    plan = local(default_plan(2, 1, None, {"tokens": tokens}), 0)
    data.plan = plan  # type: ignore[assignment]
    return data


def states(first: list[float], second: list[float]) -> Tensor:
    """Those that predict: the other ones predict nothing."""
    none = [0.0] * 4
    rows = [[*row, *[PAD] * (4 - len(row))] for row in (first, second)]
    return torch.tensor([rows[0], none, rows[1], none])


def worker(cls: Any, given: Tensor, tokens: int, **settings: Any) -> Any:
    made = cls(WorkerConfig(world_size=1))
    made.strategy = Strategy(given)
    defaults = {
        "divergence": DivergenceArgs(),
        "temperature": 1.0,
        "top_k": None,
        "renormalise": True,
        "learn_from": "answers",
        "cross_entropy_share": 0.0,
    }
    made.config, made.rows = SimpleNamespace(**(defaults | settings)), {}
    made.context = SimpleNamespace(role="student")
    made.set_vocabulary(tokens)
    return made


def loss(teacher: list[float], student: list[float], top_k: int | None = None, **settings: Any):
    """The student's loss and the gradient of the state that predicts the first token."""
    settings |= {"top_k": top_k}
    looks = worker(TeacherWorker, states(teacher, teacher), len(teacher), **settings)
    looks.look(batch())
    own = states(student, student).requires_grad_()
    learns = worker(StudentWorker, own, len(teacher), **settings)
    learns.rows = looks.rows
    value, metrics = learns.loss_func(batch(), output(own, batch()))
    value.backward()
    assert own.grad is not None and not own.grad[1].any()
    assert metrics["divergence"].count == 2
    return value.item(), own.grad[0]


# N23 and J05: teacher (.9, .1), student (.6, .4)
@pytest.mark.parametrize("top_k", [None, 2, 50])
@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("forward_kl", {}, 0.226289),
        ("reverse_kl", {}, 0.311239),
        ("jsd", {"beta": 0.5}, 0.063288),
        ("skewed_forward_kl", {"skew": 0.0}, 0.226289),
        ("skewed_reverse_kl", {"skew": 0.0}, 0.311239),
        # the likeliest entry makes up .5 of |p - q|
        ("adaptive_kl", {"head": 0.5}, (0.226289 + 0.311239) / 2),
    ],
)
def test_n23_j05_j01_each_divergence(top_k, name, settings, wanted):
    divergence = DivergenceArgs(name, settings)
    value, grad = loss(logits_of(0.9, 0.1), logits_of(0.6, 0.4), top_k, divergence=divergence)
    assert value == pytest.approx(wanted, abs=2e-6)
    assert grad[2:].eq(0).all(), "J01: what is no token counts nowhere"
    if name == "reverse_kl":
        assert grad[:2].tolist() == pytest.approx([-0.430022 / 2, 0.430022 / 2], abs=1e-6)


def test_n23_top_2_of_3_and_temperature():
    three = logits_of(0.7, 0.2, 0.1), logits_of(0.5, 0.3, 0.2)
    assert loss(*three, 2, renormalise=False)[0] == pytest.approx(0.154438, abs=1e-6)
    assert loss(*three, 2, renormalise=True)[0] == pytest.approx(0.053814, abs=1e-6)
    for top_k in (None, 2):
        found, _ = loss([2.0, 0.0], [1.0, 0.0], top_k, temperature=2.0)
        assert found == pytest.approx(0.105378, abs=1e-6)


def test_mixed_with_cross_entropy():
    value, _ = loss(logits_of(0.9, 0.1), logits_of(0.6, 0.4), cross_entropy_share=0.25)
    # the padding's logits count in the cross-entropy of the data, as in training without a teacher
    total = 0.6 + 0.4 + 2 * math.exp(PAD)
    of_data = -(math.log(0.6 / total) + math.log(0.4 / total)) / 2
    assert value == pytest.approx(0.75 * 0.226289 + 0.25 * of_data, rel=1e-5)


def test_answers_or_text():
    data = batch(labels=[[-100, -100], [-100, 1]])
    assert counted(data, "answers").tolist() == [[False, False], [False, True]]
    assert counted(data, "text").tolist() == [[False, True], [False, True]]
    assert counted(data[:1], "answers").sum() == 0


def test_rows_of_validation():
    same, other = logits_of(0.9, 0.1, 1e-9, 1e-9), logits_of(0.6, 0.4, 1e-9, 1e-9)
    looks = worker(TeacherWorker, states(same, same), 4)
    looks.look(batch())
    learns = worker(StudentWorker, states(other, same), 4)
    learns.rows = looks.rows
    rows = learns.val_step(batch())
    assert rows["divergence"].tolist() == pytest.approx([0.226289, 0.0], abs=1e-6)
    assert rows["cross_entropy"].tolist() == pytest.approx([-math.log(0.6), -math.log(0.1)])
    assert rows["tokens"].tolist() == [1, 1]


def test_what_a_teacher_has_ready():
    given = states(logits_of(0.7, 0.2, 0.1), logits_of(0.1, 0.3, 0.6))
    rows = worker(TeacherWorker, given, 3, top_k=2)
    rows.look(batch())
    assert rows.rows.keys() == {5, 8}
    assert rows.rows[8].entries.tolist() == [[2, 1]] and rows.rows[8].entries.dtype == torch.int32
    assert rows.rows[8].log_probs[0].tolist() == pytest.approx(logits_of(0.6, 0.3))
    whole = worker(TeacherWorker, given, 3)
    whole.look(batch())
    assert isinstance(whole.rows[5], Whole) and torch.equal(whole.rows[5].hidden, given[:1])
    assert whole.rows[5].head.weight.data_ptr() != EYE.data_ptr(), "FSDP frees what was gathered"
    rows.look(batch()[:0])
    assert rows.rows == {}, "the rows of one batch"


def test_j01_a_model_with_fewer_logits_than_tokens_is_refused():
    with pytest.raises(ValueError, match=r"logits for 4 tokens and the tokenizer has 5"):
        worker(StudentWorker, states([0.0], [0.0]), 5)
