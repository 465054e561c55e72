"""How much memory a role takes of one of its devices: arithmetic on its config, no torch.

The estimate is of tensors; the context of a driver, libraries and what an allocator can't use
come on top.

1 MB is 2^20 bytes, 1 GB 1,024 MB. Bytes kept per token follow the list of Korthikanti et al. 2022
(arXiv:2205.05198, section 4.1), made again for layers of the Llama kind as transformers writes
them and for attention that keeps no scores (Dao et al. 2022, arXiv:2205.14135), by which tensors
autograd was seen to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll_td.config.base import WorkerConfig
from roll_td.config.model import ModelConfig, TrainingConfig
from roll_td.config.model_size import ModelSize

MB = 2**20
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CHUNK_MB = 64
"""algorithms.functional.CHUNK_BYTES: float32 logits made at once."""
PREFILL_TOKENS = 8192
"""strategies.generation.PREFILL_TOKENS: of prompts in one forward pass."""
SPARE_SHARE = 8
"""strategies.generation.SPARE_SHARE: one more column of keys and values in so many."""


@dataclass(frozen=True)
class Load:
    """How much is computed at once."""

    prompt_tokens: int
    """Of the longest prompt."""
    row_tokens: int
    """Of the longest row: prompt and response."""
    batch_rows: int | None = None
    """Rows of an optimiser step over all ranks; None: not known, taken for many."""


@dataclass(frozen=True)
class Moment:
    """What is held at one time beside what stays, in bytes."""

    gradients: float = 0
    activations: float = 0
    buffers: float = 0
    kv_cache: float = 0

    @property
    def total(self) -> float:
        """All of it."""
        return self.gradients + self.activations + self.buffers + self.kv_cache


@dataclass(frozen=True)
class RoleMemory:
    """What a role takes of one of its devices, in MB. Of what comes and goes each part is given
    at its largest; they need not be so at the same time."""

    weights_mb: float
    """Stay: its part of the weights."""
    optimizer_mb: float
    """Stay: both moments of AdamW."""
    gradients_mb: float
    """Its part of the gradients, summed in float32."""
    activations_mb: float
    """What is kept for the backward pass, and logits."""
    buffers_mb: float
    """Weights gathered whole, and gradients before they are cut."""
    kv_cache_mb: float
    """Keys and values of the sequences that are generated."""
    working_mb: float
    """The most that is held at one time of the four above."""

    @property
    def resident_mb(self) -> float:
        """What stays."""
        return self.weights_mb + self.optimizer_mb

    @property
    def peak_mb(self) -> float:
        """What stays, and the most beside it."""
        return self.resident_mb + self.working_mb


def _role_memory(weights: float, optimizer: float, moments: Sequence[Moment]) -> RoleMemory:
    """From bytes."""
    return RoleMemory(
        weights_mb=weights / MB,
        optimizer_mb=optimizer / MB,
        gradients_mb=max(m.gradients for m in moments) / MB,
        activations_mb=max(m.activations for m in moments) / MB,
        buffers_mb=max(m.buffers for m in moments) / MB,
        kv_cache_mb=max(m.kv_cache for m in moments) / MB,
        working_mb=max(m.total for m in moments) / MB,
    )


def fsdp2(role: WorkerConfig, model: ModelConfig, size: ModelSize, load: Load) -> RoleMemory:
    """Of a role that is sharded by FSDP2, as strategies.fsdp2 sets it up: the root, which is all
    that no layer has, is gathered for the whole step, each layer while it is computed; gradients
    are reduced in float32."""
    assert role.strategy_args is not None and role.world_size is not None
    settings = role.strategy_args.settings
    lora = size.lora_parameters(model.lora) if model.lora else 0
    weights = size.parameters * DTYPE_BYTES[model.dtype] + lora * 4
    compute_bytes = DTYPE_BYTES[role.training.compute_dtype or model.dtype]
    # topology: a group of one is no hybrid, so all ranks share one copy then
    wanted = settings.fsdp_size or 0
    shards = wanted if 1 < wanted < role.world_size else role.world_size
    units = _Units(size, lora, shards, compute_bytes, settings.reshard_after_forward)
    tokens, is_only = _micro_batch(role, load)
    if not role.strategy_args.row.trains:
        work = _inference_bytes(size, tokens, compute_bytes)
        return _role_memory(weights / shards, 0, [Moment(0, work, units.in_forward)])
    trained = lora or size.parameters
    moments = _training_moments(units, role.training, tokens, trained * 4 / shards, is_only)
    return _role_memory(weights / shards, trained * 8 / shards, moments)


def hf(role: WorkerConfig, model: ModelConfig, size: ModelSize, load: Load) -> RoleMemory:
    """Of a whole model on each worker, which generates and gives log-probs, as strategies.hf and
    strategies.generation do it: a full batch, each sequence as long as it may be."""
    assert role.strategy_args is not None
    places = role.strategy_args.settings.batch_size
    value_bytes = DTYPE_BYTES[model.dtype]
    token_bytes = size.cache_values_per_token * value_bytes
    columns = load.prompt_tokens + role.generation.max_new_tokens
    # columns are kept in reserve, and a layer is copied when they are used up
    share = (1 + 1 / SPARE_SHARE) * (1 + 1 / size.num_layers)
    cache = places * columns * token_bytes * share
    prefilled = min(places * load.prompt_tokens, max(PREFILL_TOKENS, load.prompt_tokens))
    logits = places * size.vocab_size * 4
    tokens, _ = _micro_batch(role, load)
    moments = [
        Moment(
            activations=_inference_bytes(size, prefilled, value_bytes),
            kv_cache=cache + prefilled * token_bytes,
        ),
        # logits, their log-probs, probabilities, and float64 sums of these
        Moment(activations=5 * logits, kv_cache=cache),
        Moment(activations=_inference_bytes(size, tokens, value_bytes)),
    ]
    return _role_memory(size.parameters * value_bytes, 0, moments)


def _micro_batch(role: WorkerConfig, load: Load) -> tuple[int, bool]:
    """Tokens of a micro-batch of longest rows, and whether it is the only one of a step."""
    assert role.world_size is not None
    training, row = role.training, load.row_tokens
    tokens = max(training.max_tokens_per_micro_batch or training.micro_batch_size * row, row)
    if load.batch_rows is None:
        return tokens, False
    own = -(-load.batch_rows // role.world_size) * row
    return min(tokens, own), tokens >= own


@dataclass(frozen=True)
class _Units:
    """What FSDP gathers and reduces, in bytes."""

    size: ModelSize
    lora: int
    """Parameters of the adapters; 0: the weights are trained."""
    shards: int
    compute_bytes: int
    reshard_after_forward: bool

    @property
    def root(self) -> int:
        """Parameters that no layer has."""
        return self.size.parameters - self.size.num_layers * self.size.layer_parameters

    @property
    def layer(self) -> float:
        """Parameters of a layer, adapters among them."""
        return self.size.layer_parameters + self.lora / self.size.num_layers

    def gathered(self, layers: int) -> float:
        """The root and so many layers; all of these if they stay whole after the forward pass."""
        layers = layers if self.reshard_after_forward else self.size.num_layers
        return self.compute_bytes * (self.root + layers * self.layer)

    @property
    def in_forward(self) -> float:
        """The root, a layer, and where it comes from others its gather's own copy."""
        return self.gathered(1 if self.shards == 1 else 2)


