"""How much memory a role takes of one of its devices: arithmetic on its config, no torch.

Counted are tensors, and a share for the allocator; libraries and the context of a driver come on
top.

1 MB is 2^20 bytes, 1 GB 1,024 MB. The ranks of a copy share weights, gradients and moments (ZeRO,
Rajbhandari et al. 2020, arXiv:1910.02054, section 5). Bytes kept per token follow the list of
Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), made again for layers of the Llama kind as
transformers writes them and for attention that keeps no scores (Dao et al. 2022,
arXiv:2205.14135), by which tensors autograd was seen to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roll_td.config.base import WorkerConfig
from roll_td.config.model import ModelConfig, TrainingConfig
from roll_td.config.model_size import ModelSize

MB = 2**20
ALLOCATOR_SHARE = 0.25
"""More that is held beside what comes and goes: pieces that were freed and fit nothing that came
next. Measured on CPUs by tests/benchmarks/memory.py: 0.1 to 0.8 of it by glibc from the second call
on, near 0 if all that is freed goes back at once, as platform.give_freed_memory_back has it of
large blocks where activations are computed again."""
KEPT_SHARE = 0.45
"""Instead, of training that keeps its activations. Measured on CPUs after two steps: 0.36 and 0.59
of SmolLM2-135M, 2,048 tokens, on one rank and on each of two; 0.44 of 55 M parameters."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CHUNK_MB = 64
"""algorithms.functional.CHUNK_BYTES: float32 logits made at once."""
PREFILL_TOKENS = 8192
"""strategies.generation.PREFILL_TOKENS: of prompts in one forward pass."""
SPARE_SHARE = 8
"""strategies.generation.SPARE_SHARE: one more column of keys and values in so many."""
VLLM_SHARE, VLLM_TOKENS, VLLM_SAMPLES = 0.92, 8192, 256
"""vLLM 0.32's gpu_memory_utilization, max_num_batched_tokens and max_num_seqs where none are given;
on GPUs of 70 GB and more the latter two are larger."""
KEEPS_SCORES = "eager"
"""The attn_implementation of transformers that keeps the scores of all pairs of tokens."""


@dataclass(frozen=True)
class Load:
    """How much is computed at once."""

    prompt_tokens: int
    """Of the longest prompt."""
    row_tokens: int
    """Of the longest row: prompt and response."""
    batch_rows: int | None = None
    """Rows of an optimiser step over all ranks; None: not known, taken for many."""
    device_gb: float | None = None
    """Memory of a device; None: not known."""


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
    allocator_mb: float
    """ALLOCATOR_SHARE or KEPT_SHARE of the most that is held at one time of the four above."""
    working_mb: float
    """This most, with the allocator's share."""
    reserved_mb: float
    """Stays: of the keys and values what is taken for them at the start, used or not."""
    checkpoint_mb: float
    """In host memory while an asynchronous checkpoint is written: a copy of what is trained and of
    the moments. No part of the peak of a device; a rank without one holds it beside its own."""
    kept_mb: float = 0.0
    """Of weights_mb what is on the first device of a worker alone, and stays when it is offloaded:
    a copy of which its engine takes its own."""

    @property
    def resident_mb(self) -> float:
        """What stays."""
        return self.weights_mb + self.optimizer_mb + self.reserved_mb

    @property
    def peak_mb(self) -> float:
        """What stays, and the most beside it."""
        return self.resident_mb + self.working_mb

    def without_kept(self) -> RoleMemory:
        """On further devices of a worker."""
        return replace(self, weights_mb=self.weights_mb - self.kept_mb, kept_mb=0.0)

    @classmethod
    def of(
        cls,
        weights: float,
        optimizer: float,
        moments: Sequence[Moment],
        share: float = ALLOCATOR_SHARE,
        reserved: float = 0,
        checkpoint: float = 0,
        kept: float = 0,
    ) -> RoleMemory:
        """From bytes that stay, all moments at which the most may be held, the allocator's share
        of it, bytes that are reserved for keys and values, of the copy for a checkpoint, and of
        the weights what is kept beside these."""
        most = max(moment.total for moment in moments) / MB
        return cls(
            weights_mb=(weights + kept) / MB,
            optimizer_mb=optimizer / MB,
            gradients_mb=max(moment.gradients for moment in moments) / MB,
            activations_mb=max(moment.activations for moment in moments) / MB,
            buffers_mb=max(moment.buffers for moment in moments) / MB,
            kv_cache_mb=(reserved + max(moment.kv_cache for moment in moments)) / MB,
            allocator_mb=most * share,
            working_mb=most * (1 + share),
            reserved_mb=reserved / MB,
            checkpoint_mb=checkpoint / MB,
            kept_mb=kept / MB,
        )


