from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from roll_td.config.base import BaseConfig, WorkerConfig
from roll_td.config.data import DataConfig
from roll_td.config.device_memory import (
    DeviceMemory,
    memory_by_device,
    memory_problems,
    memory_table,
    role_memory,
)
from roll_td.config.memory import Load, RoleMemory, fsdp2, hf
from roll_td.config.model import ModelConfig
from roll_td.config.model_size import model_size
from roll_td.config.schema import ConfigError, read

FIELDS = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 8192,
}
MODEL = ModelConfig(config=FIELDS)
SIZE = model_size(MODEL)


@dataclass
class Config(BaseConfig):
    model: ModelConfig = field(default_factory=lambda: MODEL)
    data: DataConfig | None = field(default_factory=lambda: DataConfig("x.jsonl", max_length=100))
    batch_size: int = 4
    roles: dict[str, WorkerConfig] = field(default_factory=dict)


def config(roles: dict[str, Any], **fields: Any) -> Config:
    reading = read(Config, {"roles": roles, **fields})
    assert reading.value is not None, reading.problems
    return reading.value


def role(strategy: str, devices: str | None, **fields: Any) -> dict[str, Any]:
    where = {"world_size": 1} if devices is None else {"device_mapping": devices}
    return {"strategy_args": {"strategy_name": strategy}, **where, **fields}


def takes(resident_mb: float, working_mb: float, **parts: float) -> RoleMemory:
    names = (
        "optimizer",
        "gradients",
        "activations",
        "buffers",
        "kv_cache",
        "allocator",
        "reserved",
        "checkpoint",
    )
    sizes = {f"{name}_mb": parts.get(name, 0.0) for name in names}
    return RoleMemory(weights_mb=resident_mb, working_mb=working_mb, **sizes)


def test_a_role_is_estimated_with_its_model_and_the_rows_of_the_pipeline() -> None:
    own = ModelConfig(config=FIELDS | {"num_hidden_layers": 2})
    made = config({"a": role("fsdp2_train", "0-1"), "b": role("fsdp2_train", "2")})
    made.roles["b"].model = own
    a, b = made.roles.values()
    assert role_memory(made, a) == fsdp2(a, MODEL, SIZE, Load(100, 100, batch_rows=4))
    assert role_memory(made, b) == fsdp2(b, own, model_size(own), Load(100, 100, batch_rows=4))


def test_responses_make_rows_longer_and_their_number_unknown() -> None:
    generation = {"max_new_tokens": 28}
    made = config(
        {"a": role("fsdp2_train", "0"), "b": role("hf_infer", "1", generation=generation)}
    )
    a, b = made.roles.values()
    assert role_memory(made, a) == fsdp2(a, MODEL, SIZE, Load(100, 128))
    assert role_memory(made, b) == hf(b, MODEL, SIZE, Load(100, 128))


def test_devices_with_the_same_roles_are_one_entry() -> None:
    made = config(
        {
            "train": role("fsdp2_train", "0-3"),
            "infer": role("hf_infer", "2-5", num_gpus_per_worker=2),
            "mock": role("mock_infer", "0"),
            "plain": {"device_mapping": "0"},
            "cpu": role("fsdp2_infer", None),
        }
    )
    found, unknown = memory_by_device(made)
    # a worker of two devices lives on the first
    assert [(some.devices, list(some.roles)) for some in found] == [
        ((0, 1, 3), ["train"]),
        ((2,), ["train", "infer"]),
        ((4,), ["infer"]),
        ((), ["cpu"]),
    ]
    assert unknown == []


def test_what_stays_adds_up_and_the_largest_work_counts() -> None:
    some = DeviceMemory((0,), {"a": takes(10, 7), "b": takes(20, 3)})
    assert some.peak_mb == 37


def test_offloaded_only_those_at_work_count() -> None:
    roles = {"a": takes(10, 7), "b": takes(20, 3), "c": takes(4, 25)}
    assert DeviceMemory((0,), roles, offloads=True).peak_mb == 30  # new weights from a to b
    assert DeviceMemory((0,), roles | {"b": takes(5, 3)}, offloads=True).peak_mb == 29  # c alone
    made = config({n: role("hf_infer", "0") for n in roles}, device_memory_gb=0.02)
    (problem,) = memory_problems(made, [DeviceMemory((0,), roles, offloads=True)])
    assert "one (a 0.02, b 0.02, c 0.03), or what stays of two for new weights (a" in str(problem)


