"""The critic's loss of a micro-batch, against the same written down in float64 token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_td.config.base import WorkerConfig
from roll_td.plan import default_plan, local
from roll_td.protocol import DataProto
from roll_td.workers.critic import CriticWorker

ROWS, WIDTH, TOKENS = 3, 5, 11.0


def numbers(seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=random, dtype=torch.float64)


def batch() -> DataProto:
    mask = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]]).bool()
    # what is masked may be anything
    garbage = torch.tensor([float("nan"), float("inf"), 1e30]).repeat(5).view(ROWS, WIDTH)
    columns = {
        "values": torch.where(mask, numbers(1), garbage),
        "returns": torch.where(mask, numbers(2), garbage),
    }
    data = DataProto({"response_mask": mask, **columns})
    data.plan = local(default_plan(ROWS, 1, None, {"tokens": TOKENS}), 0)  # type: ignore[assignment]
    return data


def loss_of(predicted: torch.Tensor, clip: float | None) -> tuple[torch.Tensor, dict[str, Any]]:
    worker = CriticWorker(WorkerConfig(world_size=1))
    worker.value_clip = clip
    worker.strategy = SimpleNamespace(op_compute_values=lambda _: predicted)
    return worker.loss_func(batch(), None)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_loss_and_gradient_are_those_of_the_formula(clip: float | None) -> None:
    predicted, data = numbers(3).requires_grad_(), batch()
    loss, metrics = loss_of(predicted, clip)
    total, cut = 0.0, 0
    for row, t in data["response_mask"].nonzero().tolist():
        v, old, wanted = (x[row, t].item() for x in (predicted, data["values"], data["returns"]))
        near = v if clip is None else min(max(v, old - clip), old + clip)
        total += max((v - wanted) ** 2, (near - wanted) ** 2) / 2
        cut += (near - wanted) ** 2 > (v - wanted) ** 2
    assert loss.item() == pytest.approx(total / TOKENS, rel=1e-12)
    assert metrics.get("value_clip_fraction", 0) == cut / 6
    assert clip is None or cut, "else nothing is tested"
    loss.backward()
    step = 1e-6
    for place in range(ROWS * WIDTH):
        moved = torch.zeros(ROWS * WIDTH, dtype=torch.float64)
        moved[place] = step
        up, down = (loss_of(predicted.detach() + sign * moved.view(ROWS, WIDTH), clip)[0]
                    for sign in (1, -1))  # fmt: skip
        slope = (up - down).item() / (2 * step)
        assert predicted.grad is not None
        assert predicted.grad.view(-1)[place].item() == pytest.approx(slope, abs=1e-8)


def test_compute_values_gives_its_column() -> None:
    worker = CriticWorker(WorkerConfig(world_size=1))
    worker.strategy = SimpleNamespace(
        forward_step=lambda data, columns: DataProto(columns(data, None)),
        op_compute_values=lambda _: torch.full((2, 3), 0.5),
    )
    got = worker.compute_values(DataProto({"input_ids": torch.ones(2, 3)}))
    assert got.keys() == ["values"] and got["values"].tolist() == [[0.5] * 3] * 2
