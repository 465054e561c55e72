"""Answers that come and go one by one are those of the blocking call, also over new weights."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from roll_td.config.base import WorkerConfig
from roll_td.config.model import GenerationConfig, ModelConfig
from roll_td.config.strategies import StrategyArgs
from roll_td.distributed.topology import data_parallel, rank_infos
from roll_td.models import full_weights, load_model
from roll_td.protocol import DataProto
from roll_td.strategies.base import StrategyContext
from roll_td.strategies.engine import Answer, Failure
from roll_td.strategies.hf import HfInfer
from roll_td.strategies.parts import Part

FIELDS = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 64,
    "tie_word_embeddings": True, "max_position_embeddings": 40,
}  # fmt: skip
PROMPTS = [[5, 9, 2], [7], [3] * 17, [11, 12, 13, 14, 15], [40, 41], list(range(30))]
N, SEED = 4, 3
GENERATION = GenerationConfig(max_new_tokens=16, num_return_sequences=N, stop_token_ids=[1, 2, 3])


def strategy(batch_size: int = 5, times: float = 8.0) -> HfInfer:
    args = StrategyArgs("hf_infer", {"batch_size": batch_size})
    config = WorkerConfig(name="infer", world_size=1, strategy_args=args)
    place = rank_infos(data_parallel(1))[0]
    model = ModelConfig(config=FIELDS)
    device = torch.device("cpu")
    made = HfInfer(StrategyContext("infer", config, model, place, {}, None, device, 42))

    def strong(config: ModelConfig, seed: int) -> torch.nn.Module:
        loaded = load_model(config, seed)
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.mul_(times if parameter.ndim > 1 else 1)
        return loaded

    made.initialize(strong)
    return made


def asked() -> list[Answer]:
    return [
        Answer(sample_id=row * N + j, prompt=prompt)
        for row, prompt in enumerate(PROMPTS)
        for j in range(N)
    ]


def blocking(infer: HfInfer) -> dict[int, tuple[list[int], torch.Tensor, str]]:
    """Tokens, log-probs and finish reason by sample_id, of the call that waits for all."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in PROMPTS])
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    made = infer.generate(DataProto({"input_ids": ids, "lengths": lengths}), GENERATION, SEED)
    mask = made["response_mask"]
    return {
        n: (
            made["input_ids"][n][mask[n]].tolist(),
            made["infer_log_probs"][n][mask[n]],
            made["finish_reason"][n],
        )
        for n in range(len(made))
    }


def check(answers: list[Answer], want: dict[int, Any]) -> None:
    assert sorted(answer.sample_id for answer in answers) == sorted(want)
    for answer in answers:
        tokens, log_probs, reason = want[answer.sample_id]
        assert (answer.tokens, answer.finish_reason) == (tokens, reason)
        got = torch.tensor(answer.log_probs)
        torch.testing.assert_close(got, log_probs, atol=2e-5, rtol=0)
        assert len(answer.versions) == len(tokens)


def update(infer: HfInfer, other: HfInfer, version: int) -> None:
    weights = full_weights(other.model)
    infer.update_parameter_in_bucket(
        [Part(name, tuple(w.shape), 0, w.reshape(-1)) for name, w in weights]
    )
    infer.process_weights_after_loading(version)


def collect(came: Any, count: int) -> list[Answer]:
    found: list[Answer] = []
    while len(found) < count:
        item = next(came)
        assert not isinstance(item, Failure), item.text
        found += item
    return found


@pytest.mark.parametrize("seed", range(6))
def test_they_come_when_they_like_and_some_are_given_up_for_a_time(seed: int) -> None:
    infer, draws = strategy(), random.Random(seed)
    want = blocking(infer)
    assert {reason for _, _, reason in want.values()} == {"stop", "length"}
    core = infer.open_engine(GENERATION, SEED)._core
    waiting, ended = draws.sample(asked(), N * len(PROMPTS)), []
    while len(ended) < N * len(PROMPTS):
        if waiting and draws.random() < 0.3:
            count = draws.randint(1, 6)
            core.add(waiting[:count])
            waiting = waiting[count:]
        if draws.random() < 0.2:
            given_up = core.abort({draws.randrange(N * len(PROMPTS)) for _ in range(3)})
            assert all(answer.finish_reason == "abort" for answer in given_up)
            waiting += given_up
        if draws.random() < 0.1:
            core.forget()  # of weights that are the same
        ended += core.step()
    check(ended, want)
    assert core.wait_s() is None and not core._contexts


def test_new_weights_make_what_comes_after_them() -> None:
    infer, old, new = strategy(), strategy(), strategy(times=11.0)
    engine = infer.open_engine(GENERATION, SEED)
    core = engine._core
    infer.weight_version = 1
    core.add(asked())
    ended = [answer for _ in range(6) for answer in core.step()]
    core.forget()
    infer.weight_version = 2
    with torch.no_grad():
        for own, others in zip(infer.model.parameters(), new.model.parameters(), strict=True):
            own.copy_(others)
    while core.wait_s() == 0:
        ended += core.step()
    met = 0
    for answer in ended:
        prompt = PROMPTS[answer.sample_id // N]
        for version, of in ((1, old), (2, new)):
            with torch.no_grad():
                logits = of.model(torch.tensor([prompt + answer.tokens])).logits[0]
            log_probs = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
            own = log_probs.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
            by = torch.tensor(answer.versions) == version
            torch.testing.assert_close(
                torch.tensor(answer.log_probs)[by], own[by], atol=2e-5, rtol=0
            )
        met += set(answer.versions) == {1, 2}
        assert answer.versions == sorted(answer.versions)
    assert met >= 3


def test_an_engine_beside_commands() -> None:
    infer, other = strategy(), strategy(times=11.0)
    want = blocking(infer)
    engine = infer.open_engine(GENERATION, SEED)
    came = engine.ended()
    engine.submit(asked())
    with pytest.raises(RuntimeError, match=r"role infer, worker 0: .* while the engine is at work"):
        infer.offload_states()
    check(collect(came, N * len(PROMPTS)), want)
    engine.pause(abort=False, timeout_s=20)
    engine.submit(asked())
    update(infer, other, 2)
    want = blocking(infer)
    engine.resume()
    found = collect(came, N * len(PROMPTS))
    check(found, want)
    assert {version for answer in found for version in answer.versions} == {2}
    engine.close()