def fsdp2(role: WorkerConfig, model: ModelConfig, size: ModelSize, load: Load) -> RoleMemory:
    """Of a role that is sharded by FSDP2, as strategies.fsdp2 sets it up: the root, which is all
    that no layer has, is gathered for the whole step, each layer while it is computed; gradients
    are reduced in float32."""
    assert role.strategy_args is not None and role.world_size is not None
    settings = role.strategy_args.settings
    lora = size.lora_parameters(model.lora) if model.lora else 0
    shards = settings.fsdp_size or role.world_size
    weights = (size.parameters * DTYPE_BYTES[model.dtype] + lora * 4) / shards
    batch = _micro_batch(role, model, size, load)
    is_alone = role.world_size == 1 and role.training.compute_dtype is None
    units = _Units(size, lora, shards, batch.width, settings.reshard_after_forward, is_alone)
    if not role.strategy_args.row.trains:
        buffers = units.gathered(1 + units.comes_from_others)
        return RoleMemory.of(weights, 0, [Moment(0, batch.without_gradients, buffers)])
    trained = (lora or size.parameters) / shards
    moments = _training_moments(units, batch, role.training, 4 * trained)
    share = ALLOCATOR_SHARE if role.training.gradient_checkpointing else KEPT_SHARE
    return RoleMemory.of(weights, 8 * trained, moments, share, checkpoint=12 * trained)


def hf(role: WorkerConfig, model: ModelConfig, size: ModelSize, load: Load) -> RoleMemory:
    """Of a whole model on each worker, which generates and gives log-probs, as strategies.hf and
    strategies.generation do it: a full batch, each sequence as long as it may be."""
    assert role.strategy_args is not None
    places = role.strategy_args.settings.batch_size
    width = DTYPE_BYTES[model.dtype]
    token_bytes = size.cache_values_per_token * width
    columns = load.prompt_tokens + role.generation.max_new_tokens
    # columns are kept in reserve, and a layer is copied when they are used up
    share = (1 + 1 / SPARE_SHARE) * (1 + 1 / size.num_layers)
    cache = places * columns * token_bytes * share
    tokens = min(places * load.prompt_tokens, max(PREFILL_TOKENS, load.prompt_tokens))
    line = load.prompt_tokens if model.attn_implementation == KEEPS_SCORES else 0
    prefill = _MicroBatch(size, tokens, width, line)
    logits = places * size.vocab_size * 4
    moments = [
        # a batch has ended, its places are still there, and the next prompts are computed
        Moment(activations=prefill.layer_work + logits, kv_cache=cache + tokens * token_bytes),
        # logits, their log-probs, probabilities, and float64 sums of these
        Moment(activations=5 * logits, kv_cache=cache),
        Moment(activations=_micro_batch(role, model, size, load).without_gradients),
    ]
    return RoleMemory.of(size.parameters * width, 0, moments)


