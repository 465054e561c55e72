"""Estimates of one role; tests/benchmarks/memory.py has larger models and more settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roll_td.algorithms import functional
from roll_td.config import memory
from roll_td.config.base import WorkerConfig
from roll_td.config.memory import MB, Load, RoleMemory
from roll_td.config.model import GenerationConfig, LoraConfig, ModelConfig, TrainingConfig
from roll_td.config.model_size import model_size
from roll_td.config.strategies import StrategyArgs
from roll_td.distributed.topology import mesh_shape, together
from roll_td.models import body_and_head, load_model
from roll_td.protocol import DataProto
from roll_td.strategies import generation, packing
from tests.benchmarks.memory import MODEL, TRAIN, estimate, measured_mb, setting

FIELDS = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
    "vocab_size": 61,
    "tie_word_embeddings": True,
}
LAYERS = "num_hidden_layers"
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 61}
GPT2 |= {"n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
GPT2 |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
SHORT = Load(8, 8)


def role(strategy: str = "fsdp2_train", world_size: int = 1, **settings: Any) -> WorkerConfig:
    """settings: of the strategy, and of its training."""
    training = settings.keys() & vars(TrainingConfig()).keys()
    own = {name: value for name, value in settings.items() if name not in training}
    return WorkerConfig(
        name="role",
        world_size=world_size,
        strategy_args=StrategyArgs(strategy, own),
        training=TrainingConfig(**{name: settings[name] for name in training}),
        generation=GenerationConfig(max_new_tokens=24),
    )


def fsdp2(
    role: WorkerConfig, load: Load = SHORT, fields: dict[str, Any] = FIELDS, **model: Any
) -> RoleMemory:
    config = ModelConfig(config=fields, **model)
    return memory.fsdp2(role, config, model_size(config), load)


PARAMETERS = model_size(ModelConfig(config=FIELDS)).parameters


@pytest.mark.parametrize("ranks", [1, 4])
def test_weights_moments_and_gradients_are_shared_by_the_ranks(ranks: int) -> None:
    taken = fsdp2(role(world_size=ranks))
    assert taken.weights_mb * MB == PARAMETERS * 4 / ranks
    assert taken.optimizer_mb * MB == PARAMETERS * 8 / ranks
    assert taken.gradients_mb * MB == PARAMETERS * 4 / ranks
    assert taken.kv_cache_mb == 0


@pytest.mark.parametrize("fsdp_size", [None, 1, 2, 4])
def test_a_copy_has_as_many_parts_as_the_mesh_gives_it(fsdp_size: int | None) -> None:
    worker = role(world_size=4, fsdp_size=fsdp_size)
    parts = mesh_shape(together(worker))[1][-1]
    assert fsdp2(worker).weights_mb * MB == PARAMETERS * 4 / parts


def test_of_lora_the_adapters_alone_have_gradients() -> None:
    config = ModelConfig(config=FIELDS, dtype="bfloat16", lora=LoraConfig(rank=4))
    adapters = model_size(config).lora_parameters(LoraConfig(rank=4))
    taken = fsdp2(role(), dtype="bfloat16", lora=LoraConfig(rank=4))
    assert taken.weights_mb * MB == PARAMETERS * 2 + adapters * 4
    assert taken.optimizer_mb * MB == adapters * 8
    assert taken.gradients_mb * MB == adapters * 4


def test_a_role_that_only_infers_has_no_gradients() -> None:
    taken = fsdp2(role("fsdp2_infer", 2), dtype="bfloat16")
    assert taken.weights_mb * MB == PARAMETERS * 2 / 2
    assert taken.optimizer_mb == taken.gradients_mb == 0
    assert 0 < taken.activations_mb < fsdp2(role()).activations_mb


def kept_by_autograd(model: ModelConfig, compute: str | None, tokens: int) -> int:
    """Bytes that a forward pass over two rows of `tokens` in all leaves for the backward pass."""
    made: Any = load_model(model, 0)
    if model.lora is None:
        made.requires_grad_(True)
    if compute is not None:
        made.to(getattr(torch, compute))
    # of two lengths, for rows of one length lie as they are and leave a little less; nor alike
    lengths = torch.tensor([tokens // 2 - 1, tokens // 2 + 1])
    ids = torch.arange(2)[:, None].repeat(1, int(lengths.max()))
    micro = DataProto({"input_ids": ids, "lengths": lengths})
    wants_rows = packing.keep_rows_apart(made)
    _, inputs = packing.arrange(micro, packs=True, wants_rows=wants_rows)
    own = {p.untyped_storage().data_ptr() for p in made.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        body_and_head(made.train())[0](**inputs, use_cache=False)
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.parametrize(
    ("fields", "compute", "model"),
    [
        (FIELDS, None, {}),
        (FIELDS, "bfloat16", {}),
        (FIELDS | {"model_type": "qwen3"}, None, {}),
        (FIELDS | {"model_type": "qwen3"}, "bfloat16", {}),
        (FIELDS | {"model_type": "qwen3"}, None, {"lora": LoraConfig(rank=1)}),
        (FIELDS | {"model_type": "gemma3_text"}, None, {}),
        (FIELDS, None, {"attn_implementation": "eager"}),
        (FIELDS, "bfloat16", {"attn_implementation": "eager"}),
        (GPT2, None, {}),
    ],
)
def test_kept_of_a_layer_is_what_autograd_keeps(
    fields: dict[str, Any], compute: Any, model: dict[str, Any]
) -> None:
    layers = "n_layer" if "n_layer" in fields else "num_hidden_layers"
    deep = fields | {layers: 8}
    measured = [
        kept_by_autograd(ModelConfig(config=some, **model), compute, 128) for some in (fields, deep)
    ]
    worker = role(compute_dtype=compute, micro_batch_size=2)
    taken = [fsdp2(worker, Load(64, 64), some, **model).activations_mb for some in (fields, deep)]
    assert (taken[1] - taken[0]) * MB == pytest.approx(measured[1] - measured[0], rel=0.04)


def test_checkpointing_keeps_one_hidden_state_a_layer() -> None:
    load, deep = Load(64, 64), FIELDS | {"num_hidden_layers": 8}
    plain, again = (role(micro_batch_size=2, gradient_checkpointing=c) for c in (False, True))
    layer = (fsdp2(plain, load, deep).activations_mb - fsdp2(plain, load).activations_mb) / 4
    shallow, deep_mb = (fsdp2(again, load, fields).activations_mb for fields in (FIELDS, deep))
    hidden = 128 * 64 * 4
    assert (deep_mb - shallow) * MB == pytest.approx(4 * hidden)
    # backward through the last layer: what it keeps, and the gradients of two results of its MLP
    results = 2 * 128 * 192 * 4
    assert shallow * MB == pytest.approx(3 * hidden + layer * MB + hidden + results)


@pytest.mark.parametrize(
    ("training", "load", "tokens"),
    [
        ({"micro_batch_size": 3}, Load(10, 10), 30),
        ({"micro_batch_size": 3}, Load(10, 10, batch_rows=3), 20),  # 2 rows a rank
        ({"max_tokens_per_micro_batch": 25}, Load(10, 10), 25),
        ({"max_tokens_per_micro_batch": 5}, Load(10, 10), 10),  # a row is never cut
        ({"max_tokens_per_micro_batch": 25}, Load(4, 10), 25),
    ],
)
def test_tokens_of_a_micro_batch(training: dict[str, Any], load: Load, tokens: int) -> None:
    taken = fsdp2(role(world_size=2, **training), load)
    one_row = fsdp2(role(world_size=2, micro_batch_size=1), Load(tokens, tokens))
    assert taken.activations_mb == one_row.activations_mb


def test_gradients_of_one_micro_batch_come_after_its_activations() -> None:
    worker = role(micro_batch_size=8)
    load, several = Load(64, 64, batch_rows=8), Load(64, 64, batch_rows=16)
    more = fsdp2(worker, several).working_mb - fsdp2(worker, load).working_mb
    assert more == pytest.approx(1.45 * fsdp2(worker, load).gradients_mb)


@pytest.mark.parametrize(("compute", "width"), [(None, 4), ("bfloat16", 2)])
def test_the_loss_holds_root_and_gradient_of_the_head(compute: Any, width: int) -> None:
    """Where rows are many, the most is held as all layers wait for their backward pass."""
    load, fields = Load(64, 64, batch_rows=16), FIELDS | {"vocab_size": 4096}
    worker = role(world_size=2, fsdp_size=1, micro_batch_size=8, compute_dtype=compute)
    taken = fsdp2(worker, load, fields)
    head, final_norm, product = 4096 * 64, 64, width % 4
    buffers = width * (head + final_norm) + (4 + product) * head
    beside = taken.working_mb - taken.allocator_mb - taken.activations_mb
    assert beside * MB == pytest.approx(buffers)
    deep = fsdp2(worker, load, fields | {LAYERS: 8})
    after_layers = 2 * taken.activations_mb - deep.activations_mb
    hidden, logits = 512 * 64, 4 * 512 * 4096
    of_last_norm = 4 * hidden + width * 2 * hidden
    of_head = width * 3 * hidden + logits * (2 + product / 4)
    assert after_layers * MB == pytest.approx(of_last_norm + of_head)


def test_a_few_tokens_leave_gradients_at_the_most() -> None:
    """The embedding's backward pass: gradients of all layers, the last one's on the way, the root,
    and of a tied weight two gradients."""
    fields = FIELDS | {"vocab_size": 4096}
    worker = role(world_size=2, fsdp_size=1, micro_batch_size=1)
    taken = fsdp2(worker, Load(2, 2, batch_rows=2), fields)
    size, hidden = model_size(ModelConfig(config=fields)), 2 * 64
    layers, root = 5 * size.layer_parameters, 4096 * 64 + 64
    held = 4 * (layers + root + 2 * 4096 * 64 + hidden)
    assert (taken.working_mb - taken.allocator_mb) * MB == pytest.approx(held)


def test_whole_layers_stay_without_resharding() -> None:
    few, many = (
        fsdp2(role("fsdp2_infer", 2, fsdp_size=1, reshard_after_forward=r)) for r in (True, False)
    )
    size = model_size(ModelConfig(config=FIELDS))
    assert (many.buffers_mb - few.buffers_mb) * MB == pytest.approx(3 * size.layer_parameters * 4)


def test_a_rank_that_is_alone_gathers_nothing() -> None:
    alone, one_of_two = fsdp2(role("fsdp2_infer")), fsdp2(role("fsdp2_infer", 2, fsdp_size=1))
    assert alone.buffers_mb == 0 < one_of_two.buffers_mb
    assert alone.weights_mb == one_of_two.weights_mb
    low = fsdp2(role("fsdp2_infer", compute_dtype="bfloat16"))
    assert low.buffers_mb > 0  # a copy in the lower dtype


def test_keys_and_values_of_a_full_batch() -> None:
    model = ModelConfig(config=FIELDS, dtype="bfloat16")
    taken = memory.hf(role("hf_infer", batch_size=5), model, model_size(model), Load(8, 32))
    values = 2 * 4 * 2 * 16  # keys and values, layers, heads, size
    kept = 5 * (8 + 24) * values * 2 * (9 / 8) * (5 / 4)
    assert taken.kv_cache_mb * MB == pytest.approx(kept + 5 * 8 * values * 2)
    assert taken.weights_mb * MB == PARAMETERS * 2
    assert taken.optimizer_mb == taken.gradients_mb == taken.buffers_mb == 0


def test_numbers_from_modules_with_torch() -> None:
    assert memory.CHUNK_MB * MB == functional.CHUNK_BYTES
    assert memory.PREFILL_TOKENS == generation.PREFILL_TOKENS
    assert memory.SPARE_SHARE == generation.SPARE_SHARE


def test_the_tensors_of_a_step_are_what_was_estimated() -> None:
    fields = MODEL | {"num_hidden_layers": 2}  # 23 M parameters
    what = setting({**TRAIN, "training": {"micro_batch_size": 2}}, 2, 128, fields=fields)
    wanted = estimate(what)
    taken_mb = measured_mb(what, MALLOC_MMAP_THRESHOLD_="65536")[-1]
    assert wanted.peak_mb - wanted.allocator_mb == pytest.approx(taken_mb, rel=0.06)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_a_rank_takes_what_was_estimated(gradient_checkpointing: bool) -> None:
    training = {"micro_batch_size": 4, "gradient_checkpointing": gradient_checkpointing}
    what = setting({**TRAIN, "training": training}, 8, 256)  # 42 M parameters
    assert estimate(what).peak_mb == pytest.approx(measured_mb(what)[-1], rel=0.2)


def test_a_copy_for_a_checkpoint_has_weights_and_moments() -> None:
    assert fsdp2(role(world_size=4)).checkpoint_mb * MB == PARAMETERS * 12 / 4
    assert fsdp2(role("fsdp2_infer")).checkpoint_mb == 0
