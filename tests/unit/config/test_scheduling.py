"""What of scheduling can't be, alone and with the roles there are."""

from __future__ import annotations

import pytest

from roll_td.config.base import WorkerConfig
from roll_td.config.rlvr import RLVRConfig
from roll_td.config.scheduling import SchedulingConfig, scheduling_problems
from roll_td.config.schema import ConfigError, read
from roll_td.config.strategies import StrategyArgs


def role(name: str, devices: list[int], strategy: str = "hf_infer") -> WorkerConfig:
    return WorkerConfig(name, device_mapping=devices, strategy_args=StrategyArgs(strategy))


def test_it_is_one_call_unless_it_runs_ahead_or_is_told_not_to_be() -> None:
    assert not SchedulingConfig().by_requests
    assert not SchedulingConfig(deterministic=True).by_requests
    assert SchedulingConfig(deterministic=False).by_requests
    assert SchedulingConfig(async_generation_ratio=0.5).by_requests
    assert [SchedulingConfig(ratio).oldest for ratio in (0, 0.5, 1, 2.5)] == [0, 1, 1, 3]
    assert SchedulingConfig(2.0, max_staleness=1).oldest == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"async_generation_ratio": -0.5}, r"async_generation_ratio=-0\.5: must be at least 0"),
        ({"in_flight_per_engine": 0}, "in_flight_per_engine=0: must be at least 1"),
        ({"max_staleness": -1}, "max_staleness=-1: must be at least 0"),
        ({"request_timeout_s": 0}, "request_timeout_s=0: must be above 0 seconds"),
        (
            {"deterministic": True, "async_generation_ratio": 1.0},
            "deterministic=True: needs async_generation_ratio 0",
        ),
    ],
)
def test_fields_out_of_range(wrong, said) -> None:
    with pytest.raises(ConfigError, match=said):
        SchedulingConfig(**wrong)


def problems(scheduling: SchedulingConfig, engines: WorkerConfig, corrects: bool = False):
    train = role("actor_train", [0, 1], "fsdp2_train")
    found = scheduling_problems(scheduling, engines, {"actor_train": train}, corrects)
    return [str(problem) for problem in found]


def test_roles_that_work_at_the_same_time_have_their_own_devices() -> None:
    ahead = SchedulingConfig(async_generation_ratio=1.0)
    (said,) = problems(ahead, role("actor_infer", [1, 2]))
    assert "async_generation_ratio=1.0: actor_infer and actor_train share devices [1]" in said
    assert problems(ahead, role("actor_infer", [2, 3])) == []
    # one after the other they may share
    assert problems(SchedulingConfig(deterministic=False), role("actor_infer", [0, 1])) == []


def test_an_engine_has_to_take_requests() -> None:
    by_requests = SchedulingConfig(deterministic=False)
    (said,) = problems(by_requests, role("actor_infer", [2], "fsdp2_infer"))
    assert "fsdp2_infer takes no requests while it answers" in said
    assert problems(SchedulingConfig(), role("actor_infer", [2], "fsdp2_infer")) == []


def test_of_one_call_for_all_nothing_is_promised() -> None:
    promised = {"request_timeout_s": 60.0, "on_engine_failure": "reroute"}
    timeout, reroute = problems(SchedulingConfig(**promised), role("infer", [0], "vllm"))
    assert timeout == (
        "request_timeout_s=60.0: says nothing where all is asked in one call, "
        "async_generation_ratio being 0; set deterministic: false, which asks one by one, or "
        "strategy_config.request_timeout_s"
    )
    assert reroute.startswith("on_engine_failure='reroute': says nothing where all is asked in on")
    assert len(problems(SchedulingConfig(**promised), role("infer", [0]))) == 2
    by_requests = SchedulingConfig(deterministic=False, **promised)
    assert problems(by_requests, role("infer", [0], "vllm")) == []


def test_what_is_too_old_can_only_be_corrected_by_weights() -> None:
    old = SchedulingConfig(2.0, max_staleness=1, stale="correct")
    (said,) = problems(old, role("actor_infer", [2]))
    assert "stale=correct: has no importance weights to do it" in said
    assert problems(old, role("actor_infer", [2]), corrects=True) == []


def test_rlvr_tells_of_all_of_it_at_once() -> None:
    given = {
        "model": {"path": "my-model"},
        "data": {"train": "my.jsonl", "prompt_key": "q", "keep": {"ground_truth": "a"}},
        "rewards": {"default": {"name": "exact_match"}},
        "actor_infer": {"generation": {"num_return_sequences": 4}},
        "max_steps": 10,
        "offload": True,
        "scheduling": {"async_generation_ratio": 1.0},
    }
    said = "\n".join(map(str, read(RLVRConfig, given).problems))
    assert (
        "scheduling.async_generation_ratio=1.0: actor_infer and actor_train share devices" in said
    )
    assert "offload=true: would take the model from an engine" in said
    apart = {"actor_infer": given["actor_infer"] | {"device_mapping": [1]}, "offload": False}
    assert read(RLVRConfig, given | apart).problems == []
