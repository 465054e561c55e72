"""The engine's memory, its ends, and what is said when it can't start or is gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from roll_td.config.model import GenerationConfig, ModelConfig
from roll_td.config.schema import ConfigError
from roll_td.config.strategies import StrategyArgs
from roll_td.models import full_weights, load_model
from roll_td.strategies.hf import HfInfer
from roll_td.strategies.vllm.process import EngineProcess
from roll_td.strategies.vllm.strategy import VllmInfer
from tests.dist.harness import Job
from tests.vllm.conftest import ENGINE, FIELDS, HERE, NEEDS_VLLM, context, strong
from tests.vllm.test_generate import check_greedy, prompts, update

pytestmark = NEEDS_VLLM
GREEDY = GenerationConfig(temperature=0, max_new_tokens=8)
MB = 1 << 20


def resident_mb(engine: VllmInfer) -> float:
    """Of the engine's process."""
    pages = Path(f"/proc/{engine._engine.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / MB


def test_offloaded_it_gives_keys_and_values_back(one: VllmInfer) -> None:
    model = strong(one.context.model, 3)
    update(one, model, 3)
    check_greedy(one, model, 3)
    before = resident_mb(one)
    for _ in range(2):
        one.offload_states()
    cache_mb = ENGINE["kv_cache_memory_bytes"] / MB
    assert before - resident_mb(one) > 0.8 * cache_mb
    with pytest.raises(ValueError, match="role infer: the engine is offloaded; call load_states"):
        one.generate(prompts(), GREEDY, 0)
    with pytest.raises(ValueError, match="the engine is offloaded"):
        update(one, strong(one.context.model, 4), 4)
    for _ in range(2):
        one.load_states()
    check_greedy(one, model, 3)
    with pytest.raises(ValueError, match="no state weights; there are gradients, model, optimizer"):
        one.offload_states(["weights"])


def test_weights_that_it_has_dropped_come_anew(
    one: VllmInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a CPU does not drop; so others lie where they come from."""
    monkeypatch.setattr(one, "_config", replace(one._config, sleep_level=2))
    one.offload_states()
    model = strong(one.context.model, 5)
    for name, weight in full_weights(model):
        one.model[name].copy_(weight)
    one.load_states()
    check_greedy(one, model, one.weight_version)
    one.offload_states()
    one.load_states()
    model = strong(one.context.model, 6)
    update(one, model, 5)
    check_greedy(one, model, 5)


@pytest.fixture
def group() -> Iterator[object]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_checkpoints_are_those_of_hf_infer(
    one: VllmInfer, group: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(one.context.groups, "world", group)  # type: ignore[arg-type]
    model = strong(one.context.model, 6)
    update(one, model, 6)
    (tmp_path / "engine").mkdir()
    one.save_checkpoint(tmp_path / "engine")
    config = replace(one.context.config, strategy_args=StrategyArgs("hf_infer"))
    other = HfInfer(replace(one.context, config=config))
    other.initialize(strong)
    other.load_checkpoint(tmp_path / "engine")
    assert other.weight_version == 6
    for name, weight in other.full_parameters():
        assert torch.equal(weight, dict(one.full_parameters())[name]), name
    update(one, strong(one.context.model, 7), 7)
    one.load_checkpoint(tmp_path / "engine")
    check_greedy(one, model, 6)


def start() -> EngineProcess:
    return EngineProcess("role infer, worker 1", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


def test_arguments_are_looked_at_before_it_starts() -> None:
    infer = VllmInfer(context(1, FIELDS, max_modellen=3, kv_offloading_size="big"))
    with pytest.raises(ConfigError) as raised:
        infer.initialize(strong)
    key = "infer.strategy_args.strategy_config"
    assert str(raised.value).splitlines() == [
        f"{key}.max_modellen=3: the engine has no such argument; did you mean max_model_len?",
        f"{key}.kv_offloading_size='big': must be float or null, is str",
    ]


@pytest.mark.timeout(240)
def test_an_engine_that_cannot_start_or_go_on_says_why(tmp_path: Path) -> None:
    process = start()
    with pytest.raises((RuntimeError, ValueError), match=r"(?s)worker 1: .*/none"):
        process.call("start", {"model": str(tmp_path / "none")}, timeout_s=100)
    model = load_model(ModelConfig(config=FIELDS), 0)
    model.save_pretrained(tmp_path)
    arguments = {"model": str(tmp_path), "skip_tokenizer_init": True, "dtype": "float32"}
    assert process.call("start", arguments | ENGINE, timeout_s=200) == 160
    process.call("begin_loading", timeout_s=10)
    settings = {"stop": [], "max_tokens": 5}
    one, two = process.submit("generate", [([1, 2, 3], settings), ([4], settings)])
    for waiting in (one, two):  # it has no weights
        with pytest.raises(RuntimeError, match=r"(?s)worker 1: Traceback.*Meta tensors"):
            waiting.result(60)
    with pytest.raises(RuntimeError, match="worker 1: the engine's process has ended with exit st"):
        process.call("wake_up", timeout_s=10)
    assert not process.folder.exists()


@pytest.mark.timeout(60)
def test_b15_an_engine_that_hangs_or_is_killed_is_named() -> None:
    process = start()
    os.kill(process.process.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"worker 1: .* has not done wake_up within 0\.1 s"):
        process.call("wake_up", timeout_s=0.1)
    (waiting,) = process.submit("wake_up", [()])
    os.kill(process.process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="worker 1: the engine's process has ended w"):
        waiting.result(10)
    with pytest.raises(RuntimeError, match="ended with signal SIGKILL"):
        process.call("wake_up", timeout_s=1)
    assert not process.folder.exists()


@pytest.mark.timeout(60)
def test_one_that_is_silent_while_answers_are_waited_for_is_killed() -> None:
    process = start()
    os.kill(process.process.pid, signal.SIGSTOP)
    waiting = process.submit("generate", [([1], {}), ([2], {})])
    with pytest.raises(
        TimeoutError, match=r"worker 1: .* given no answer for 0\.3 s, strategy_con"
    ):
        process.wait(waiting[0], 0.3)
    with pytest.raises(RuntimeError, match="ended with signal SIGKILL"):
        process.wait(waiting[1], 10)
    assert not process.folder.exists()


STARTS = """
from roll_td.strategies.vllm.process import EngineProcess

engine = EngineProcess("me", {})
"""
GENERATES = """
from roll_td.config.model import GenerationConfig, ModelConfig
from roll_td.strategies.vllm.strategy import VllmInfer
from tests.vllm.conftest import FIELDS, context, strong
from tests.vllm.test_generate import prompts

strategy = VllmInfer(context(2, FIELDS))
strategy.initialize(strong)
engine = strategy._engine
config = GenerationConfig(max_new_tokens=90, num_return_sequences=64)
threading.Thread(target=strategy.generate, args=(prompts(), config, 0), daemon=True).start()
"""
OWNER = """
import os, threading, time
{does}
print("engine", engine.process.pid, flush=True)
print("folder", engine.folder, flush=True)
print("pid of owner:", os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "does, processes, is_stopped",
    [(STARTS, 3, False), (STARTS, 3, True), (GENERATES, 6, True)],
    ids=["starts", "starts, stopped", "generates, stopped"],
)
def test_l04_no_process_of_an_engine_outlives_its_worker(
    does: str, processes: int, is_stopped: bool
) -> None:
    """On two devices: owner, engine, its guard, its two workers, and what tracks their memory."""
    shared = set(os.listdir("/dev/shm"))
    job = Job(["-c", OWNER.format(does=does)], PYTHONPATH=str(HERE.parents[1]))
    owner = int(job.wait_for("pid of owner: ", 240).split()[-1])
    folder = Path(job.wait_for("folder ").split()[1])
    while len(job.processes()) < processes or len(set(map(os.getpgid, job.processes()))) < 3:
        time.sleep(0.01)
    if is_stopped:
        os.killpg(int(job.wait_for("engine ").split()[1]), signal.SIGSTOP)
    os.kill(owner, signal.SIGKILL)
    killed = time.monotonic()
    while job.processes():
        assert time.monotonic() - killed < 5, job.processes()
        time.sleep(0.05)
    assert job.process.wait() == -signal.SIGKILL
    assert not folder.exists()
    assert set(os.listdir("/dev/shm")) <= shared
    job.kill()
