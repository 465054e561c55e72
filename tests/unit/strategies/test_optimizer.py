from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from roll_td.config.model import TrainingConfig
from roll_td.strategies.optimizer import adamw, clip_gradients, learning_rate


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.868198, 0.55, 0.231802, 0.1, 0.1]),
    ],
)
def test_schedules_written_out(schedule: str, wanted: list[float]) -> None:
    config = TrainingConfig(
        learning_rate=2.0, lr_schedule=schedule, warmup_steps=4, min_lr_ratio=0.1
    )
    rates = [learning_rate(config, step, 8) for step in range(10)]
    assert rates == pytest.approx([2.0 * share for share in wanted], abs=1e-6)


def test_a_run_shorter_than_its_warm_up_rises_all_the_way() -> None:
    config = TrainingConfig(learning_rate=1.0, lr_schedule="linear", warmup_steps=5)
    assert [learning_rate(config, s, 3) for s in range(3)] == pytest.approx([0.2, 0.4, 0.6])
    assert learning_rate(config, 5, 5) == 1.0


def test_a_schedule_that_ends_needs_to_know_when() -> None:
    with pytest.raises(ValueError, match=r"cosine ends after max_steps.*set max_steps"):
        learning_rate(TrainingConfig(lr_schedule="cosine"), 0, None)


def test_the_first_step_of_adamw_by_hand() -> None:
    """Both moments corrected are g and g², so the step is lr · sign(g), after the decay."""
    matrix, vector = torch.ones(2, 2), torch.ones(2)
    optimizer = adamw([vector, matrix], TrainingConfig(weight_decay=0.5, adam_eps=0.0))
    matrix.grad, vector.grad = torch.full((2, 2), 3.0), torch.full((2,), -7.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    torch.testing.assert_close(matrix, torch.full((2, 2), 1 - 0.1 * 0.5 - 0.1))
    torch.testing.assert_close(vector, torch.full((2,), 1 + 0.1))
    torch.testing.assert_close(optimizer.state[vector]["exp_avg"], torch.full((2,), -0.7))
    torch.testing.assert_close(optimizer.state[matrix]["exp_avg_sq"], torch.full((2, 2), 0.45))


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(("max_norm", "scale"), [(1.0, 0.2), (5.0, 1.0), (9.0, 1.0), (0.0, 1.0)])
def test_gradients_are_scaled_down_to_the_norm(
    group: dist.ProcessGroup, max_norm: float, scale: float
) -> None:
    weights = [torch.zeros(2), torch.zeros(1, 1), torch.zeros(0, 3), torch.zeros(1)]
    for weight, gradient in zip(weights, ([0.0, 3.0], [[-4.0]], []), strict=False):
        weight.grad = torch.tensor(gradient).view(weight.shape)
    assert clip_gradients(weights, max_norm, group) == 5.0
    got = [weight.grad.tolist() for weight in weights[:2] if weight.grad is not None]
    assert got == [pytest.approx([0.0, 3 * scale]), [pytest.approx([-4 * scale])]]


def test_a_norm_that_is_not_finite_is_told(group: dist.ProcessGroup) -> None:
    weight = torch.zeros(2)
    weight.grad = torch.tensor([1.0, math.nan])
    assert math.isnan(clip_gradients([weight], 1.0, group))
