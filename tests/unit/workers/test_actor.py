"""The loss of a micro-batch, against the same written down in float64 token by token."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_td.config.algorithm import AlgorithmConfig
from roll_td.config.base import WorkerConfig
from roll_td.config.classes import import_object
from roll_td.config.schema import read
from roll_td.plan import default_plan, local
from roll_td.protocol import DataProto
from roll_td.workers.actor import ActorWorker

ROWS, WIDTH = 3, 5
DENOMINATORS = {"tokens": 11.0, "rows": 4.0, "constant": 64.0}


class Strategy:
    """Log-probs and entropies as given, whatever the tokens are."""

    def __init__(self, log_probs: torch.Tensor, entropy: torch.Tensor) -> None:
        self.log_probs, self.entropy, self.temperatures = log_probs, entropy, set[float]()

    def op_compute_log_probs(self, _: Any, ids: torch.Tensor, temperature: float) -> torch.Tensor:
        self.temperatures.add(temperature)
        return self.log_probs

    def op_compute_entropy(self, _: Any, temperature: float) -> torch.Tensor:
        self.temperatures.add(temperature)
        return self.entropy


def batch(*without: str) -> DataProto:
    random = torch.Generator().manual_seed(5)

    def near(value: float) -> torch.Tensor:
        return value + 0.4 * torch.randn(ROWS, WIDTH, generator=random)

    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]]).bool()
    columns = {
        "input_ids": torch.ones(ROWS, WIDTH, dtype=torch.int64),
        "lengths": torch.full((ROWS,), WIDTH),
        "response_mask": mask,
        "old_log_probs": near(-1),
        "infer_log_probs": near(-1),
        "ref_log_probs": near(-1),
        "advantages": near(0),
    }
    data = DataProto({name: column for name, column in columns.items() if name not in without})
    data.meta_info = {"temperature": 0.7, "kl_coefficient": 0.3}
    data.plan = local(default_plan(ROWS, 1, None, DENOMINATORS), 0)  # type: ignore[assignment]
    return data


def run(data: DataProto, **settings: Any) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient of the log-probs, metrics."""
    algorithm = read(AlgorithmConfig, settings).value
    assert algorithm is not None
    random = torch.Generator().manual_seed(6)
    log_probs = (-1 + 0.4 * torch.randn(ROWS, WIDTH, generator=random)).requires_grad_()
    worker = ActorWorker(WorkerConfig(world_size=1))
    worker.algorithm = algorithm
    worker.policy_loss = import_object(algorithm.policy_loss.path)
    worker.strategy = Strategy(log_probs, 2 * log_probs.exp())
    loss, metrics = worker.loss_func(data, None)
    loss.backward()
    assert worker.strategy.temperatures == {0.7}
    assert log_probs.grad is not None
    return loss.item(), log_probs.grad, {k: float(v) for k, v in metrics.items()}


def numbers(data: DataProto, name: str) -> list[list[float]]:
    return data[name].double().tolist()


def tokens(data: DataProto) -> list[tuple[int, int]]:
    return [tuple(place) for place in data["response_mask"].nonzero().tolist()]  # type: ignore[misc]


def policy() -> list[list[float]]:
    random = torch.Generator().manual_seed(6)
    return (-1 + 0.4 * torch.randn(ROWS, WIDTH, generator=random)).double().tolist()


def test_everything_at_once_is_the_sum_of_its_terms():
    data = batch()
    loss, _, metrics = run(
        data,
        policy_loss={"name": "ppo", "settings": {"clip_low": 0.1, "clip_high": 0.3}},
        importance_weights={"cap": 1.2},
        kl={"coefficient": 9.0, "estimator": "k3"},  # the one that counts comes with the batch
        entropy_coefficient=0.05,
        aggregation="seq-mean-token-sum",
    )
    now, old, engine, reference = (
        policy(),
        *(numbers(data, f"{name}_log_probs") for name in ("old", "infer", "ref")),
    )
    advantages, total, kls = numbers(data, "advantages"), 0.0, []
    for r, t in tokens(data):
        ratio = math.exp(now[r][t] - old[r][t])
        a = advantages[r][t]
        gain = min(ratio * a, min(max(ratio, 0.9), 1.3) * a)
        weight = min(math.exp(old[r][t] - engine[r][t]), 1.2)
        difference = reference[r][t] - now[r][t]
        kls.append(math.exp(difference) - difference - 1)
        total += -weight * gain + 0.3 * kls[-1] - 0.05 * 2 * math.exp(now[r][t])
    assert loss == pytest.approx(total / DENOMINATORS["rows"], rel=1e-6)
    assert metrics["kl"] == pytest.approx(sum(kls) / 6)
    gaps = [abs(engine[r][t] - old[r][t]) for r, t in tokens(data)]
    assert metrics["log_prob_gap"] == pytest.approx(sum(gaps) / 6)
    assert metrics["log_prob_gap_max"] == pytest.approx(max(gaps))