def _training_moments(
    units: _Units, training: TrainingConfig, tokens: int, gradients: float, is_only: bool
) -> list[Moment]:
    """When a training step may hold the most. Gradients of a micro-batch add to those of others,
    or come into being layer by layer if it is the only one."""
    size, width, is_whole = units.size, units.compute_bytes, not units.lora
    hidden = tokens * size.hidden_size * width
    layer = tokens * _layer_bytes(size, width, is_whole)
    kept = hidden if training.gradient_checkpointing else layer
    computed = layer + hidden + 2 * tokens * size.intermediate_size * width
    states = hidden * (4 + is_whole) + 4 * tokens * size.hidden_size  # after the last layer
    logits = _logits_bytes(size, tokens, width)
    # parameters that are trained: of the head, the root, a layer
    head = size.vocab_size * size.hidden_size * is_whole
    root = units.root * is_whole
    block = units.layer if is_whole else units.lora / size.num_layers
    # what is sent, in float32, and what arrives; a rank that is alone makes one copy more
    reduced = 4 * (1 + 1 / units.shards + (units.shards == 1))
    before = 0 if is_only else gradients
    of_layers = gradients - 4 * root / units.shards if is_only else gradients
    next_layer = int(units.shards > 1)
    return [
        # the loss: the head's gradient is summed in float32, of products in the dtype of the rest
        Moment(
            before,
            size.num_layers * kept + states + logits,
            units.gathered(0) + (4 + width % 4) * head,
        ),
        # backward through the last layer
        Moment(
            before,
            (size.num_layers - 1) * kept + computed,
            units.gathered(1 + next_layer) + width * head,
        ),
        # and its gradients reduced
        Moment(
            before,
            (size.num_layers - 1) * kept,
            units.gathered(next_layer) + width * (head + block) + reduced * block,
        ),
        # backward through the first layer
        Moment(of_layers, computed, units.gathered(1) + width * head + 4 * block),
        # through the embedding
        Moment(
            of_layers,
            hidden,
            units.gathered(0) + width * (head + size.embeddings * is_whole) + 4 * block,
        ),
        # the gradients of the root reduced
        Moment(of_layers, 0, max(width + 4, reduced) * root),
        # the optimiser
        Moment(gradients),
    ]


def _layer_bytes(size: ModelSize, width: int, is_whole: bool) -> float:
    """Kept of a layer for each token until its backward pass, where numbers take `width` bytes.

    Inputs of norms are float32; what they were made is kept for the gradient of the norm's weight,
    if that is trained. Then the inputs of linear layers, queries, keys, values and the result of
    attention, as a line and row by row, and what the MLP multiplies.
    """
    hidden, inner = size.hidden_size, size.intermediate_size
    query, key = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    gates = sum(linear.outputs == inner for linear in size.linears)
    products = 4 * inner if gates > 1 else 5 * inner  # act(gate) · up, or GELU in its parts
    norms, rest = divmod(size.layer_extras, hidden)
    normed = norms * hidden + (query + key if rest else 0)  # the rest is norms of heads
    return 4 * normed + width * (normed * is_whole + 2 * hidden + 3 * query + 2 * key + products)


def _inference_bytes(size: ModelSize, tokens: int, width: int) -> float:
    """The most that is held without gradients: inside an MLP, or with logits."""
    hidden, inner = size.hidden_size, size.intermediate_size
    inside = tokens * width * (3 * hidden + 3 * inner)
    return max(inside, tokens * width * 3 * hidden + _logits_bytes(size, tokens, width))


def _logits_bytes(size: ModelSize, tokens: int, width: int) -> float:
    """Of those made at once, and their copy where they are computed in another dtype."""
    return min(CHUNK_MB * MB, 4 * tokens * size.vocab_size) * (1 + (width % 4) / 4)
