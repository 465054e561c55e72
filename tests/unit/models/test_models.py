import dataclasses
import json
from importlib.util import find_spec

import pytest
import torch

from roll_td.algorithms.functional import logits
from roll_td.config.model import LoraConfig, ModelConfig
from roll_td.models import (
    body_and_head,
    cache_in,
    export_hf,
    full_weights,
    load_model,
    load_tokenizer,
)
from tests.unit.models.small import KINDS, SMALL, TOKENS, config, hf_logits, weights


@pytest.mark.parametrize("kind", KINDS)
def test_head_of_body_gives_the_models_logits(kind):
    model = load_model(config(kind), 0)
    body, head = body_and_head(model)
    with torch.no_grad():
        hidden = body(input_ids=TOKENS).last_hidden_state
    ours, theirs = logits(hidden, head()), hf_logits(model)
    assert hidden.shape == (2, 10, 64)
    assert theirs.std() > 0.01
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_the_head_is_read_when_asked_for():
    # E08: nothing is cached over an update, in place or not
    model = load_model(config(), 0)
    _, head = body_and_head(model)
    before = head().weight.sum().item()
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(1)
    assert head().weight.sum().item() == pytest.approx(before + 64 * 64, rel=1e-5)
    model.get_output_embeddings().weight = torch.nn.Parameter(torch.zeros(64, 64))
    assert head().weight.sum().item() == 0


@pytest.mark.parametrize(
    ("kind", "fields"), [("granite", {"logits_scaling": 8.0}), ("cohere", {"logit_scale": 0.1})]
)
def test_logits_that_are_more_than_a_linear_layer_are_refused(kind, fields):
    model = ModelConfig(config={"model_type": kind, **SMALL, **fields})
    with pytest.raises(ValueError, match=f"{kind}: its logits are not those of a linear layer"):
        load_model(model, 0)


def test_the_check_of_the_head_leaves_no_trace():
    model = load_model(config(), 0)
    assert model.config._attn_implementation == "sdpa"
    assert not model.get_decoder()._forward_hooks
    assert not model.training


@pytest.mark.parametrize("lora", [None, LoraConfig()])
def test_random_weights_follow_from_the_seed_alone(lora):
    if lora:
        pytest.importorskip("peft")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = load_model(config(lora=lora), 7).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    again, other = (load_model(config(lora=lora), seed).state_dict() for seed in (7, 8))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = "model.layers.0.self_attn.q_proj.weight"
    if lora:
        drawn = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(first[drawn], other[drawn])


def test_dtype_is_as_asked():
    assert {p.dtype for p in load_model(config(dtype="bfloat16"), 0).parameters()} == {
        torch.bfloat16
    }


class Joined:
    """A store that joins keys and values as they come."""

    def __init__(self):
        self.layers = {}

    @property
    def seen(self):
        return self.layers[0][0].shape[2] if self.layers else 0

    def append(self, layer, *new):
        old = self.layers.get(layer, [tensor[:, :, :0] for tensor in new])
        self.layers[layer] = [torch.cat(pair, 2) for pair in zip(old, new, strict=True)]
        return tuple(self.layers[layer])


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma2"])
def test_a_cache_continues_a_sequence(kind):
    model, store = load_model(config(kind), 0), Joined()
    with torch.no_grad():
        first = model(input_ids=TOKENS[:, :6], cache=cache_in(model, store)).logits
        rest = model(input_ids=TOKENS[:, 6:], cache=cache_in(model, store)).logits
    torch.testing.assert_close(torch.cat([first, rest], 1), hf_logits(model), atol=1e-5, rtol=1e-5)
    assert store.seen == 10


def test_a_model_that_keeps_more_than_keys_and_values_has_no_cache():
    fields = {"model_type": "lfm2", **SMALL, "layer_types": ["conv", "full_attention"]}
    model = load_model(ModelConfig(config=fields), 0)
    with pytest.raises(ValueError, match="model_type=lfm2: its layers keep"):
        cache_in(model, Joined())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "qwen33"}, "model_type=qwen33: unknown; did you mean qwen3?"),
        ({"model_type": "qwen3", "hiden_size": 8}, "hiden_size: no field of Qwen3Config; did you"),
        ({"model_type": "qwen3", "hidden_size": "8"}, "'hidden_size' expected int, got str"),
        ({"model_type": "vit", "hidden_size": 8}, "model_type=vit: can't be made with attn"),
        ({"model_type": "gemma2", **SMALL}, "attn_implementation: eager"),
    ],
)
def test_a_wrong_config_is_refused(fields, message):
    with pytest.raises(ValueError) as caught:
        load_model(ModelConfig(config=fields), 0)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "neither path nor config; set model.path or model.config"),
        ("/no/such/folder", "model.path=/no/such/folder: no such folder"),
        ("./no-such", "model.path=./no-such: no such folder"),
        ("no-such.gguf", "model.path=no-such.gguf: no such file"),
    ],
)
def test_a_path_that_is_not_there_is_refused(path, message):
    with pytest.raises(ValueError) as caught:
        load_model(ModelConfig(path=path), 0)
    assert message in str(caught.value)