def vllm(role: WorkerConfig, model: ModelConfig, size: ModelSize, load: Load) -> RoleMemory:
    """Of the first device of an engine of vLLM, over which its weights are cut; weights_on=device
    keeps all of them there once more. Keys and values have kv_cache_memory_bytes, or what weights
    and a step leave of gpu_memory_utilization; a step is taken to hold what transformers holds in a
    layer, and three times the logits of all samples.

    ValueError if there is neither that nor the size of a device.
    """
    assert role.strategy_args is not None
    settings, width = role.strategy_args.settings, DTYPE_BYTES[model.dtype]
    given, weights = settings.engine_args, size.parameters * width / role.num_gpus_per_worker
    kept = size.parameters * width if settings.weights_on == "device" else 0
    cache, share = given.get("kv_cache_memory_bytes"), given.get("gpu_memory_utilization")
    if cache is None and load.device_gb is None:
        raise ValueError(
            f"vLLM takes gpu_memory_utilization={share or VLLM_SHARE} of a GPU, on CPUs 1 GiB for "
            "keys and values; set device_memory_gb, or strategy_config.kv_cache_memory_bytes"
        )
    tokens = given.get("max_num_batched_tokens", VLLM_TOKENS)
    logits = given.get("max_num_seqs", VLLM_SAMPLES) * size.vocab_size * 4
    step = Moment(activations=max(_MicroBatch(size, tokens, width, 0).layer_work, 3 * logits))
    if cache is None:
        assert load.device_gb is not None, "looked at above"
        whole = (share or VLLM_SHARE) * load.device_gb * 1024 * MB
        cache = max(0.0, whole - weights - step.total)
        return RoleMemory.of(weights, 0, [step], share=0, reserved=cache, kept=kept)
    return RoleMemory.of(weights, 0, [step], reserved=cache, kept=kept)


@dataclass(frozen=True)
class _MicroBatch:
    """What is computed at once, and how many bytes that takes."""

    size: ModelSize
    tokens: int
    width: int
    """Bytes of a number."""
    line: int
    """Tokens that each is compared with by attention that keeps the scores; 0: it keeps none."""
    is_only: bool = False
    """Whether a step has no other."""

    @property
    def low(self) -> int:
        """Width of what has to be converted from float32; 0: nothing has."""
        return self.width if self.width < 4 else 0

    @property
    def hidden(self) -> int:
        """Hidden states."""
        return self.tokens * self.size.hidden_size * self.width

    @property
    def scores(self) -> int:
        """Scores of a layer's attention: the softmax in float32, and converted."""
        return self.tokens * self.size.num_heads * self.line * (4 + self.low)

    @property
    def logits(self) -> float:
        """Of as many tokens as are done at once, probabilities as many, and a conversion."""
        chunk = min(CHUNK_MB * MB, 4 * self.tokens * self.size.vocab_size)
        return chunk * (2 + self.low / 4)

    @property
    def layer_work(self) -> int:
        """The most inside a layer without gradients: three results of the MLP, or scores."""
        inner = self.tokens * self.size.intermediate_size * self.width
        return 3 * self.hidden + max(3 * inner, 2 * self.scores)

    @property
    def without_gradients(self) -> float:
        """The most inside a forward pass: in a layer, or in the head."""
        return max(self.layer_work, 3 * self.hidden + self.logits)

    def kept(self, is_whole: bool) -> int:
        """Of a layer until its backward pass; is_whole: with the gradients of all its weights.

        The inputs of norms, in float32; what they were made, for the gradient of the norm's
        weight; the inputs of linear layers; queries, keys, values; the result of attention, as it
        comes and joined; what the MLP multiplies.
        """
        size = self.size
        hidden, inner = size.hidden_size, size.intermediate_size
        query, key = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
        rest = 2 * hidden + 3 * query + 2 * key
        if sum(linear.outputs == inner for linear in size.linears) == 1:
            # GPT-2: torch's own norms, which keep their input alone, and GELU in its parts
            values = 4 * 2 * hidden + self.width * (rest + 5 * inner)
        else:
            norms, of_heads = divmod(size.layer_extras, hidden)
            normed = norms * hidden + (query + key if of_heads else 0)
            values = 4 * normed + self.width * (normed * is_whole + rest + 4 * inner)
        return self.tokens * values + self.scores