GB = 1 << 30


def test_an_engine_of_vllm_keeps_what_it_has_reserved() -> None:
    own = {"kv_cache_memory_bytes": 2 * GB, "max_num_batched_tokens": 1, "max_num_seqs": 1}
    args = {"strategy_name": "vllm", "strategy_config": own}
    roles = {
        "train": role("fsdp2_train", "0-1"),
        "infer": role("vllm", "1-2", num_gpus_per_worker=2) | {"strategy_args": args},
    }
    found, unknown = memory_by_device(config(roles, device_memory_gb=2.5))
    assert [(some.devices, list(some.roles)) for some in found] == [
        ((0,), ["train"]),
        ((1,), ["train", "infer"]),
        ((2,), ["infer"]),
    ]
    assert unknown == []
    engine = found[2].roles["infer"]
    assert engine.weights_mb == SIZE.parameters * 4 / 2 / 2**20
    assert engine.resident_mb == engine.weights_mb + 2048 == pytest.approx(engine.peak_mb, abs=1)
    both = found[1]
    assert both.peak_mb == both.roles["train"].peak_mb + engine.resident_mb
    problems = memory_problems(config(roles, device_memory_gb=2.5), found)
    assert [problem.given for problem in problems] == ["2.5"], "device 1, and no other"
    assert str(problems[0]).endswith(
        "lower infer.strategy_args.strategy_config.kv_cache_memory_bytes, or give each role "
        "devices of its own"
    )


def test_weights_that_wait_on_a_device_are_on_the_first_of_an_engine_and_stay() -> None:
    own = {"kv_cache_memory_bytes": GB, "weights_on": "device"}
    args = {"strategy_name": "vllm", "strategy_config": own}
    roles = {"infer": role("vllm", "0-3", num_gpus_per_worker=2) | {"strategy_args": args}}
    found, _ = memory_by_device(config(roles))
    assert [some.devices for some in found] == [(0, 2), (1, 3)]
    first, second = (some.roles["infer"] for some in found)
    copy_mb = SIZE.parameters * 4 / 2**20
    assert second.weights_mb == copy_mb / 2 and second.kept_mb == 0
    assert first.weights_mb == copy_mb + copy_mb / 2
    assert first.resident_mb - second.resident_mb == first.kept_mb == copy_mb
    with_others = {"infer": first, "a": takes(10, 20000), "b": takes(20, 3)}
    assert DeviceMemory((0,), with_others).peak_mb == first.resident_mb + 30 + 20000
    assert DeviceMemory((0,), with_others, offloads=True).peak_mb == copy_mb + 20010
    (problem,) = memory_problems(config(roles, device_memory_gb=1.2), found[:1])
    assert problem.fix == "lower infer.strategy_args.strategy_config.kv_cache_memory_bytes"
    roles["infer"]["strategy_args"]["strategy_config"]["kv_cache_memory_bytes"] = 1 << 20
    made = config(roles, device_memory_gb=0.1)
    problems = memory_problems(made, memory_by_device(made)[0])
    assert problems[0].fix == "set infer.strategy_args.strategy_config.weights_on: host"


def test_an_engine_of_vllm_takes_its_share_of_a_device() -> None:
    args = {"strategy_name": "vllm", "strategy_config": {"gpu_memory_utilization": 0.8}}
    roles = {
        "infer": role("vllm", "0") | {"strategy_args": args},
        "train": role("fsdp2_train", "0"),
    }
    found, unknown = memory_by_device(config(roles))
    assert [list(some.roles) for some in found] == [["train"]]
    assert unknown == [
        "memory of infer is not known: vLLM takes gpu_memory_utilization=0.8 of a GPU, on CPUs "
        "1 GiB for keys and values; set device_memory_gb, or strategy_config.kv_cache_memory_bytes"
    ]
    ((both,), unknown) = memory_by_device(config(roles, device_memory_gb=16))
    assert unknown == [] and both.roles["infer"].peak_mb == pytest.approx(0.8 * 16 * 1024)
    made = config(roles, device_memory_gb=4)
    (problem,) = memory_problems(made, memory_by_device(made)[0])
    assert "strategy_config.gpu_memory_utilization" in problem.fix


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": {"path": "./else"}}, "path=./else: no folder with"),
        ({"model": {"config": {"model_type": "mamba"}}}, "model_type=mamba: its size is not known"),
        ({"data": None}, "has no data.max_length"),
    ],
)
def test_what_cannot_be_told_is_said(fields: dict[str, Any], reason: str) -> None:
    found, unknown = memory_by_device(config({"a": role("fsdp2_train", "0")}, **fields))
    assert found == []
    assert len(unknown) == 1
    assert unknown[0].startswith("memory of a is not known: ")
    assert reason in unknown[0]


