"""Weight updates between real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import roll_td_run, write_config

ROLES: dict[str, tuple[str, list[int], dict[str, object]]] = {
    "train_1": ("fsdp2_train", [0], {}),
    "train_2": ("fsdp2_train", [2, 1], {}),
    "train_3": ("fsdp2_train", [0, 1, 2], {}),
    "hf_1": ("hf_infer", [3], {}),
    "hf_2": ("hf_infer", [1, 2], {}),
    "hf_3": ("hf_infer", [1, 2, 3], {}),
    "hybrid": ("fsdp2_infer", [0, 1, 2, 3], {"fsdp_size": 2}),
    "fsdp_3": ("fsdp2_infer", [3, 2, 1], {}),
}
ROLE = "weights_scenarios.Role"


def run(folder: Path, pipeline: str, timeout_s: float, **config: object) -> str:
    """What the scenario prints."""
    roles = {}
    for name, (strategy, devices, settings) in ROLES.items():
        args = {"strategy_name": strategy, "strategy_config": settings}
        roles[name] = {"device_mapping": devices, "strategy_args": args, "worker_cls": ROLE}
    model = {"config": {"model_type": "qwen3"}}  # each scenario makes its own
    path = write_config(folder, pipeline, roles=roles, model=model, **config)
    ended = roll_td_run(path).finish(timeout_s)
    assert ended.code == 0, ended.out
    return ended.out


@pytest.mark.timeout(120)
def test_e11_every_count_of_ranks_on_both_sides(tmp_path: Path) -> None:  # E03, E04, E06, E11
    assert "EXCHANGE CHECKED" in run(tmp_path, "weights_scenarios.Exchange", 110)
