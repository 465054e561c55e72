"""What works without vLLM: the settings, the shared memory, and the end of a process group."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from inspect import signature
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from roll_td.config.load import load
from roll_td.config.model import LoraConfig, ModelConfig
from roll_td.config.schema import ConfigError
from roll_td.config.strategies import StrategyArgs, VllmConfig
from roll_td.models import adapter_weights, load_model
from roll_td.strategies.parts import Weight
from roll_td.strategies.vllm import adapters
from roll_td.strategies.vllm.process import end_group
from roll_td.strategies.vllm.shared import Handle, SharedWeights, for_engine
from roll_td.strategies.vllm.strategy import VllmInfer
from tests.vllm.conftest import FIELDS, context

CONFIGS = Path(__file__).parents[2] / "configs"
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def test_further_settings_are_the_engines() -> None:
    given = {"sleep_level": 2, "max_model_len": 512, "gpu_memory_utilization": None}
    assert StrategyArgs("vllm", given).settings == VllmConfig(
        sleep_level=2, engine_args={"max_model_len": 512}
    )


def test_settings_that_others_say_are_refused() -> None:
    given = {"dtype": "float32", "tensor_parallel_size": 2, "load_format": "auto", "sleep_level": 3}
    with pytest.raises(ConfigError) as raised:
        StrategyArgs("vllm", given)
    assert str(raised.value).splitlines() == [
        "strategy_config.sleep_level=3: must be one of 1, 2",
    ]
    del given["sleep_level"]
    given["request_timeout_s"] = 0
    with pytest.raises(ConfigError) as raised:
        StrategyArgs("vllm", given)
    assert str(raised.value).splitlines() == [
        "strategy_config.dtype='float32': is said by model.dtype; set model.dtype",
        "strategy_config.tensor_parallel_size=2: is said by num_gpus_per_worker; set "
        "num_gpus_per_worker",
        "strategy_config.load_format='auto': is fixed: weights come from the worker's rank; leave "
        "it out",
        "strategy_config.request_timeout_s=0.0: must be above 0 seconds",
    ]
    with pytest.raises(ConfigError) as raised:
        StrategyArgs("vllm", {"lora": "adapters", "enable_lora": True, "sleep_level": 2})
    assert str(raised.value).splitlines() == [
        "strategy_config.enable_lora=True: is said by strategy_config.lora; set "
        "strategy_config.lora",
        "strategy_config.sleep_level=2: drops weights, and lora=adapters has no copy of them; set "
        "it to 1",
    ]
    with pytest.raises(ConfigError, match="weights_on=device: is for whole weights, and lora=ad"):
        StrategyArgs("vllm", {"lora": "adapters", "weights_on": "device"})


def test_on_a_cpu_weights_wait_in_host_memory() -> None:
    said = "role infer: strategy_config.weights_on=device, and its worker 0 has no GPU; set weig"
    with pytest.raises(ValueError, match=said):
        VllmInfer(context(1, FIELDS, weights_on="device"))
    on_gpu = replace(context(1, FIELDS, weights_on="device"), device=torch.device("cuda", 1))
    assert VllmInfer(on_gpu)._weights_on == torch.device("cuda", 1)
    assert VllmInfer(context(1, FIELDS))._weights_on == torch.device("cpu")


def test_on_a_cpu_there_are_no_stages() -> None:
    said = "role infer: strategy_config.pipeline_parallel_size=2: vLLM 0.32 fails with stages on CP"
    with pytest.raises(ValueError, match=said):
        VllmInfer(context(2, FIELDS, pipeline_parallel_size=2))


def test_a_handle_of_a_gpus_memory_names_the_engines_first_device() -> None:
    names = list(signature(rebuild_cuda_tensor).parameters)
    function, arguments = for_engine((rebuild_cuda_tensor, tuple(range(100, 100 + len(names)))))
    assert function is rebuild_cuda_tensor
    given = dict(zip(names, range(100, 100 + len(names)), strict=True)) | {"storage_device": 0}
    assert dict(zip(names, arguments, strict=True)) == given


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's
def test_adapters_are_written_as_peft_reads_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = LoraConfig(rank=4, alpha=6, target_modules=["q_proj", "down_proj"])
    own = load_model(ModelConfig(config=FIELDS, lora=lora), 0)
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    adapters.write(tmp_path, dict(adapter_weights(own)), lora)
    base = load_model(ModelConfig(config=FIELDS), 0)
    ids = torch.arange(10)[None]
    without = base(ids).logits
    read = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(read(ids).logits, own(ids).logits, atol=1e-5, rtol=1e-5)
    assert (without - own(ids).logits).abs().max() > 0.1
    assert [adapters.most_rank(LoraConfig(rank=rank)) for rank in (1, 4, 8, 9)] == [1, 8, 8, 16]
    with pytest.raises(ValueError, match="rank=513: vLLM takes at most 512"):
        adapters.most_rank(LoraConfig(rank=513))


def test_the_quick_starts_variant_is_the_quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    plain, variant = (
        load(str(CONFIGS / "rlvr" / name)) for name in ("quickstart.yaml", "quickstart_vllm.yaml")
    )
    settings = variant.actor_infer.strategy_args.settings
    assert set(settings.engine_args) == {"max_model_len", "max_num_seqs", "kv_cache_memory_bytes"}
    variant.actor_infer.strategy_args = plain.actor_infer.strategy_args
    variant.exp_name, variant.export_dir = plain.exp_name, plain.export_dir
    assert variant == plain


def _double(handle: Handle, weights: dict[str, Weight]) -> None:
    shared = SharedWeights.at(handle, weights)
    for tensor in shared.state_dict().values():
        tensor.mul_(2)
    shared.settle()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=NEEDS_GPU)])
def test_weights_are_shared_with_another_process(device: str) -> None:
    draws = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5, generator=draws),
        "b": torch.randn(7, generator=draws).bfloat16(),
        "scalar": torch.tensor(4.0),
        "none": torch.empty(0, 3),
        "c": torch.arange(6).view(2, 3),
    }
    shared = SharedWeights.holding(tensors, torch.device(device))
    shared.settle()
    before = set(os.listdir("/dev/shm"))
    process = get_context("spawn").Process(target=_double, args=(shared.handle, shared.weights))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert list(shared.state_dict()) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(shared[name].cpu(), 2 * tensor), name
        assert shared[name].dtype == tensor.dtype
    if device == "cpu":
        assert set(os.listdir("/dev/shm")) == before, "it has no name"


CHILD = """
import os, sys, time
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
memory, lock = SharedMemory(create=True, size=100), get_context("spawn").Lock()
if os.fork():
    print(memory.name, "sem." + lock._semlock.name[1:], flush=True)
time.sleep(600)
"""


def test_a_group_ends_with_its_shared_memory() -> None:
    mine = SharedMemory(create=True, size=100)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    names = child.stdout.readline().split()
    assert {*names} <= {*os.listdir("/dev/shm")} and len(names) == 2
    end_group(child.pid)
    assert child.wait() == -9
    assert child.stdout.read() == "", "the forked one is gone too, and holds it open no longer"
    child.stdout.close()
    assert not {*names} & {*os.listdir("/dev/shm")}
    assert Path("/dev/shm", mine.name).exists()
    mine.close()
    mine.unlink()