def test_no_limit_no_problem() -> None:
    made = config({"a": role("fsdp2_train", "0")})
    assert memory_problems(made, [DeviceMemory((0,), {"a": takes(1e9, 1e9)})]) == []


def test_shared_roles_that_do_not_fit() -> None:
    made = config(
        {"a": role("fsdp2_train", "0-3,6"), "b": role("hf_infer", "0-3,6")}, device_memory_gb=10
    )
    a, b = takes(2048, 7168, activations=6000), takes(1024, 1024, kv_cache=1024)
    fits = DeviceMemory((7,), {"a": a})
    on_cpus = DeviceMemory((), {"b": takes(99999, 0)})
    found = memory_problems(made, [DeviceMemory((0, 1, 2, 3, 6), {"a": a, "b": b}), fits, on_cpus])
    assert found == []
    a = takes(2048, 7680, activations=6000)
    found = memory_problems(made, [DeviceMemory((0, 1, 2, 3, 6), {"a": a, "b": b}), fits, on_cpus])
    assert [str(problem) for problem in found] == [
        "device_memory_gb=10: is less than the 10.50 GB that device 0-3,6 needs: what stays "
        "(a 2.00, b 1.00) and what a holds while it works (7.50); lower "
        "a.training.micro_batch_size or max_tokens_per_micro_batch, set "
        "a.training.gradient_checkpointing: true, or give each role devices of its own"
    ]


@pytest.mark.parametrize(
    ("memory", "strategy", "fix"),
    [
        (takes(4096, 0), "fsdp2_train", "shard a over more devices, train adapters (model.lora)"),
        (takes(4096, 0), "fsdp2_infer", "shard a over more devices"),
        (takes(1, 4096, kv_cache=4096), "hf_infer", "lower a.strategy_args.strategy_config.batch"),
        (takes(1, 4096, activations=4096), "fsdp2_train", "lower a.training.micro_batch_size"),
    ],
)
def test_the_way_out_is_about_the_largest_part(memory: RoleMemory, strategy: str, fix: str) -> None:
    made = config({"a": role(strategy, "0")}, device_memory_gb=2)
    (problem,) = memory_problems(made, [DeviceMemory((0,), {"a": memory})])
    assert problem.fix.startswith(fix)
    assert "devices of its own" not in problem.fix


def test_the_table() -> None:
    a = takes(
        2048, 7168, optimizer=4096, gradients=2048, activations=5120, buffers=5, checkpoint=1024
    )
    b = takes(1024, 1024, kv_cache=1024)
    table = memory_table([DeviceMemory((0, 1), {"a": a, "b": b}), DeviceMemory((), {"b": b})])
    assert table.splitlines() == [
        "memory in GB  device  weights  optimizer  gradients  activations  buffers  KV cache  "
        "allocator  peak   host, to save",
        "a             0-1     2.00     4.00       2.00       5.00         <0.01    -         "
        "-          13.00  1.00",
        "b             0-1     1.00     -          -          -            -        1.00      "
        "-          2.00   -",
        "together      0-1                                                                    "
        "           14.00",
        "b             -       1.00     -          -          -            -        1.00      "
        "-          2.00   -",
    ]
    assert memory_table([]) == ""


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_above_zero(limit: float) -> None:
    with pytest.raises(ConfigError, match=f"device_memory_gb={limit}: must be above 0"):
        Config(device_memory_gb=limit)
