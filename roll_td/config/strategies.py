"""Strategies by name, and what `strategy_config` of each may hold. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal

from roll_td.config.classes import import_object
from roll_td.config.schema import ConfigError, Problem, Reading, read


@dataclass
class Fsdp2Config:
    """Fully sharded data parallel, second version, by torch."""

    fsdp_size: int | None = None
    """Ranks that share one copy of the model; None: all of the role. Fewer: hybrid sharding, with
    as many copies as fit. A divisor of the role's workers."""
    reshard_after_forward: bool = True
    """Free gathered weights between forward and backward; False is faster and takes more memory."""


@dataclass
class HfInferConfig:
    """Generation and log-probs by a model of transformers on each worker."""

    batch_size: int = 64
    """Sequences that are generated at once; as one ends the next takes its place."""


@dataclass
class MockConfig:
    """Deterministic answers without a model, for tests and dry runs."""

    latency_s: float = 0.0
    """Seconds that each call takes."""
    min_tokens: int = 1
    """Shortest response."""
    max_tokens: int | None = None
    """Longest response; None: max_new_tokens of the generation."""
    tail: float | None = None
    """Exponent of the Pareto distribution that lengths have from min_tokens on, cut at the longest;
    None: they are uniform."""
    lengths_of: Literal["sample", "prompt"] = "sample"
    """What a length is drawn for; prompt: all responses to one that ends with the same token have
    the same."""
    vocab_size: int = 32
    """Response tokens are below this number."""
    fail_on_call: int | None = None
    """Number of the call, from 0, that raises; None: none does."""
    token_s: float = 0.0
    """Seconds that its engine takes for a token of each of its samples."""
    slots: int = 64
    """Samples that its engine has at work at once."""
    fault: Literal["fail", "hang"] | None = None
    """What the engine of one worker does when its time has come; None: nothing."""
    fault_worker: int = 0
    """That worker."""
    fault_after: int = 0
    """Answers that it gives before."""


SET_FOR_VLLM = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "skip_tokenizer_init": "model.tokenizer",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "tensor_parallel_size": "num_gpus_per_worker",
    "data_parallel_size": "device_mapping",
    "seed": "seed",
    "enable_lora": "strategy_config.lora",
    "max_lora_rank": "model.lora.rank",
}
"""Engine arguments → the setting that says what they are."""
FIXED_FOR_VLLM = {
    "load_format": "weights come from the worker's rank",
    "worker_extension_cls": "it is what takes them",
    "logprobs_mode": "infer_log_probs are of the distribution sampled from",
    "enable_sleep_mode": "offload_states uses it where the platform has it",
    "max_loras": "there is one policy",
    "runner": "the role generates",
    "stream_interval": "each token is noted with the weights that made it",
}
"""Engine arguments that nobody sets, and why."""


@dataclass
class VllmArguments:
    """Those of its engine arguments that are looked at here, so also where it is not installed."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    pipeline_parallel_size: int | None = None
    enforce_eager: bool | None = None

    def __post_init__(self) -> None:
        numbers = {k: v for k, v in vars(self).items() if k != "max_model_len"}  # -1: as it fits
        wrong = [k for k, v in numbers.items() if v is not None and v is not False and v <= 0]
        problems = [Problem(k, repr(numbers[k]), "must be above 0", "") for k in wrong]
        if self.max_model_len is not None and self.max_model_len < 1 and self.max_model_len != -1:
            rule = "must be above 0, or -1 for what the memory has room for"
            problems.append(Problem("max_model_len", repr(self.max_model_len), rule, ""))
        if (share := self.gpu_memory_utilization) is not None and share > 1:
            problems.append(Problem("gpu_memory_utilization", repr(share), "must be at most 1", ""))
        if problems:
            raise ConfigError(problems)


@dataclass
class VllmConfig:
    """An engine of vLLM on the devices of each worker, tensor-parallel over them. Further keys are
    arguments of its EngineArgs, by the names that the installed vLLM has. On CPUs without saying
    otherwise: enforce_eager, block_size 32, kv_cache_memory_bytes 1 GiB, no chunked prefill."""

    lora: Literal["merged", "adapters"] = "merged"
    """How what model.lora has trained comes: in whole weights, or alone, for an engine that has
    read model.path itself and adds the adapters to it as it computes. Far fewer bytes each time."""
    weights_on: Literal["host", "device"] = "host"
    """Where new weights wait for the engine, a whole copy that stays, also while it is offloaded:
    in host memory, or on the worker's GPU, where the engine's processes see it by CUDA IPC."""
    sleep_level: Literal[1, 2] = 1
    """What offload_states gives up: 1 the keys and values, with the weights moved to host memory on
    a GPU; 2 the weights too, which come anew from where they wait, unless new ones have come."""
    request_timeout_s: float = 1800.0
    """Seconds after which an engine that is asked by one call for all, and ends no answer, counts
    as hung: it is killed, and the job ends. Of single requests scheduling has its own."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """The further keys; one that is null is left out, which a variant of a config takes back with
    what it does not want."""

    def __post_init__(self) -> None:
        self.engine_args = {k: v for k, v in self.engine_args.items() if v is not None}
        problems = [
            Problem(key, repr(self.engine_args[key]), f"is said by {where}", f"set {where}")
            for key, where in SET_FOR_VLLM.items()
            if key in self.engine_args
        ] + [
            Problem(key, repr(self.engine_args[key]), f"is fixed: {why}", "leave it out")
            for key, why in FIXED_FOR_VLLM.items()
            if key in self.engine_args
        ]
        looked_at = {f.name for f in fields(VllmArguments)} & self.engine_args.keys()
        problems += read(VllmArguments, {k: self.engine_args[k] for k in looked_at}).problems
        if self.lora == "adapters" and self.sleep_level == 2:
            rule, fix = "drops weights, and lora=adapters has no copy of them", "set it to 1"
            problems.append(Problem("sleep_level", "2", rule, fix))
        if self.lora == "adapters" and self.weights_on == "device":
            rule, fix = "is for whole weights, and lora=adapters brings none", "set it to host"
            problems.append(Problem("weights_on", "device", rule, fix))
        if self.request_timeout_s <= 0:
            given = repr(self.request_timeout_s)
            problems.append(Problem("request_timeout_s", given, "must be above 0 seconds", ""))
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True)
class Strategy:
    """A row of the table."""

    cls: str
    """Dotted path of the class."""
    config_cls: type[Any]
    """What strategy_config is read into."""
    topology: str
    """Dotted path of a pure function, WorkerConfig → Topology, in a module without torch."""
    trains: bool = False
    """Whether it is a TrainStrategy."""
    generates: bool = False
    """Whether it makes responses to prompts."""
    serves: bool = False
    """Whether it has an engine (open_engine) that takes further prompts while it generates."""
    memory: str | None = None
    """Dotted path of a pure function, (WorkerConfig, ModelConfig, ModelSize, Load) → RoleMemory, in
    a module without torch; None: it takes no memory to speak of."""
    spreads: bool = False
    """Whether its memory is on all devices of a worker; else on the first."""
    further: str | None = None
    """Field of config_cls that takes the keys which are none of its own; None: these are errors."""
    further_cls: str | None = None
    """Dotted path of a function, () → a dataclass of what such keys may be, in a module without
    torch; it gives None where that can't be told, and the role checks them when it starts."""


