"""The loss of pairs, against N21 and against sums written down by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from roll_td.config.base import WorkerConfig
from roll_td.config.classes import import_object
from roll_td.config.functions import PreferenceLossArgs
from roll_td.plan import default_plan, local
from roll_td.protocol import DataProto
from roll_td.workers.dpo import DPOWorker

# N21, pair 7: policy -10/-12, reference -11/-11.5, lengths 2 and 4, with a prompt of 3 tokens on
# which both sides have log-prob -1 that must not count; pair 3: the same the other way round
POLICY = [
    [-12 / 4] * 4,
    [-12 / 4] * 4,
    [-5.0, -5.0],
    [-5.0, -5.0],
]
CHOSEN, GROUPS, WIDTH = [False, True, True, False], [7, 3, 7, 3], 8


class Table:
    """A strategy whose log-probs are given."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def op_compute_log_probs(self, _: Any, ids: torch.Tensor) -> torch.Tensor:
        return self.table


def table() -> torch.Tensor:
    rows = [[0.0, -1, -1, *answer, *[9.0] * (WIDTH - 3 - len(answer))] for answer in POLICY]
    return torch.tensor(rows).requires_grad_()


def batch(over: str = "sum", pairs: float = 4.0, reference: bool = True) -> DataProto:
    at = torch.arange(WIDTH)
    lengths = torch.tensor([3 + len(answer) for answer in POLICY])
    real = (at >= 3) & (at < lengths[:, None])
    data = DataProto(
        {
            "input_ids": torch.ones(4, WIDTH, dtype=torch.int64),
            "labels": torch.where(real, 1, -100),
            "lengths": lengths,
            "is_chosen": torch.tensor(CHOSEN),
            "group_id": torch.tensor(GROUPS),
        }
    )
    if reference:
        values = torch.tensor([-11.5, -11.5, -11.0, -11.0])
        counts = torch.tensor([4, 4, 2, 2]) if over == "mean" else 1
        data.update({"reference": values / counts})
    plan = local(default_plan(4, 1, None, {"pairs": pairs}), 0)
    data.plan = plan  # type: ignore[assignment]
    return data


def run(
    name: str, over: str = "sum", reference: bool = True, **settings: Any
) -> tuple[float, torch.Tensor, Any]:
    worker, own = DPOWorker(WorkerConfig(world_size=1)), table()
    worker.over, worker.strategy = over, Table(own)
    worker.loss = PreferenceLossArgs(name, settings)
    worker.pair_loss = import_object(worker.loss.path)
    loss, metrics = worker.loss_func(batch(over, reference=reference), None)
    loss.backward()
    assert own.grad is not None
    return loss.item(), own.grad, metrics


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


SMOOTH = {"label_smoothing": 0.1}


# pair 7 as in N21, pair 3 by hand with its margin -1.5, or -.625
@pytest.mark.parametrize(
    ("name", "over", "settings", "first", "second"),
    [
        ("sigmoid", "sum", {}, 0.620957, softplus(0.15)),
        ("sigmoid", "sum", SMOOTH, 0.635957, 0.9 * softplus(0.15) + 0.1 * softplus(-0.15)),
        ("hinge", "sum", {}, 0.85, 1.15),
        ("ipo", "sum", {}, 12.25, (-1.5 - 5) ** 2),
        ("ipo", "mean", {}, 19.140625, (-0.625 - 5) ** 2),
    ],
)  # fmt: skip
def test_n21_i01_i03(name, over, settings, first, second):
    loss, grad, metrics = run(name, over, **settings)
    assert loss == pytest.approx((first + second) / 4, rel=1e-6), "of 4 pairs in the whole batch"
    assert grad[:, :3].eq(0).all(), "I01: prompts of both sides are masked"
    assert grad[2, 5:].eq(0).all() and grad[0, 7:].eq(0).all() and grad[:, 3:5].ne(0).all()
    assert metrics["accuracy"] == 0.5 and metrics["accuracy"].count == 2
    assert metrics["reward_margin"] == pytest.approx(0.0, abs=1e-6)
    # N21: rewards .1 and -.05 of pair 7; of pair 3 the chosen one is what was rejected
    if over == "sum":
        assert metrics["chosen_reward"] == pytest.approx((0.1 - 0.05) / 2)
        assert metrics["rejected_reward"] == pytest.approx((0.1 - 0.05) / 2)


def test_reference_free_compares_with_nothing():
    loss, _, _ = run("sigmoid", reference=False)
    # margins 2 and -2
    assert loss == pytest.approx((softplus(-0.2) + softplus(0.2)) / 4, rel=1e-6)


def test_i05_policy_equal_to_reference_has_loss_ln_2_and_slope_half_beta():
    worker, own = DPOWorker(WorkerConfig(world_size=1)), table()
    worker.over, worker.strategy = "sum", Table(own)
    worker.loss = PreferenceLossArgs("sigmoid", {"beta": 0.3})
    worker.pair_loss = import_object(worker.loss.path)
    data = batch(pairs=2.0)
    data.update({"reference": worker.of_answers(data, None).detach()})
    loss, metrics = worker.loss_func(data, None)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), rel=1e-6) and metrics["reward_margin"] == 0
    assert own.grad is not None
    assert own.grad[1, 3].item() == pytest.approx(-0.15 / 2) == -own.grad[0, 3].item()


def test_a_loss_of_the_users_own():
    loss, _, metrics = run(f"{__name__}.own", by=2.0)
    assert loss == pytest.approx(2 * (1.5 - 1.5) / 4 + 2 * 2 / 4)
    assert metrics["chosen_reward"] == pytest.approx(0.25), "without a beta it counts as 1"


def own(chosen, rejected, *, by):
    """For the test above."""
    return by * (chosen - rejected + 1)


def test_a_pair_that_was_torn_apart_is_our_own_mistake():
    worker = DPOWorker(WorkerConfig(world_size=1))
    worker.over, worker.strategy = "sum", Table(table()[:3])
    worker.loss = PreferenceLossArgs("sigmoid")
    worker.pair_loss = import_object(worker.loss.path)
    data = batch()
    torn = data[:3]
    torn.plan = data.plan
    with pytest.raises(AssertionError, match="keeps both rows"):
        worker.loss_func(torn, None)