@pytest.mark.parametrize(
    ("aggregation", "more", "wanted"),
    [
        ("token-mean", {}, "tokens"),
        ("constant", {"divisor": 16.0}, "constant"),
    ],
)
def test_the_first_update_compares_with_itself(aggregation, more, wanted):
    data = batch("old_log_probs", "ref_log_probs")
    loss, grad, metrics = run(data, aggregation=aggregation, **more)
    advantages = numbers(data, "advantages")
    total = sum(advantages[r][t] for r, t in tokens(data))
    assert loss == pytest.approx(-total / DENOMINATORS[wanted], rel=1e-6)
    right = -torch.where(data["response_mask"], data["advantages"], 0.0) / DENOMINATORS[wanted]
    torch.testing.assert_close(grad, right)
    assert metrics["ratio"] == 1 and metrics["old_kl"] == 0
    now, engine = policy(), numbers(data, "infer_log_probs")
    gaps = [abs(engine[r][t] - now[r][t]) for r, t in tokens(data)]
    assert metrics["log_prob_gap"] == pytest.approx(sum(gaps) / 6)


def test_f07_bad_rows_that_the_policy_has_left_are_masked_whole():
    data = batch()
    data.update({"old_log_probs": torch.tensor(policy()).float() + 1.0})  # all have moved by 1
    advantages = torch.tensor([[9, -0.5, 0.25, -0.25, 0.1], [9, 9, 1, 9, 1], [0] * 5])
    data.update({"advantages": advantages})
    _, grad, _ = run(data, off_policy_threshold=0.1)
    assert not grad[0].any() and grad[1, [2, 4]].all()


def test_a_loss_of_the_users_own_gets_the_columns_it_names():
    data = batch()
    loss, grad, metrics = run(data, policy_loss={"name": f"{__name__}.own", "settings": {"by": 3}})
    assert loss == pytest.approx(3 * 6 / DENOMINATORS["tokens"])
    assert metrics["asked"] == 6 and not grad.any()


def own(log_probs, response_mask, *, by):
    """For the test above."""
    return by * response_mask.float() + 0 * log_probs, {"asked": float(response_mask.sum())}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "summed",
            r"summed returned \(a tensor of shape \(\), \{\}\): want \(losses, metrics\), a t",
        ),
        ("bare", r"bare returned a tensor of shape \(3, 5\): want \(losses, metrics\)"),
        ("detached", "detached returned losses without a gradient: compute them from log_probs"),
    ],
)
def test_a_loss_of_the_users_own_that_returns_something_else(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        run(batch(), policy_loss={"name": f"{__name__}.{name}"})


def summed(log_probs):
    """For the test above."""
    return log_probs.sum(), {}


def bare(log_probs):
    """For the test above."""
    return log_probs


def detached(log_probs):
    """For the test above."""
    return log_probs.detach(), {}


def test_compute_log_probs_names_its_column():
    worker = ActorWorker(WorkerConfig(world_size=1))
    worker.strategy = SimpleNamespace(
        forward_step=lambda data, columns: DataProto(columns(data, None)),
        op_compute_log_probs=lambda _, ids, temperature: ids * temperature,
    )
    got = worker.compute_log_probs(DataProto({"input_ids": torch.ones(2, 3)}), "x_log_probs", 0.5)
    assert got.keys() == ["x_log_probs"] and got["x_log_probs"].tolist() == [[0.5] * 3] * 2
