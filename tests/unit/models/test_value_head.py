"""A head of one number on the body of a language model."""

import pytest
import torch

from roll_td.config.model import LoraConfig
from roll_td.models import body_and_head, load_model
from roll_td.models.value_head import load_value_model
from tests.unit.models.small import KINDS, TOKENS, config, weights


@pytest.mark.parametrize("kind", KINDS)
def test_the_body_is_the_language_models_and_the_head_begins_at_0(kind):
    language, value = load_model(config(kind), 3), load_value_model(config(kind), 3)
    (body, _), (valued, head) = body_and_head(language), body_and_head(value)
    with torch.no_grad():
        wanted = body(input_ids=TOKENS).last_hidden_state
        assert torch.equal(valued(input_ids=TOKENS).last_hidden_state, wanted)
    assert head().weight.shape == (1, 64) and head().bias is None
    assert not head().weight.any() and head().weight.dtype == torch.float32
    # a head that was tied is not, and the embedding has stayed
    both, own = weights(language), weights(value)
    (new,) = [name for name in own if name not in both or own[name].shape != both[name].shape]
    assert own[new].shape == (1, 64)
    assert all(torch.equal(own[name], both[name]) for name in own if name != new)


def test_beside_adapters_the_head_is_trained_in_float32():
    pytest.importorskip("peft")
    model = load_value_model(config(lora=LoraConfig(rank=2), dtype="bfloat16"), 3)
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    assert set(trained.values()) == {torch.float32}
    heads = [name for name in trained if ".lora_" not in name]
    assert heads == ["lm_head.weight"] and len(trained) > 1
