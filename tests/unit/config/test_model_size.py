import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from roll_td.config.model import LoraConfig, ModelConfig
from roll_td.config.model_size import model_size

SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 64,
}
GPT2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 64}
GPT2 |= {"n_positions": 32}
FIELDS = [
    {"model_type": "llama", **SMALL},
    {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    {"model_type": "mistral", **SMALL},
    {"model_type": "qwen2", **SMALL},
    {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True},
    {"model_type": "qwen3", **SMALL, "tie_word_embeddings": True},
    {"model_type": "qwen3", **SMALL, "head_dim": 20, "attention_bias": True},
    {"model_type": "gemma", **SMALL},
    {"model_type": "gemma", **SMALL, "head_dim": 20, "tie_word_embeddings": False},
    {"model_type": "gemma2", **SMALL},
    {"model_type": "gemma3_text", **SMALL},
    GPT2,
    GPT2 | {"n_inner": 100, "tie_word_embeddings": False},
]


def on_meta(fields):
    with torch.device("meta"):
        made = AutoConfig.for_model(**fields)
        return AutoModelForCausalLM.from_config(made, attn_implementation="eager")


@pytest.mark.parametrize("fields", FIELDS)
def test_parameters_are_those_of_the_model(fields):
    model, size = on_meta(fields), model_size(ModelConfig(config=fields))
    assert size.parameters == sum(p.numel() for p in model.parameters())
    layers = model.get_submodule(size.layer_path)
    assert size.num_layers == len(layers)
    assert size.layer_parameters == sum(p.numel() for p in layers[1].parameters())
    assert size.tied == (model.lm_head.weight is model.get_input_embeddings().weight)
    assert (size.vocab_size, size.hidden_size) == tuple(model.lm_head.weight.shape)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"])
def test_a_field_left_out_counts_as_transformers_takes_it(kind):
    wanted = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    fields = {"model_type": kind} | {name: SMALL[name] for name in wanted}
    fields["num_attention_heads"] = 8
    expected = sum(p.numel() for p in on_meta(fields).parameters())
    assert model_size(ModelConfig(config=fields)).parameters == expected


@pytest.mark.parametrize("fields", [FIELDS[0], FIELDS[7], GPT2])
def test_cache_values_are_those_of_a_cache(fields):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.ones(1, 5, dtype=torch.int64), cache=cache)
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert 5 * model_size(ModelConfig(config=fields)).cache_values_per_token == held


@pytest.mark.skipif(find_spec("peft") is None, reason="needs the extra lora")
@pytest.mark.parametrize("fields", [FIELDS[4], FIELDS[7]])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], r".*\.1\..*_proj"])
def test_lora_parameters_are_those_of_the_adapters(fields, targets):
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    model = on_meta(fields)
    inject_adapter_in_model(PeftConfig(r=3, target_modules=targets), model)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = model_size(ModelConfig(config=fields))
    assert size.lora_parameters(LoraConfig(rank=3, target_modules=targets)) == trained


def test_lora_without_a_target_is_refused():
    size = model_size(ModelConfig(config=GPT2))
    with pytest.raises(ValueError, match=r"\['q_proj'\]: none of attn.c_attn, attn.c_proj"):
        size.lora_parameters(LoraConfig(target_modules=["q_proj"]))


def test_a_folder_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS[0]))
    size = model_size(ModelConfig(path=str(tmp_path)))
    assert size == model_size(ModelConfig(config=FIELDS[0]))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig(), "no model; the size is not known"),
        (ModelConfig(path="./model"), "path=./model: no folder with a config.json"),
        (ModelConfig(config={"model_type": "qwen33"}), "did you mean qwen3?"),
        (ModelConfig(config={"model_type": "t5"}), "known are gpt2, llama"),
        (ModelConfig(config={"model_type": "llama"}), "lacks hidden_size"),
        (ModelConfig(config={"model_type": "gpt2"}), "lacks n_embd"),
    ],
)
def test_a_size_that_can_not_be_told_is_refused(model, message):
    with pytest.raises(ValueError) as caught:
        model_size(model)
    assert message in str(caught.value)


def test_neither_torch_nor_transformers_is_imported():
    code = (
        "import sys; from roll_td.config.model_size import model_size; from roll_td.config.model "
        f"import ModelConfig; print(model_size(ModelConfig(config={FIELDS[0]!r})).parameters);"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == model_size(ModelConfig(config=FIELDS[0])).parameters