def test_a_hub_name_without_a_hub_is_refused(monkeypatch):
    # the hub's client has read the environment already; transformers turns its error into OSError
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (lambda m: load_model(m, 0), load_tokenizer):
        with pytest.raises(ValueError, match=r"model\.path=no-such-org/none: can't load a"):
            load(ModelConfig(path="no-such-org/none"))


def change(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: (m / "model.safetensors").unlink(), "no file named model.safetensors"),
        (lambda m: (m / "model.safetensors").write_bytes(b"xx" * 99), "header"),
        (lambda m: change(m, tie_word_embeddings=False), "'missing_keys': ['lm_head.weight']"),
        (lambda m: change(m, intermediate_size=96), "can't load a model"),
        (lambda m: change(m, model_type="nothing"), "does not recognize this architecture"),
    ],
)
def test_a_folder_without_the_weights_of_its_config_is_refused(exported, spoil, message):
    spoil(exported)
    with pytest.raises(ValueError) as caught:
        load_model(ModelConfig(path=str(exported)), 0)
    assert message in str(caught.value)
    assert str(exported) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("qwen3", "bfloat16")]
)
def test_an_export_loads_as_the_same_model(tmp_path, kind, dtype):
    given = config(kind, dtype=dtype)
    model = load_model(given, 0)
    export_hf(tmp_path, model, weights(model))
    again = load_model(dataclasses.replace(given, config=None, path=str(tmp_path)), 1)
    before, after = weights(model), weights(again)
    assert list(before) == list(after)
    for name, tensor in after.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, before[name])
    assert torch.equal(hf_logits(again), hf_logits(model))


def test_a_tied_weight_is_exported_once_and_loads_as_both(tmp_path):
    # E03: embedding changed, head follows
    model = load_model(config("qwen3"), 0)
    state = weights(model)
    assert "lm_head.weight" not in state
    state["model.embed_tokens.weight"] += 1
    export_hf(tmp_path, model, state)
    again = load_model(ModelConfig(path=str(tmp_path)), 0)
    assert torch.equal(again.get_output_embeddings().weight, state["model.embed_tokens.weight"])
    untied = load_model(config("qwen3", tie_word_embeddings=False), 0)
    assert "lm_head.weight" in weights(untied)


def test_an_export_of_other_weights_is_refused(tmp_path):
    model = load_model(config(), 0)
    state = weights(model)
    state["nothing"] = state.pop("model.norm.weight")
    rule = r"missing weights \['model.norm.weight'\], left over \['nothing'\]"
    with pytest.raises(ValueError, match=rule):
        export_hf(tmp_path / "out", model, state)
    assert not (tmp_path / "out").exists()


def write_gguf(file, model, tokens):
    """A Qwen2 model as a .gguf file, in float32."""
    import gguf

    made, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_context_length(64)
    writer.add_block_count(made.num_hidden_layers)
    writer.add_embedding_length(made.hidden_size)
    writer.add_feed_forward_length(made.intermediate_size)
    writer.add_head_count(made.num_attention_heads)
    writer.add_head_count_kv(made.num_key_value_heads)
    writer.add_layer_norm_rms_eps(made.rms_norm_eps)
    writer.add_rope_freq_base(made.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    for name, tensor in full_weights(model):
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.skipif(not (find_spec("gguf") and find_spec("accelerate")), reason="needs extra gguf")
def test_a_gguf_file_gives_model_and_tokenizer(tmp_path):
    file = tmp_path / "m.gguf"
    model = load_model(config("qwen2", tie_word_embeddings=False), 0)
    write_gguf(file, model, ["<end>", "a", "b", "ab", *(f"t{i}" for i in range(60))])
    again = load_model(ModelConfig(path=str(file)), 1)
    torch.testing.assert_close(hf_logits(again), hf_logits(model), atol=1e-6, rtol=0)
    assert not hasattr(again.config, "quantization_config")  # else it could not be trained
    half = load_model(ModelConfig(path=str(file), dtype="bfloat16"), 1)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    export_hf(tmp_path / "out", again, weights(again))
    assert load_tokenizer(ModelConfig(path=str(file)))("abb").input_ids == [3, 2]


@pytest.mark.parametrize("extra", ["lora", "gguf"])
def test_a_missing_package_is_named(monkeypatch, tmp_path, extra):
    for place in ("roll_td.models.find_spec", "roll_td.models.lora.find_spec"):
        monkeypatch.setattr(place, lambda name: None)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ValueError, match=rf"pip install 'roll-td\[{extra}\]'"):
        if extra == "lora":
            load_model(config(lora=LoraConfig()), 0)
        load_model(ModelConfig(path=str(tmp_path / "m.gguf")), 0)
