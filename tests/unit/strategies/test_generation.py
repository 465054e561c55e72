import itertools
import random

import pytest
import torch

from roll_td.config.model import GenerationConfig, ModelConfig
from roll_td.models import load_model
from roll_td.strategies import generation
from roll_td.strategies.generation import Sample, Sampler, Stop
from roll_td.strategies.sampling import generator

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 64,
}
WINDOW = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
KINDS = {
    "qwen3": SMALL | {"head_dim": 16, "tie_word_embeddings": True},
    "llama": SMALL,
    "qwen2": SMALL | WINDOW,  # layer 0 sees all, layer 1 six tokens
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    | {"bos_token_id": 1, "eos_token_id": 2},
}
LENGTHS = [5, 1, 17, 9, 9, 3, 12, 30, 2, 8]


def model(kind="qwen3", **how):
    made = load_model(ModelConfig(config={"model_type": kind, **KINDS[kind]}, **how), seed=0)
    with torch.no_grad():
        # no token most likely by a hair, and not the one before again, as tied weights have it
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    return made


def prompts(lengths=LENGTHS):
    draws = torch.Generator().manual_seed(7)
    return [torch.randint(64, (length,), generator=draws) for length in lengths]


def responses(model, prompts, config, stop=(), batch_size=64, ids=None):
    """The samples of all prompts, in row order."""
    n = config.num_return_sequences
    samples = [
        Sample(
            prompt=row,
            prompt_tokens=len(prompt),
            most_tokens=config.max_new_tokens,
            random=generator(11, (ids[row] if ids else row) * n + j),
        )
        for row, prompt in enumerate(prompts)
        for j in range(n)
    ]
    stop = stop if isinstance(stop, Stop) else Stop(stop)
    with torch.inference_mode():
        Sampler(model, config, stop, batch_size, prompts, samples).run()
    return samples


def of_transformers(model, prompt, **how):
    how |= {"pad_token_id": 0, "max_new_tokens": 24}
    with torch.no_grad():
        mask = torch.ones_like(prompt)[None]
        ids = model.generate(prompt[None], attention_mask=mask, do_sample=False, **how)
    return ids[0, len(prompt) :].tolist()


def log_probs_of_full_forward(model, prompt, tokens, temperature):
    ids = torch.cat([prompt, torch.tensor(tokens)])[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].float() / temperature
    predicted = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return predicted.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [3, 64])
def test_greedy_gives_the_tokens_of_transformers(kind, batch_size):
    """Uneven prompts, ends at different lengths, waiting rows, a window shorter than a row."""
    policy, ends = model(kind), [3, 4, 5, 6]
    config = GenerationConfig(max_new_tokens=24, temperature=0)
    ours = responses(policy, prompts(), config, ends, batch_size)
    theirs = [of_transformers(policy, prompt, eos_token_id=ends) for prompt in prompts()]
    assert [sample.tokens for sample in ours] == theirs
    assert len({len(tokens) for tokens in theirs}) > 2, "all of one length: nothing left the batch"
    for sample in ours:
        assert sample.finish_reason == ("stop" if sample.tokens[-1] in ends else "length")


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_log_probs_are_those_of_a_full_forward(kind):
    policy = model(kind)
    config = GenerationConfig(max_new_tokens=40, temperature=1.5, num_return_sequences=3)
    for sample in responses(policy, prompts(), config, [3, 4], batch_size=5):
        want = log_probs_of_full_forward(
            policy, prompts()[sample.prompt], sample.tokens, temperature=1.5
        )
        torch.testing.assert_close(torch.tensor(sample.log_probs), want, atol=1e-4, rtol=0)


def test_log_probs_are_of_the_distribution_left_by_top_k_and_top_p():
    policy = model()
    config = GenerationConfig(max_new_tokens=12, temperature=1.5, top_k=9, top_p=0.7)
    for sample in responses(policy, prompts(), config):
        ids = torch.cat([prompts()[sample.prompt], torch.tensor(sample.tokens)])
        with torch.no_grad():
            logits = policy(input_ids=ids[None]).logits[0] / 1.5
        start = len(ids) - len(sample.tokens)
        for at, token, log_prob in zip(
            range(start, len(ids)), sample.tokens, sample.log_probs, strict=True
        ):
            values, order = logits[at - 1].sort(descending=True)
            probs = values[:9].softmax(-1)
            keep = int((probs.cumsum(-1) < 0.7).sum()) + 1
            of_kept = (probs[:keep] / probs[:keep].sum()).log()
            assert token in order[:keep].tolist()
            where = order.tolist().index(token)
            assert log_prob == pytest.approx(of_kept[where].item(), abs=1e-4)