_APART = "roll_td.distributed.topology.apart"
_TOGETHER = "roll_td.distributed.topology.together"
_MEMORY = "roll_td.config.memory."

STRATEGIES = {
    "fsdp2_train": Strategy(
        "roll_td.strategies.fsdp2.Fsdp2Train",
        Fsdp2Config,
        _TOGETHER,
        trains=True,
        memory=f"{_MEMORY}fsdp2",
    ),
    "fsdp2_infer": Strategy(
        "roll_td.strategies.fsdp2.Fsdp2Infer", Fsdp2Config, _TOGETHER, memory=f"{_MEMORY}fsdp2"
    ),
    "hf_infer": Strategy(
        "roll_td.strategies.hf.HfInfer",
        HfInferConfig,
        _APART,
        generates=True,
        serves=True,
        memory=f"{_MEMORY}hf",
    ),
    "vllm": Strategy(
        "roll_td.strategies.vllm.strategy.VllmInfer",
        VllmConfig,
        _APART,
        generates=True,
        serves=True,
        memory=f"{_MEMORY}vllm",
        spreads=True,
        further="engine_args",
        further_cls="roll_td.config.vllm.engine_arguments",
    ),
    "mock_infer": Strategy(
        "roll_td.strategies.mock.MockInfer", MockConfig, _APART, generates=True, serves=True
    ),
}


@dataclass
class StrategyArgs:
    """The backend of a role."""

    strategy_name: str
    """A name of STRATEGIES."""
    strategy_config: dict[str, Any] = field(default_factory=dict)
    """Its own settings."""

    def __post_init__(self) -> None:
        if self.strategy_name not in STRATEGIES:
            near = get_close_matches(self.strategy_name, STRATEGIES, 1)
            fix = f"did you mean {near[0]}?" if near else ""
            rule = f"is no strategy; there are {', '.join(STRATEGIES)}"
            raise ConfigError([Problem("strategy_name", self.strategy_name, rule, fix)])
        problems = self._read().problems
        if problems:
            raise ConfigError([problem.under("strategy_config") for problem in problems])

    @property
    def row(self) -> Strategy:
        """The strategy's row of the table."""
        return STRATEGIES[self.strategy_name]

    @property
    def settings(self) -> Any:
        """strategy_config as an object of the row's config_cls."""
        return self._read().value

    def further_problems(self) -> list[Problem] | None:
        """What is wrong with keys that `further` has taken; None: can't be told here."""
        if self.row.further is None or self.row.further_cls is None:
            return []
        cls = import_object(self.row.further_cls)()
        if cls is None:
            return None
        given = getattr(self.settings, self.row.further)
        names = [field.name for field in fields(cls)]
        problems = []
        for key in [key for key in given if key not in names]:
            near = get_close_matches(key, names, 1)
            fix = f"did you mean {near[0]}?" if near else "leave it out"
            problems.append(Problem(key, repr(given[key]), "the engine has no such argument", fix))
        known = {key: value for key, value in given.items() if key in names}
        return [*problems, *read(cls, known).problems]

    def _read(self) -> Reading[Any]:
        given, further = self.strategy_config, self.row.further
        if further is not None:
            own = {f.name for f in fields(self.row.config_cls)} - {further}
            rest = {key: value for key, value in given.items() if key not in own}
            given = {key: given[key] for key in own & given.keys()} | {further: rest}
        return read(self.row.config_cls, given)
