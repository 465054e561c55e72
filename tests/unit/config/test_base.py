"""WorkerConfig and BaseConfig: derived numbers, and all problems at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from roll_td.config.base import BaseConfig, WorkerConfig, job_size, roles
from roll_td.config.schema import ConfigError


@dataclass
class TwoRoles(BaseConfig):
    student: WorkerConfig = field(default_factory=WorkerConfig)
    rewards: dict[str, WorkerConfig] = field(default_factory=dict)


def test_device_role_derives_world_size() -> None:
    role = WorkerConfig(device_mapping="0-7", num_gpus_per_worker=2)
    assert role.device_mapping == list(range(8))
    assert role.world_size == 4


def test_a01_division_is_checked_before_any_rank_starts() -> None:
    with pytest.raises(ValueError, match="num_gpus_per_worker=3: does not divide the 4 devices"):
        WorkerConfig(device_mapping="0-3", num_gpus_per_worker=3)


def test_conflicting_world_size() -> None:
    with pytest.raises(ValueError, match="world_size=3: 4 devices, 2 to a worker, make 2 workers"):
        WorkerConfig(device_mapping="0-3", num_gpus_per_worker=2, world_size=3)


def test_worker_config_tells_all_problems() -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig(device_mapping=[0, 0], num_gpus_per_worker=0, timeout_s=-1.0, world_size=0)
    keys = [line.partition("=")[0] for line in str(caught.value).splitlines()]
    assert keys == ["num_gpus_per_worker", "timeout_s", "world_size", "device_mapping"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world_size": 1.5}, "world_size=1.5: must be a whole number of at least 1"),
        ({"world_size": True}, "world_size=True: must be a whole number"),
        ({"world_size": "2"}, "world_size='2': must be a whole number"),
        ({"num_gpus_per_worker": None}, "num_gpus_per_worker=None: must be a whole number"),
        ({"world_size": 2, "num_gpus_per_worker": 2}, "num_gpus_per_worker=2: needs a device_map"),
        ({"timeout_s": float("nan")}, "timeout_s=nan: must be above 0 and at most 3153600000"),
        ({"timeout_s": float("inf")}, "timeout_s=inf: must be above 0 and at most"),
        ({"timeout_s": None}, "timeout_s=None: must be above 0"),
        ({"device_mapping": [0, -1]}, "device -1 is negative"),
        ({"device_mapping": {0}}, "is not a set of device numbers; write a list"),
    ],
)
def test_a_role_made_in_python_is_checked_as_one_from_a_file(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        WorkerConfig(**given)


def test_names_and_sizes_are_derived() -> None:
    config = TwoRoles(
        student=WorkerConfig(device_mapping=[0, 3]),
        rewards={"math": WorkerConfig(world_size=3), "x": WorkerConfig(name="code", world_size=1)},
    )
    assert list(roles(config)) == ["student", "math", "code"]
    assert (config.num_gpus_per_node, config.num_cpu_ranks_per_node) == (4, 4)


def test_no_role_uses_devices() -> None:
    config = TwoRoles(student=WorkerConfig(world_size=2))
    assert (config.num_gpus_per_node, config.num_cpu_ranks_per_node) == (0, 3)


@pytest.mark.parametrize(("size", "nodes", "cpus"), [(1, 1, 2), (3, 2, 2), (4, 2, 3), (1, 4, 1)])
def test_cpu_ranks_hold_driver_and_largest_role(size: int, nodes: int, cpus: int) -> None:
    assert job_size([WorkerConfig(world_size=size)], nodes).num_cpu_ranks_per_node == cpus


def test_base_config_tells_all_problems() -> None:
    student = WorkerConfig(name="math", device_mapping=[0])
    with pytest.raises(ConfigError) as caught:
        TwoRoles(
            student=student,
            rewards={"math": WorkerConfig(world_size=1)},
            num_nodes=2,
            transfer_timeout_s=0.0,
            node_timeout_s=4,
        )
    keys = [problem.key for problem in caught.value.problems]
    assert keys == [
        "transfer_timeout_s",
        "rewards.math.name",
        "node_timeout_s",
        "num_gpus_per_node",
    ]
    assert "is the name of section student too" in str(caught.value)


def test_a_world_without_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_cpu_ranks_per_node=0"):
        TwoRoles(num_cpu_ranks_per_node=0)