def _micro_batch(
    role: WorkerConfig, model: ModelConfig, size: ModelSize, load: Load
) -> _MicroBatch:
    """A full micro-batch of longest rows."""
    assert role.world_size is not None
    training, row = role.training, load.row_tokens
    tokens = max(training.max_tokens_per_micro_batch or training.micro_batch_size * row, row)
    is_only = False
    if load.batch_rows is not None:
        own = -(-load.batch_rows // role.world_size) * row
        tokens, is_only = min(tokens, own), tokens >= own
    line = 0
    if model.attn_implementation == KEEPS_SCORES:
        line = tokens if training.packing else row
    width = DTYPE_BYTES[role.training.compute_dtype or model.dtype]
    return _MicroBatch(size, tokens, width, line, is_only)


@dataclass(frozen=True)
class _Units:
    """What FSDP gathers and reduces."""

    size: ModelSize
    lora: int
    """Parameters of the adapters; 0: the weights are trained."""
    shards: int
    width: int
    """Bytes of a number that is gathered."""
    reshard_after_forward: bool
    is_alone: bool
    """One rank that computes in the weights' dtype: they are used where they lie."""

    @property
    def comes_from_others(self) -> bool:
        """A gather then has a copy of its own, or brings the next layer already."""
        return self.shards > 1

    @property
    def root(self) -> int:
        """Parameters that no layer has."""
        return self.size.parameters - self.size.num_layers * self.size.layer_parameters

    @property
    def layer(self) -> float:
        """Parameters of a layer, adapters among them."""
        return self.size.layer_parameters + self.lora / self.size.num_layers

    def gathered(self, layers: int) -> float:
        """Bytes of the root and so many layers; of all that stay whole after it."""
        if self.is_alone:
            return 0.0
        layers = layers if self.reshard_after_forward else self.size.num_layers
        return self.width * (self.root + layers * self.layer)


def _training_moments(
    units: _Units, batch: _MicroBatch, training: TrainingConfig, gradients: float
) -> list[Moment]:
    """When a training step may hold the most. Gradients of a micro-batch add to those of others,
    or come into being layer by layer if it is the only one."""
    size, width, is_whole = batch.size, batch.width, not units.lora
    layer = batch.kept(is_whole)
    kept = batch.hidden if training.gradient_checkpointing else layer
    others = (size.num_layers - 1) * kept
    # backward through an MLP holds the gradients of two of its results
    work = layer + batch.hidden + 2 * batch.tokens * size.intermediate_size * width
    # the last norm as in a layer; what the head gets of it, and the gradient of that
    states = batch.hidden * (4 + is_whole) + 4 * batch.tokens * size.hidden_size
    # parameters that have a gradient: of the head, the root, a layer
    head = size.vocab_size * size.hidden_size * is_whole
    root = units.root * is_whole
    block = units.layer if is_whole else units.lora / size.num_layers
    # float32 that is sent, and what arrives; a rank that is alone makes one copy more
    sent = 0 if units.is_alone else 4
    reduced = sent * (1 + 1 / units.shards + (units.shards == 1))
    before = 0 if batch.is_only else gradients
    of_layers = gradients - 4 * root / units.shards if batch.is_only else gradients
    ahead = int(units.comes_from_others)
    return [
        # the loss: the head's gradient is summed in float32, of products in the lower dtype
        Moment(
            before,
            kept + others + states + batch.logits,
            units.gathered(0) + (4 + batch.low) * head,
        ),
        # backward through the last layer
        Moment(before, others + work, units.gathered(1 + ahead) + width * head),
        # its gradients reduced
        Moment(before, others, units.gathered(ahead) + width * (head + block) + reduced * block),
        # backward through the first layer
        Moment(of_layers, work, units.gathered(1) + width * head + sent * block),
        # through the embedding
        Moment(
            of_layers,
            batch.hidden,
            units.gathered(0) + width * (head + size.embeddings * is_whole) + sent * block,
        ),
        # the gradients of the root reduced
        Moment(of_layers, 0, max(width + sent, reduced) * root),
        # the optimiser
        Moment(gradients),
    ]
