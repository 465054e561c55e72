from functools import partial

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from roll_td.config.base import WorkerConfig
from roll_td.config.model import GenerationConfig, LoraConfig, ModelConfig, TrainingConfig
from roll_td.config.strategies import StrategyArgs
from roll_td.distributed.topology import data_parallel, rank_infos
from roll_td.models import full_weights, load_model
from roll_td.plan import level, local
from roll_td.protocol import DataProto
from roll_td.strategies.base import StrategyContext
from roll_td.strategies.hf import HfInfer
from roll_td.strategies.parts import Part

FIELDS = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}
LENGTHS = [5, 1, 17, 9, 9, 3, 12]


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def context(fields=FIELDS, batch_size=4, packing=True, micro_batch_size=3, group=None, **model):
    model = ModelConfig(config=fields, **model) if fields else ModelConfig(**model)
    args = StrategyArgs("hf_infer", {"batch_size": batch_size})
    training = TrainingConfig(packing=packing, micro_batch_size=micro_batch_size)
    config = WorkerConfig(name="infer", world_size=1, strategy_args=args, training=training)
    place = rank_infos(data_parallel(1))[0]
    return StrategyContext(
        "infer", config, model, place, {"world": group}, None, torch.device("cpu"), 42
    )


def strong(config, seed):
    """Weights far from those that make all tokens equally likely."""
    model = load_model(config, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    return model


def strategy(*args, provider=strong, **kwargs):
    made = HfInfer(context(*args, **kwargs))
    made.initialize(provider)
    return made


def prompts(**columns):
    draws = torch.Generator().manual_seed(7)
    ids = torch.randint(64, (len(LENGTHS), max(LENGTHS)), generator=draws)
    ids *= torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    return DataProto({"input_ids": ids, "lengths": torch.tensor(LENGTHS), **columns})


def logits_of(infer, ids):
    infer.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        return infer.model(input_ids=ids[None]).logits[0].float()


def columns(infer, micro, output, temperature=1.0):
    ids = micro["input_ids"]
    return {
        "log_probs": infer.op_compute_log_probs(output, ids, temperature),
        "entropy": infer.op_compute_entropy(output, temperature),
        "loss": infer.op_compute_language_loss(output, micro["labels"]).expand(len(ids)),
    }


@pytest.mark.parametrize("packing", [True, False])
def test_forward_step_gives_log_probs_entropy_and_loss(packing):
    infer, batch = strategy(packing=packing), prompts()
    batch.update({"labels": batch["input_ids"].masked_fill(batch["input_ids"] % 2 == 0, -100)})
    out = infer.forward_step(batch, partial(columns, infer, temperature=0.7))
    losses = []
    for row, length in enumerate(LENGTHS):
        ids = batch["input_ids"][row, :length]
        logits = logits_of(infer, ids)[:-1]
        logs = (logits / 0.7).log_softmax(-1)
        want = logs.gather(-1, ids[1:, None]).squeeze(-1)
        zeros = torch.zeros(max(LENGTHS) - length)
        expected = torch.cat([torch.zeros(1), want, zeros])
        torch.testing.assert_close(out["log_probs"][row], expected, atol=1e-4, rtol=0)
        expected = torch.cat([torch.zeros(1), -(logs.exp() * logs).sum(-1), zeros])
        torch.testing.assert_close(out["entropy"][row], expected, atol=1e-4, rtol=0)
        labels = batch["labels"][row, 1:length]
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        losses.append(loss.sum() if length > 1 else torch.zeros(()))
    # micro-batches of 3, 3 and 1 rows
    sums = [sum(losses[:3])] * 3 + [sum(losses[3:6])] * 3 + losses[6:]
    torch.testing.assert_close(out["loss"], torch.stack(sums), atol=1e-3, rtol=1e-5)
    assert not out["log_probs"].requires_grad


def test_forward_step_follows_the_plan_and_leaves_fillers_out():
    infer, batch, seen = strategy(), prompts(), []

    def forward_func(micro, output):
        seen.append(micro["lengths"].tolist())
        return {"length": micro["lengths"]}

    batch.plan = local(level([[[0, 4], [2]], [[1], [3], [5], [6]]], {}), 0)
    own = batch.select_idxs(list(batch.plan.rows))
    own.plan = batch.plan
    assert infer.forward_step(own, forward_func)["length"].tolist() == [5, 9, 17]
    assert seen == [[5, 9], [17]]
    assert len(infer.forward_step(batch[:0], forward_func)) == 0


def test_generate_gives_rows_whose_log_probs_a_forward_step_gives_again():
    infer = strategy()
    batch = prompts(group_id=torch.arange(len(LENGTHS)))
    config = GenerationConfig(max_new_tokens=20, temperature=1.5, num_return_sequences=3)
    out = infer.generate(batch, config, seed=5)
    assert out["group_id"].tolist() == [row for row in range(len(LENGTHS)) for _ in range(3)]
    assert out["response_mask"].sum(1).tolist() == [20] * 21
    assert out["lengths"].tolist() == [length + 20 for length in LENGTHS for _ in range(3)]
    for row in range(21):
        length = LENGTHS[row // 3]
        want = batch["input_ids"][row // 3, :length]
        assert out["input_ids"][row, :length].tolist() == want.tolist()
    assert out["finish_reason"].tolist() == ["length"] * 21
    forward = partial(columns, infer, temperature=1.5)
    out.update({"labels": out["input_ids"]})
    again = infer.forward_step(out, forward)["log_probs"]
    mask = out["response_mask"]
    torch.testing.assert_close(out["infer_log_probs"][mask], again[mask], atol=1e-4, rtol=0)
    assert (out["infer_log_probs"][~mask] == 0).all()


def test_random_numbers_go_by_seed_and_sample_id():
    infer, batch = strategy(), prompts()
    config = GenerationConfig(max_new_tokens=10, num_return_sequences=2)
    want = infer.generate(batch, config, seed=5)["input_ids"]
    assert torch.equal(infer.generate(batch, config, seed=5)["input_ids"], want)
    assert not torch.equal(infer.generate(batch, config, seed=6)["input_ids"], want)
    named = prompts(sample_id=torch.arange(len(LENGTHS)))
    part = infer.generate(named[4:], config, seed=5)["input_ids"]
    assert torch.equal(part, want[8:, : part.shape[1]])
    # no two samples share a stream, not even of the same prompt in two rows
    same = prompts()[[2, 2, 2]]
    responses = infer.generate(same, config, seed=5)["input_ids"][:, LENGTHS[2] :]
    assert len({tuple(response) for response in responses.tolist()}) == 6


def test_greedy_log_probs_are_at_temperature_one():
    infer, batch = strategy(), prompts()
    out = infer.generate(batch, GenerationConfig(max_new_tokens=8, temperature=0), seed=0)
    for row, length in enumerate(out["lengths"].tolist()):
        ids = out["input_ids"][row, :length]
        logs = logits_of(infer, ids).log_softmax(-1)[length - 9 : -1]
        assert ids[-8:].tolist() == logs.argmax(-1).tolist()
        got = out["infer_log_probs"][row, length - 8 : length]
        torch.testing.assert_close(got, logs.max(-1).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize("eos", [7, [7, 9, 11]])
def test_end_tokens_of_the_model_and_of_the_call_end_a_response(eos):
    infer = strategy(FIELDS | {"eos_token_id": eos})
    infer.model.generation_config.eos_token_id = [20, 21]
    ends = {20, 21, 30, *(eos if isinstance(eos, list) else [eos])}
    config = GenerationConfig(max_new_tokens=60, num_return_sequences=20, stop_token_ids=[30])
    out = infer.generate(prompts(), config, seed=1)
    last = set()
    for row, end in enumerate(out["lengths"].tolist()):
        response = out["input_ids"][row, LENGTHS[row // 20] : end].tolist()
        assert not ends & set(response[:-1])
        stopped = response[-1] in ends
        assert out["finish_reason"][row] == ("stop" if stopped else "length")
        last.update(response[-1:] if stopped else [])
    assert last == ends


def test_a_response_ends_at_the_last_position_of_the_model():
    infer = strategy(FIELDS | {"max_position_embeddings": 16})
    out = infer.generate(prompts(), GenerationConfig(max_new_tokens=9), seed=1)
    count = [min(9, max(0, 16 - length)) for length in LENGTHS]
    assert out["response_mask"].sum(1).tolist() == count
    assert out["lengths"].tolist() == [n + c for n, c in zip(LENGTHS, count, strict=True)]
    assert out["finish_reason"].tolist() == ["length"] * len(LENGTHS)


def test_an_empty_prompt_is_an_error():
    batch = prompts()
    batch.update({"lengths": torch.tensor([5, 1, 0, 9, 9, 3, 12])})
    with pytest.raises(ValueError, match="prompt 2 is empty; give it a token"):
        strategy().generate(batch, GenerationConfig(), seed=1)


def save_tokenizer(folder):
    """One token a character; token 3 is the end."""
    words = ["<pad>", "<bos>", "<user>", "<eos>", *map(chr, range(97, 97 + 60))]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer, core.decoder = Split("", "isolated"), Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", additional_special_tokens=["<user>"]
    )
    tokenizer.save_pretrained(folder)
    return words


def test_stop_strings_and_the_end_token_of_a_tokenizer(tmp_path):
    """A special token is text too, or a response could not stop at one."""
    words = save_tokenizer(tmp_path)
    infer = strategy(FIELDS, tokenizer=str(tmp_path))
    free = GenerationConfig(max_new_tokens=80, num_return_sequences=4)
    texts = []
    for stop in ([], ["<user>", "ab", "cd", "jk"]):
        free.stop = stop
        out = infer.generate(prompts(), free, seed=3)
        texts.append([])
        for row, end in enumerate(out["lengths"].tolist()):
            ids = out["input_ids"][row, LENGTHS[row // 4] : end].tolist()
            assert 3 not in ids[:-1]
            texts[-1].append(["".join(words[i] for i in ids), out["finish_reason"][row]])
    stopped = 0
    for (full, was), (text, reason) in zip(*texts, strict=True):
        places = [full.find(s) + len(s) for s in free.stop if s in full]
        assert text == full[: min(places, default=len(full))]
        assert reason == ("stop" if places else was)
        stopped += bool(places)
    assert stopped > 4
    assert {full.endswith("<eos>") for full, _ in texts[0]} == {True, False}


def update(infer, weights, version=1, most=700):
    """Give it weights in parts of at most so many numbers."""
    for name, weight in weights:
        flat = weight.detach().reshape(-1)
        for start in range(0, len(flat), most):
            part = Part(name, tuple(weight.shape), start, flat[start : start + most].clone())
            infer.update_parameter_in_bucket([part])
            part.values.zero_()
    infer.process_weights_after_loading(version)


@pytest.mark.parametrize("tied", [True, False])
def test_new_weights_come_in_parts_into_the_old_ones_place(tied):  # E01, E03, E08
    fields = FIELDS | {"tie_word_embeddings": tied}
    infer = strategy(fields, provider=load_model)
    pointers = [parameter.data_ptr() for parameter in infer.model.parameters()]
    source = strong(ModelConfig(config=fields), 43)
    weights = dict(full_weights(source))
    assert ("lm_head.weight" in weights) is not tied
    batch, config = prompts(), GenerationConfig(max_new_tokens=10)
    before = infer.generate(batch, config, seed=1)
    assert not before["weight_version"].any()
    for version in (3, 5):
        weights["model.embed_tokens.weight"].neg_()  # that of the head too, if they are tied
        update(infer, weights.items(), version)
        assert [parameter.data_ptr() for parameter in infer.model.parameters()] == pointers
        ids = batch["input_ids"][2]
        with torch.no_grad():
            assert torch.equal(logits_of(infer, ids), source(input_ids=ids[None]).logits[0])
        after = infer.generate(batch, config, seed=1)
        assert torch.equal(after["weight_version"], after["response_mask"].int() * version)
        assert not torch.equal(before["input_ids"], after["input_ids"])
        own = HfInfer(context(fields))
        own.initialize(lambda *_: source)
        assert torch.equal(after["input_ids"], own.generate(batch, config, seed=1)["input_ids"])
        before = after


def test_weights_are_cast_to_the_dtype_of_the_model():
    infer = strategy(dtype="bfloat16")
    source = strong(ModelConfig(config=FIELDS), 43)
    update(infer, full_weights(source))
    for own, theirs in zip(infer.model.parameters(), source.parameters(), strict=True):
        assert torch.equal(own, theirs.to(torch.bfloat16))
    out = infer.generate(prompts(), GenerationConfig(max_new_tokens=5), seed=1)
    assert out["infer_log_probs"].dtype == torch.float32


def test_a_checkpoint_gives_weights_and_version_back(group, tmp_path):
    infer = strategy(group=group)
    update(infer, full_weights(strong(ModelConfig(config=FIELDS), 43)), 7)
    kept = {name: weight.clone() for name, weight in infer.full_parameters()}
    infer.offload_states()
    infer.save_checkpoint(tmp_path)
    assert all(p.untyped_storage().nbytes() == 0 for p in infer.model.parameters())
    other = strategy(group=group)
    assert not all(torch.equal(w, kept[name]) for name, w in other.full_parameters())
    other.offload_states()
    other.load_checkpoint(tmp_path)
    other.load_states()
    assert all(torch.equal(w, kept[name]) for name, w in other.full_parameters())
    assert other.weight_version == 7
    with pytest.raises(ValueError, match="not of this model"):
        strategy(FIELDS | {"vocab_size": 65}, group=group).load_checkpoint(tmp_path)


@pytest.mark.parametrize("is_read", [False, True], ids=["made", "read from a folder"])
def test_offload_and_load_are_bit_equal(is_read, tmp_path):
    infer, batch = strategy(), prompts()
    if is_read:
        infer.model.save_pretrained(tmp_path)
        read = ModelConfig(path=str(tmp_path))
        infer = strategy(provider=lambda config, seed: load_model(read, seed))
    config = GenerationConfig(max_new_tokens=10)
    before, weights = infer.generate(batch, config, 1), dict(full_weights(infer.model))
    kept = {name: weight.clone() for name, weight in weights.items()}
    infer.offload_states({"optimizer"})
    infer.generate(batch, config, 1)
    infer.offload_states()
    infer.offload_states({"model"})
    assert all(p.untyped_storage().nbytes() == 0 for p in infer.model.parameters())
    for call in (
        lambda: infer.generate(batch, config, 1),
        lambda: infer.forward_step(batch, lambda *_: {}),
        lambda: update(infer, kept.items()),
        infer.full_parameters,
    ):
        with pytest.raises(ValueError, match=r"role infer: the model is offloaded; call load_st"):
            call()
    infer.load_states({"model", "optimizer"})
    assert all(torch.equal(w, kept[name]) for name, w in full_weights(infer.model))
    after = infer.generate(batch, config, 1)
    assert torch.equal(after["infer_log_probs"], before["infer_log_probs"])
    with pytest.raises(ValueError, match="no state modle; there are"):
        infer.offload_states({"modle"})


def test_lora_of_the_pipeline_s_model_is_left_to_who_trains():
    given = []

    def provider(config, seed):
        given.append(config.lora)
        return load_model(config, seed)

    strategy(lora=LoraConfig(rank=2), provider=provider)
    assert given == [None]


def test_weights_on_the_meta_device_are_an_error():
    with pytest.raises(ValueError, match="meta device"):
        strategy(provider=lambda *given: load_model(*given).to("meta"))


def test_a_model_that_keeps_states_cannot_generate(tmp_path):
    fields = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    infer = strategy(fields, packing=False, provider=load_model, attn_implementation="eager")
    with pytest.raises(ValueError, match=r"model_type=mamba.*generate with another engine"):
        infer.generate(prompts(), GenerationConfig(max_new_tokens=2), seed=1)