def test_batching_changes_no_token_and_log_probs_by_rounding_alone():
    """F21: rows alone, in twos, with waiting ones, all at once."""
    policy = model()
    config = GenerationConfig(max_new_tokens=30, num_return_sequences=3)
    want = responses(policy, prompts(), config, [3, 4])
    for batch_size in (1, 2, 7):
        got = responses(policy, prompts(), config, [3, 4], batch_size)
        for sample, one in zip(got, want, strict=True):
            assert sample.tokens == one.tokens
            assert sample.log_probs == pytest.approx(one.log_probs, abs=1e-5)
            assert sample.finish_reason == one.finish_reason
    assert [sample.tokens for sample in want[:3]] != [want[0].tokens] * 3


def test_same_call_is_bit_equal_and_what_neighbours_say_does_not_matter():
    policy, config = model(), GenerationConfig(max_new_tokens=20)
    rows = prompts([9, 9, 9, 9])
    first, again = (responses(policy, rows, config, batch_size=4) for _ in range(2))
    assert [s.log_probs for s in first] == [s.log_probs for s in again]
    others = [rows[0], *(63 - row for row in rows[1:])]
    beside = responses(policy, others, config, batch_size=4)
    assert beside[0].tokens == first[0].tokens
    assert beside[0].log_probs == first[0].log_probs
    assert beside[1].tokens != first[1].tokens


def test_a_row_elsewhere_with_the_same_sample_id_says_the_same():
    policy, config = model(), GenerationConfig(max_new_tokens=20, num_return_sequences=2)
    want = responses(policy, prompts(), config)
    got = responses(policy, prompts()[::-1], config, ids=list(range(len(LENGTHS)))[::-1])
    for row in range(len(LENGTHS)):
        for j in range(2):
            assert got[2 * (len(LENGTHS) - 1 - row) + j].tokens == want[2 * row + j].tokens


def test_a_prompt_is_computed_once_for_all_its_samples(monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 40)
    policy, seen = model(), []
    hook = policy.get_decoder().register_forward_pre_hook(
        lambda module, args, given: seen.append(given["input_ids"].shape), with_kwargs=True
    )
    config = GenerationConfig(max_new_tokens=6, num_return_sequences=5)
    got = responses(policy, prompts(), config, batch_size=4)
    hook.remove()
    prefills = [shape for shape in seen if shape[1] > 1]
    assert sum(shape[0] for shape in prefills) == len([n for n in LENGTHS if n > 1])
    assert all(shape[0] * shape[1] <= 40 for shape in prefills)
    want = responses(policy, prompts(), config)
    assert [sample.tokens for sample in got] == [sample.tokens for sample in want]


def test_samples_are_computed_once_as_long_as_they_are_alike():
    policy, seen = model(), []
    policy.get_decoder().register_forward_pre_hook(
        lambda module, args, given: seen.append(given["input_ids"].shape), with_kwargs=True
    )
    config = GenerationConfig(max_new_tokens=12, temperature=0.1, num_return_sequences=6)
    rows = prompts([5, 2, 17, 9])
    got = responses(policy, rows, config, [3, 4])
    begun = [(s.prompt, *s.tokens[:at]) for at in range(1, 12) for s in got if len(s.tokens) > at]
    computed = sum(shape[0] for shape in seen if shape[1] == 1)
    assert computed == len(set(begun)) < 0.7 * len(begun)
    want = responses(policy, rows, config, [3, 4], batch_size=1)
    for sample, alone in zip(got, want, strict=True):
        assert sample.tokens == alone.tokens
        assert sample.log_probs == pytest.approx(alone.log_probs, abs=1e-4)


def test_finished_rows_leave_the_batch_and_waiting_ones_enter():
    policy, seen = model(), []
    policy.get_decoder().register_forward_pre_hook(
        lambda module, args, given: seen.append(len(given["input_ids"])), with_kwargs=True
    )
    config = GenerationConfig(max_new_tokens=40)
    got = responses(policy, prompts([6] * 24), config, range(8), batch_size=8)
    tokens = sum(len(sample.tokens) for sample in got)
    # a token each comes of the prefill; every other one took one row of one step
    assert sum(seen) == tokens
    assert max(seen) == 8
    assert len(seen) < 0.75 * sum(max(len(s.tokens) for s in got[i : i + 8]) for i in (0, 8, 16))


def of_rows(rows):
    """Keys and values of right-padded prompts: in layers 0 and 2, two heads, sizes 1 and 3."""
    states = generation.KeyValues()
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    for layer in (0, 2):
        keys = (padded + 10_000.0 * layer)[:, None, :, None].expand(-1, 2, -1, 1)
        states.append(layer, keys, keys.expand(-1, -1, -1, 3) + 0.5)
    return states


