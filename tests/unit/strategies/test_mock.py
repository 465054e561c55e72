import math
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from roll_td.config.base import WorkerConfig
from roll_td.config.model import GenerationConfig, ModelConfig
from roll_td.config.strategies import StrategyArgs
from roll_td.distributed.topology import data_parallel, rank_infos
from roll_td.protocol import DataProto
from roll_td.strategies.base import StrategyContext
from roll_td.strategies.mock import MockInfer
from roll_td.strategies.parts import Part


def strategy(**settings):
    args = StrategyArgs("mock_infer", settings)
    config = WorkerConfig(name="mock", world_size=1, strategy_args=args)
    place = rank_infos(data_parallel(1))[0]
    context = StrategyContext(
        "mock", config, ModelConfig(), place, {}, None, torch.device("cpu"), 42
    )
    made = MockInfer(context)
    made.initialize(lambda *_: pytest.fail("a mock has no model"))
    return made


def prompts(rows=12):
    draws = torch.Generator().manual_seed(7)
    ids = torch.randint(1000, (rows, 4), generator=draws)
    lengths = torch.arange(rows) % 4 + 1
    return DataProto({"input_ids": ids * (torch.arange(4) < lengths[:, None]), "lengths": lengths})


def columns(infer, micro, output):
    loss = infer.op_compute_language_loss(output, micro["labels"])
    return {
        "log_probs": infer.op_compute_log_probs(output, micro["input_ids"], 0.7),
        "entropy": infer.op_compute_entropy(output),
        "loss": loss.expand(len(micro)),
    }


def test_responses_follow_the_config_and_have_the_log_probs_of_a_forward_step():
    infer = strategy(min_tokens=2, max_tokens=9, vocab_size=16)
    config = GenerationConfig(max_new_tokens=7, num_return_sequences=4)
    out = infer.generate(prompts(), config, seed=3)
    counts = out["response_mask"].sum(1)
    assert set(counts.tolist()) == {2, 3, 4, 5, 6, 7}
    assert torch.equal(out["lengths"] - counts, prompts().repeat(4)["lengths"])
    reasons = ["length" if count == 7 else "stop" for count in counts]
    assert out["finish_reason"].tolist() == reasons
    sampled = out["input_ids"][out["response_mask"]]
    assert set(sampled.tolist()) == set(range(16))
    out.update({"labels": out["input_ids"].masked_fill(~out["response_mask"], -100)})
    again = infer.forward_step(out, partial(columns, infer))
    logs = again["log_probs"] * out["response_mask"]
    torch.testing.assert_close(out["infer_log_probs"], logs, atol=0, rtol=0)
    assert ((logs > -4) & (logs <= 0)).all()
    assert len(set(logs[out["response_mask"]].tolist())) > 100
    # 48 rows in micro-batches of 8
    torch.testing.assert_close(again["loss"][::8], -logs.view(6, -1).sum(1))
    inside = (torch.arange(logs.shape[1]) > 0) & (
        torch.arange(logs.shape[1]) < out["lengths"][:, None]
    )
    torch.testing.assert_close(again["entropy"], inside * math.log(16))
    assert ((again["log_probs"] != 0) == inside).all()


def test_a_sample_says_the_same_wherever_it_is():
    config = GenerationConfig(max_new_tokens=7, num_return_sequences=2)
    want = strategy().generate(prompts(), config, seed=3)
    assert torch.equal(
        strategy().generate(prompts(), config, seed=3)["input_ids"], want["input_ids"]
    )
    other = strategy().generate(prompts(), config, seed=4)
    assert not torch.equal(other["lengths"], want["lengths"])
    named = prompts()
    named.update({"sample_id": torch.arange(12)})
    part = strategy().generate(named[5:], config, seed=3)
    assert torch.equal(part["lengths"], want["lengths"][10:])
    width = part["input_ids"].shape[1]
    assert torch.equal(part["input_ids"], want["input_ids"][10:, :width])


def test_latency_and_faults_are_those_configured():
    infer = strategy(latency_s=0.05, fail_on_call=2)
    started = time.perf_counter()
    infer.generate(prompts(), GenerationConfig(max_new_tokens=2), seed=0)
    infer.forward_step(prompts(), lambda micro, output: {})
    assert 0.1 <= time.perf_counter() - started < 5
    with pytest.raises(RuntimeError, match="call 2 fails, as fail_on_call says"):
        infer.generate(prompts(), GenerationConfig(), seed=0)
    infer.forward_step(prompts(), lambda micro, output: {})


def test_it_takes_any_weights_and_stamps_their_version():
    infer, config = strategy(), GenerationConfig(max_new_tokens=5)
    assert infer.setup_model_update() is None
    infer.update_parameter_in_bucket([Part("a", (1,), 0, torch.ones(1))])
    infer.process_weights_after_loading(3)
    out = infer.generate(prompts(), config, seed=1)
    assert torch.equal(out["weight_version"], out["response_mask"].int() * 3)
    infer.offload_states()
    infer.load_states({"model"})


def test_a_mock_needs_no_transformers():
    code = "import sys, roll_td.strategies.mock; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0


def test_lengths_may_have_a_long_tail_and_belong_to_a_prompt():
    generation = GenerationConfig(max_new_tokens=1000, num_return_sequences=50)
    rows = DataProto({"input_ids": torch.arange(40)[:, None], "lengths": torch.ones(40).long()})
    tail = {"tail": 1.25, "min_tokens": 12, "max_tokens": 500}
    drawn = strategy(**tail).generate(rows, generation, 1)["response_mask"].sum(1)
    assert drawn.min() == 12 and drawn.max() == 500
    # of a Pareto distribution that is cut: the share below x is 1 - (12 / x) ** 1.25
    for most in (13, 20, 40, 100, 400):
        share = 1 - (12 / most) ** 1.25
        assert (drawn < most).double().mean().item() == pytest.approx(share, abs=0.03), most
    own = strategy(**tail, lengths_of="prompt").generate(rows, generation, 1)["response_mask"]
    own = own.sum(1).view(40, 50)
    assert (own == own[:, :1]).all() and len(set(own[:, 0].tolist())) > 20
