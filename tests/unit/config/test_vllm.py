from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from roll_td.config import vllm
from roll_td.config.base import WorkerConfig
from roll_td.config.judges import JudgeConfig, judge_problems
from roll_td.config.model import GenerationConfig, LoraConfig, ModelConfig
from roll_td.config.rewards import RewardArgs
from roll_td.config.schema import ConfigError
from roll_td.config.strategies import StrategyArgs

SOURCE = """
from dataclasses import dataclass

raise ImportError("it is only read")

@dataclass
class EngineArgs:
    model: str = "m"
    max_model_len: int | None = None
    seqs: int | None = None
    share: float = 0.9
    names: list[str] | None = None
    kind: "Kind | str" = None
    MAX = 3

    def __post_init__(self) -> None:
        inner: int = 4

class OtherArgs(EngineArgs):
    other: int = 5
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('it is only found')")
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(SOURCE)


def test_arguments_come_from_the_source(installed: None) -> None:
    cls = vllm.engine_arguments()
    assert cls is not None
    assert [field.name for field in fields(cls)] == [
        "model", "max_model_len", "seqs", "share", "names", "kind",
    ]  # fmt: skip


def test_one_of_another_type_is_told(installed: None) -> None:
    given = {"seqs": "abc", "share": 1, "names": ["a", 2], "kind": 3}
    problems = StrategyArgs("vllm", given).further_problems()
    assert problems is not None
    assert [str(problem) for problem in problems] == [
        "seqs='abc': must be int or null, is str",
        "names[1]=2: must be str, is int; write it in quotes",
    ]


def test_an_unknown_one_is_told_with_the_nearest(installed: None) -> None:
    given = {"max_modellen": 3, "max_model_len": 4, "zzz": 5, "sleep_level": 1}
    problems = StrategyArgs("vllm", given).further_problems()
    assert problems is not None
    assert [str(problem) for problem in problems] == [
        "max_modellen=3: the engine has no such argument; did you mean max_model_len?",
        "zzz=5: the engine has no such argument; leave it out",
    ]
    assert StrategyArgs("mock_infer").further_problems() == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seqs": "abc"}, "max_num_seqs='abc': must be int or null, is str"),
        ({"max_num_seqs": True}, "max_num_seqs=True: must be int or null, is bool"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0: must be above 0"),
        ({"gpu_memory_utilization": -0.5}, "gpu_memory_utilization=-0.5: must be above 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5: must be at most 1"),
        ({"enforce_eager": "no"}, "enforce_eager='no': must be bool or null, is str"),
        ({"max_model_len": 0}, "max_model_len=0: must be above 0, or -1 for what the memory has"),
        ({"stream_interval": 5}, "stream_interval=5: is fixed: each token is noted with the we"),
        ({"max_loras": 2}, "max_loras=2: is fixed: there is one policy; leave it out"),
    ],
)
def test_those_that_are_looked_at_are_checked_without_it(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        StrategyArgs("vllm", given)
    assert str(raised.value).startswith(f"strategy_config.{message}")


def test_without_it_none_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    assert vllm.engine_arguments() is None
    assert StrategyArgs("vllm", {"max_modellen": 3}).further_problems() is None


def test_an_engine_goes_with_its_devices_and_its_model() -> None:
    def told(model: ModelConfig, **given: Any) -> list[str]:
        args = StrategyArgs("vllm", given)
        role = WorkerConfig(device_mapping="0-5", num_gpus_per_worker=3, strategy_args=args)
        key = "strategy_args.strategy_config."
        found = vllm.engine_problems(role, model)
        return [str(problem).removeprefix(key) for problem in found]

    trained = ModelConfig(path="m", lora=LoraConfig())
    assert told(trained, lora="adapters", pipeline_parallel_size=3) == []
    assert told(ModelConfig(path="m"), lora="adapters", pipeline_parallel_size=2) == [
        "pipeline_parallel_size=2: does not divide the 3 devices of a worker, "
        "num_gpus_per_worker; set num_gpus_per_worker to a multiple of 2, or leave it out",
        "lora=adapters: has no adapters to bring; set model.lora, or leave it out",
    ]
    said = "lora=adapters: has vLLM read the model, and model.path=m.gguf is no folder and no hub"
    (problem,) = told(ModelConfig(path="m.gguf", lora=LoraConfig()), lora="adapters")
    assert problem.startswith(said)
    assert list(vllm.engine_problems(WorkerConfig(world_size=1), trained)) == []


def test_it_samples_at_some_temperatures() -> None:
    def told(temperature: float, strategy: str = "vllm") -> list[str]:
        generation = GenerationConfig(temperature=temperature)
        role = WorkerConfig(
            device_mapping=[0], strategy_args=StrategyArgs(strategy), generation=generation
        )
        return [str(problem) for problem in vllm.engine_problems(role, ModelConfig())]

    assert [told(fine) for fine in (0, 0.01, 1, 2)] == [[]] * 4
    said = ": vLLM samples at 0 and from 0.01 to 2; set one of these"
    assert told(0.001) == [f"generation.temperature=0.001{said}"]
    assert told(2.5) == [f"generation.temperature=2.5{said}"]
    assert told(0.001, "hf_infer") == []


def test_a_judge_has_room_for_its_questions() -> None:
    args = StrategyArgs("vllm", {"max_model_len": 512})
    judge = JudgeConfig(world_size=1, strategy_args=args, max_length=512)
    rewards = {"default": RewardArgs("llm_judge", settings={"role": "a", "template": "{response}"})}
    (problem,) = judge_problems(rewards, {"a": judge})
    assert str(problem) == (
        "judges.a.strategy_args.strategy_config.max_model_len=512: leaves a prompt of "
        "judges.a.max_length=512 tokens none for an answer; raise it, or lower judges.a.max_length"
    )
    judge.max_length = 500
    assert not list(judge_problems(rewards, {"a": judge}))
