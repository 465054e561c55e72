"""FSDP2 training on real ranks, against plain PyTorch and against itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import roll_td_run, write_config

# worlds of 1, 2, 3 and 4 ranks, one of them not from rank 0 on, and two copies on two ranks each
WORLDS: dict[str, tuple[list[int], dict[str, object]]] = {
    "one": ([0], {}),
    "two": ([2, 3], {}),
    "three": ([0, 1, 2], {}),
    "four": ([0, 1, 2, 3], {"reshard_after_forward": False}),
    "hybrid": ([0, 1, 2, 3], {"fsdp_size": 2}),
}
TRAINER = "training_scenarios.Trainer"


def run(folder: Path, pipeline: str, timeout_s: float) -> str:
    """What the scenario prints."""
    roles = {}
    for name, (devices, settings) in WORLDS.items():
        args = {"strategy_name": "fsdp2_train", "strategy_config": settings}
        roles[name] = {"device_mapping": devices, "strategy_args": args, "worker_cls": TRAINER}
    model = {"config": {"model_type": "qwen3"}}  # each scenario makes its own
    config = write_config(folder, pipeline, roles=roles, model=model)
    ended = roll_td_run(config).finish(timeout_s)
    assert ended.code == 0, ended.out
    return ended.out


@pytest.mark.timeout(240)
def test_every_world_gives_the_numbers_of_plain_pytorch(tmp_path: Path) -> None:
    assert "PARITY CHECKED" in run(tmp_path, "training_scenarios.Parity", 220)


@pytest.mark.timeout(240)
def test_states_leave_and_come_back_bit_equal(tmp_path: Path) -> None:
    assert "STATES CHECKED" in run(tmp_path, "training_states.States", 220)
