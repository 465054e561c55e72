import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from roll_td.config.model import LoraConfig, ModelConfig
from roll_td.models import adapter_weights, adapters_off, export_hf, load_model
from tests.unit.models.small import config, hf_logits, weights

pytest.importorskip("peft")


def lora_model(kind="qwen3", **fields):
    """A model with adapters that do something: B is not 0."""
    model = load_model(config(kind, LoraConfig(rank=4, alpha=6, **fields)), 0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return model


def merged_by_peft(model):
    """The state by name, where peft itself merges the adapters."""
    for module in model.modules():
        if hasattr(module, "merge"):
            module.merge()
    return {
        name.replace(".base_layer", ""): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_merged_weights_have_the_base_models_names_and_the_delta_once(tmp_path, kind):
    # E04, E06
    base, model = load_model(config(kind), 0), lora_model(kind)
    merged = weights(model)
    assert list(merged) == list(weights(base))
    export_hf(tmp_path, model, merged)
    again = load_model(ModelConfig(path=str(tmp_path)), 1)
    with_adapter, without = hf_logits(model), hf_logits(base)
    torch.testing.assert_close(hf_logits(again), with_adapter, atol=1e-5, rtol=1e-5)
    assert (with_adapter - without).abs().max() > 0.1
    right = merged_by_peft(model)
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, right[name], atol=1e-6, rtol=1e-6)


def test_a_merged_weight_is_rounded_once():
    model = load_model(config(lora=LoraConfig(rank=4), dtype="bfloat16"), 0)
    layer = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.01)
    delta = (layer.lora_B["default"].weight @ layer.lora_A["default"].weight) * (32 / 4)
    right = (layer.base_layer.weight.float() + delta).bfloat16()
    assert layer.lora_A["default"].weight.dtype == torch.float32
    assert torch.equal(weights(model)["model.layers.0.mlp.up_proj.weight"], right)


def test_adapters_alone_make_the_merged_weights_of_the_base():
    base, model = weights(load_model(config(), 0)), lora_model()
    alone, merged = dict(adapter_weights(model)), weights(model)
    for name, weight in merged.items():
        a, b = (alone.pop(name.replace("weight", f"lora_{part}.weight"), None) for part in "AB")
        wanted = base[name] if a is None else base[name] + 6 / 4 * b @ a
        torch.testing.assert_close(weight, wanted, atol=1e-6, rtol=1e-6)
    assert not alone
    with pytest.raises(ValueError, match="no adapters to give"):
        dict(adapter_weights(load_model(config(), 0)))


def test_adapters_off_is_the_base_model():
    base, model = load_model(config(), 0), lora_model()
    with_adapter = hf_logits(model)
    with adapters_off(model):
        assert torch.equal(hf_logits(model), hf_logits(base))
    assert torch.equal(hf_logits(model), with_adapter)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".lora_" in name}
    with pytest.raises(ValueError, match="no adapters to turn off"), adapters_off(base):
        pass


@pytest.mark.parametrize("targets", [["q_proj", "embed_tokens"], ["lm_head"], ["nothing"]])
def test_adapters_of_other_than_linear_layers_are_refused(targets):
    untied = config(lora=LoraConfig(target_modules=targets), tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"model\.lora\.target_modules"):
        load_model(untied, 0)


def test_lora_settings_reach_the_layers():
    lora = LoraConfig(rank=3, alpha=12, dropout=0.25, target_modules=["q_proj"])
    model = load_model(config(lora=lora), 0)
    layer = model.model.layers[1].self_attn.q_proj
    assert layer.lora_A["default"].weight.shape == (3, 64)
    assert layer.scaling["default"] == 4
    assert layer.lora_dropout["default"].p == 0.25
    assert sum(".lora_A." in name for name, _ in model.named_parameters()) == 2


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_weights_of_a_sharded_model_come_whole(one_rank):
    model = lora_model()
    before = weights(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=one_rank)
    fully_shard(model, mesh=one_rank)
    after = weights(model)
    assert list(after) == list(before)
    for name, tensor in after.items():
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, before[name])
