"""What the engine generates, against transformers on the same weights, before and after updates."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from roll_td.config.model import GenerationConfig
from roll_td.models import full_weights, load_tokenizer
from roll_td.protocol import DataProto
from roll_td.strategies import sampling
from roll_td.strategies.parts import Part
from roll_td.strategies.vllm.strategy import VllmInfer
from tests.vllm.conftest import FIELDS, NEEDS_VLLM, context, strong

pytestmark = NEEDS_VLLM
LENGTHS = [70, 1, 33, 64, 9]
"""Beyond whole blocks of the prefix cache, below one, and just whole ones."""
NEW = 20
ENGINES = pytest.mark.parametrize("name", ["one", "two"])


def prompts(**columns: Any) -> DataProto:
    draws = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 99, (len(LENGTHS), max(LENGTHS)), generator=draws)
    ids *= torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    return DataProto({"input_ids": ids, "lengths": torch.tensor(LENGTHS), **columns})


def responses(batch: DataProto) -> list[tuple[list[int], Tensor]]:
    """Tokens and log-probs of each row."""
    columns = (batch["input_ids"], batch["infer_log_probs"], batch["response_mask"])
    return [
        (ids[mask].tolist(), log_probs[mask]) for ids, log_probs, mask in zip(*columns, strict=True)
    ]


def logits_after(model: Any, prompt: list[int], tokens: list[int]) -> Tensor:
    """float32 (tokens, V): what each token was drawn from."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([prompt + tokens])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def check_greedy(engine: VllmInfer, model: Any, version: int) -> None:
    """Tokens as transformers' generate has them, log-probs to 1e-4."""
    batch, end = prompts(), load_tokenizer(engine.context.model).eos_token_id
    made = engine.generate(batch.clone(), GenerationConfig(temperature=0, max_new_tokens=NEW), 0)
    for row, (tokens, log_probs) in enumerate(responses(made)):
        prompt = batch["input_ids"][row, : LENGTHS[row]].tolist()
        wanted = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=end,
        )
        assert tokens == wanted[0, len(prompt) :].tolist(), (version, row)
        own = logits_after(model, prompt, tokens).log_softmax(-1)
        assert torch.equal(own.argmax(-1), torch.tensor(tokens)), "no near tie"
        worst = (own.amax(-1) - log_probs).abs().max()
        assert worst <= 1e-4, (version, row, worst)
    versions = made["weight_version"]
    assert torch.equal(versions, made["response_mask"].int() * version)


def update(engine: VllmInfer, model: Any, version: int, most: int = 5000) -> None:
    """Give it the model's weights, in buckets of one part each of at most so many numbers, in
    memory that is used again."""
    for name, weight in full_weights(model):
        cuts = [*range(0, weight.numel(), most), weight.numel()]
        for start, end in pairwise(cuts):
            values = weight.reshape(-1)[start:end].clone()
            engine.update_parameter_in_bucket([Part(name, tuple(weight.shape), start, values)])
            values.fill_(torch.nan)
    engine.process_weights_after_loading(version)


@ENGINES
@pytest.mark.timeout(400)
def test_greedy_is_transformers_before_and_after_ten_updates(
    name: str, request: pytest.FixtureRequest
) -> None:  # E01, E03, E08, E09
    engine = request.getfixturevalue(name)
    config = engine.context.model
    check_greedy(engine, strong(config, 42), engine.weight_version)
    seen = set()
    for version in range(1, 11):
        model = strong(config, 100 + version)
        update(engine, model, version)
        check_greedy(engine, model, version)
        made = engine.generate(prompts(), GenerationConfig(temperature=0, max_new_tokens=NEW), 0)
        seen.add(tuple(responses(made)[0][0]))
    assert len(seen) == 10, "each update gave other answers"


@ENGINES
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (7, 1.0), (0, 0.8)])
def test_log_probs_are_of_the_distribution_sampled_from(
    name: str, top_k: int, top_p: float, request: pytest.FixtureRequest
) -> None:
    engine = request.getfixturevalue(name)
    model = strong(engine.context.model, 5)
    update(engine, model, 11)
    config = GenerationConfig(temperature=0.7, top_k=top_k, top_p=top_p, max_new_tokens=NEW)
    batch = prompts()
    made = engine.generate(batch.clone(), config, 3)
    likeliest = 0
    for row, (tokens, log_probs) in enumerate(responses(made)):
        prompt = batch["input_ids"][row, : LENGTHS[row]].tolist()
        kept, ids = sampling.kept(logits_after(model, prompt, tokens) / 0.7, top_k, top_p)
        columns = torch.tensor(tokens)[:, None]
        place = columns if ids is None else (ids == columns).int().argmax(-1, keepdim=True)
        assert ids is None or bool((ids == columns).any(-1).all()), "none that was cut off"
        assert (kept.gather(-1, place)[:, 0] - log_probs).abs().max() <= 1e-4
        likeliest += int((kept.argmax(-1, keepdim=True) == place).sum())
    assert 0 < likeliest < made["response_mask"].sum(), "it samples"