@pytest.mark.parametrize("seed", range(5))
def test_slots_hold_each_row_s_own_states_and_no_stray_number(seed, monkeypatch):
    """0 · NaN is NaN: columns that a mask hides must hold numbers, not unused memory."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *size: empty(self, *size).fill_(torch.nan)
    )
    draw = random.Random(seed)
    slots, rows, numbers = generation.Slots(), [], itertools.count(1)
    for _ in range(120):
        action = draw.choice(["place", "copy", "drop", "step", "step", "step", "step"])
        if action == "place" and len(rows) < 6:
            new = [[next(numbers) for _ in range(draw.randint(1, 40))] for _ in range(3)]
            picked = [draw.randrange(3) for _ in range(draw.randint(1, 3))]
            lengths, most = [len(new[number]) for number in picked], len(rows) + len(picked) + 2
            slots.place(of_rows(new), picked, lengths, most)
            rows += [list(new[number]) for number in picked]
        elif action == "copy" and rows and len(rows) < slots.rows:
            picked = [draw.randrange(len(rows)) for _ in range(slots.rows - len(rows))]
            slots.copy(picked)
            rows += [list(rows[number]) for number in picked]
        elif action == "drop" and rows:
            row = draw.randrange(len(rows))
            slots.drop(row)
            rows[row] = rows[-1]
            rows.pop()
            slots.narrow(max(map(len, rows), default=0))
        elif action == "step" and rows:
            slots.reserve(len(rows) + 2)
            for row in rows:
                row.append(next(numbers))
            for layer, states in of_rows([[row[-1]] for row in rows]).layers.items():
                keys, values = slots.append(layer, *states)
                assert keys.isfinite().all()
                assert values.isfinite().all()
                for row, own in enumerate(rows):
                    want = torch.tensor(own) + 10_000.0 * layer
                    assert torch.equal(keys[row, 1, -len(own) :, 0], want)
                    assert torch.equal(values[row, 0, -len(own) :, 2], want + 0.5)
            slots.end += 1


def test_a_sampled_padding_token_is_a_token():
    """transformers masks ids equal to pad; here lengths alone count."""
    policy = model()
    config = GenerationConfig(max_new_tokens=30, num_return_sequences=4)
    got = responses(policy, prompts(), config)
    inside = [s for s in got if 0 in s.tokens[:-1]]
    assert inside, "no sample has token 0 in its midst: the test shows nothing"
    for sample in inside:
        want = log_probs_of_full_forward(policy, prompts()[sample.prompt], sample.tokens, 1.0)
        torch.testing.assert_close(torch.tensor(sample.log_probs), want, atol=1e-4, rtol=0)


WORDS = [chr(97 + n % 26) * (1 + n // 26) for n in range(64)]


def spell(ids):
    return "".join(WORDS[token] for token in ids)


def test_a_stop_string_ends_the_response_at_the_token_that_completes_it():
    """F22: ids stay as sampled, nothing is appended, and there is a log-prob for each."""
    policy, config = model(), GenerationConfig(max_new_tokens=120, temperature=1.5)
    free = responses(policy, prompts(), config)
    strings = [spell(s.tokens)[at : at + 3] for s, at in zip(free, range(20, 60, 4), strict=True)]
    ended = 0
    for sample, full in zip(
        responses(policy, prompts(), config, Stop([], strings, spell)), free, strict=True
    ):
        count = len(sample.tokens)
        assert sample.tokens == full.tokens[:count]
        assert len(sample.log_probs) == count
        assert not any(string in spell(sample.tokens[:-1]) for string in strings)
        found = any(string in spell(sample.tokens) for string in strings)
        assert sample.finish_reason == ("stop" if found else "length")
        ended += found
    assert ended >= 5


def test_a_stop_string_is_looked_for_in_a_short_tail_only():
    read = []

    def decode(ids):
        read.append(len(ids))
        return spell(ids)

    stop, sample = Stop([], ["!!!!"], decode), Sample(most_tokens=1000)
    for token in range(900):
        sample.tokens.append(token % 26)
        assert stop.reason(sample) == ""
    assert max(read) <= 64
    stop.strings = ["uvwxyz"]  # longer than the 4 that Stop was told of, yet in the tail
    sample.tokens += range(26)
    assert stop.reason(sample) == "stop"


def test_a_stop_string_may_have_tokens_of_any_length():
    words = ["w" * 100, "q", "x" * 30, "x" * 30, "y", "z"]
    stop = Stop([], ["".join(words[1:])], lambda ids: "".join(words[token] for token in ids))
    sample = Sample(most_tokens=100)
    for token in range(6):
        sample.tokens.append(token)
        assert stop.reason(sample) == ("stop" if token == 5 else "")


def test_a_stop_string_in_characters_cut_over_tokens():
    text = "a€b€".encode()
    stop = Stop([], ["€"], lambda ids: bytes(ids).decode(errors="replace"))
    sample = Sample(most_tokens=100)
    for count in range(1, 5):
        sample.tokens = list(text[:count])
        assert stop.reason(sample) == ("stop" if count == 4 else "")


def test_the_end_token_wins_over_the_length():
    stop, sample = Stop([5]), Sample(most_tokens=2, tokens=[1, 5])
    assert stop.reason(sample) == "stop"
    sample.tokens = [1, 2]
    assert stop.reason(sample) == "length"