def test_a_response_depends_on_seed_and_sample_alone(one: VllmInfer) -> None:
    config = GenerationConfig(num_return_sequences=3, max_new_tokens=NEW)
    ids = torch.tensor([40, 7, 3, 11, 5])
    whole = responses(one.generate(prompts(sample_id=ids), config, 1))
    again = responses(one.generate(prompts(sample_id=ids)[[3, 1]], config, 1))
    other = responses(one.generate(prompts(sample_id=ids), config, 2))
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in whole[9:12] + whole[3:6]]
    assert len({tuple(tokens) for tokens, _ in whole + other}) == 2 * len(whole)
    # sample j of sample_id i is sample 0 of i * n + j
    flat = config.num_return_sequences * ids.repeat_interleave(3) + torch.arange(3).repeat(5)
    alone = prompts().repeat(3)
    alone.update({"sample_id": flat})
    single = GenerationConfig(max_new_tokens=NEW)
    assert [t for t, _ in responses(one.generate(alone, single, 1))] == [t for t, _ in whole]


def test_seeds_of_samples_draw_the_distribution(one: VllmInfer) -> None:
    count, batch = 2000, prompts()[[2]]
    made = one.generate(batch, GenerationConfig(num_return_sequences=count, max_new_tokens=1), 9)
    seen = Counter(tokens[0] for tokens, _ in responses(made))
    probs = {tokens[0]: float(log_probs[0].exp()) for tokens, log_probs in responses(made)}
    for token, p in probs.items():
        # five standard deviations of a binomial count, and one for small ones
        assert abs(seen[token] - count * p) <= 5 * (count * p * (1 - p)) ** 0.5 + 1, (token, p)
    assert len(probs) > 5


def test_what_ends_a_response(one: VllmInfer) -> None:
    """A token, the string that a token completes, and the most tokens; ends are in the response."""
    tokenizer = load_tokenizer(one.context.model)
    batch = prompts()[[4]]
    free = GenerationConfig(max_new_tokens=40)
    (tokens, log_probs), *_ = responses(one.generate(batch.clone(), free, 4))
    stops = [token for token in tokens[5:] if tokens.count(token) == 1]
    at = tokens.index(stops[0])

    def stopped(**given: Any) -> tuple[list[int], Tensor, str]:
        made = one.generate(batch.clone(), GenerationConfig(**{"max_new_tokens": 40} | given), 4)
        return *responses(made)[0], made["finish_reason"][0]

    got, at_token, reason = stopped(stop_token_ids=[tokens[at]])
    assert (got, reason) == (tokens[: at + 1], "stop")
    assert torch.equal(at_token, log_probs[: at + 1])
    text = tokenizer.decode(tokens[at - 1 : at + 1], skip_special_tokens=False)
    got, at_string, reason = stopped(stop=[text, "never"])
    assert (got, reason) == (tokens[: at + 1], "stop")
    assert torch.equal(at_string, log_probs[: at + 1])
    assert stopped(max_new_tokens=6)[::2] == (tokens[:6], "length")


def test_a_response_ends_where_the_model_ends(one: VllmInfer) -> None:
    long = torch.randint(3, 99, (3, 170), generator=torch.Generator().manual_seed(1))
    batch = DataProto({"input_ids": long, "lengths": torch.tensor([157, 159, 155])})
    config = GenerationConfig(temperature=0, max_new_tokens=10)
    made = one.generate(batch, config, 0)
    assert [len(tokens) for tokens, _ in responses(made)] == [3, 1, 5]
    assert list(made["finish_reason"]) == ["length"] * 3
    with pytest.raises(
        ValueError, match=r"generation\.temperature=0\.001: vLLM samples at 0 and fr"
    ):
        one.generate(batch, GenerationConfig(temperature=0.001), 0)
    for length, said in ((0, "prompt 8 is empty"), (160, "prompt 8 has 160 tokens, and max_model")):
        wrong = {"lengths": torch.tensor([3, length, 1]), "sample_id": torch.tensor([7, 8, 9])}
        with pytest.raises(ValueError, match=said):
            one.generate(DataProto({"input_ids": long, **wrong}), config, 0)


@pytest.mark.timeout(100)
def test_what_vllm_refuses_is_told_with_what_was_given() -> None:
    refused = VllmInfer(context(1, FIELDS, scheduling_policy="best"))
    said = (
        r"(?s)role infer, worker 0: .*Input should be 'fcfs' or 'priority'.*vLLM doesn't start "
        r"with strategy_config=\{.*'scheduling_policy': 'best'\} for this model; change"
    )
    with pytest.raises(ValueError, match=said):
        refused.initialize(strong)
    refused.close()
