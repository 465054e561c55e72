"""`vllm`: an engine of vLLM for each worker, which generates; its devices are the worker's."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll_td import models
from roll_td.config.model import GenerationConfig
from roll_td.config.schema import ConfigError
from roll_td.config.strategies import VllmConfig
from roll_td.config.vllm import engine_problems, temperature_problems
from roll_td.platform import physical_device
from roll_td.protocol import DataProto
from roll_td.strategies import sampling, states
from roll_td.strategies.base import InferenceStrategy, ModelProvider, StrategyContext
from roll_td.strategies.batches import Response, with_responses
from roll_td.strategies.exchange import VERSION, HoldsWeights
from roll_td.strategies.generation import Stop, as_sampled
from roll_td.strategies.parts import Part
from roll_td.strategies.vllm import adapters
from roll_td.strategies.vllm.process import EngineProcess
from roll_td.strategies.vllm.serving import VllmEngine, require_room
from roll_td.strategies.vllm.shared import HOST, SharedWeights

logger = logging.getLogger(__name__)
STATES = {"model", "optimizer", "gradients"}
"""What can be named; this strategy has a model alone."""
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Of the engine, unless they are set: its threads go where the system puts them, as engines that
bind their own all take the first cores; it tells nobody of itself."""


class VllmInfer(HoldsWeights, InferenceStrategy):
    """An engine on each worker, in processes of its own. The weights lie beside it, where
    weights_on says: new ones come in there, and checkpoints are made of it. With lora=adapters
    these are the adapters' weights alone."""

    model: SharedWeights

    def __init__(self, context: StrategyContext) -> None:
        """ValueError on a CPU for weights_on=device, and for pipeline stages."""
        super().__init__(context)
        self._config: VllmConfig = self.settings or VllmConfig()
        self._weights_on = HOST if self._config.weights_on == "host" else context.device
        if self._config.weights_on == "device" and context.device == HOST:
            raise ValueError(
                f"role {context.role}: strategy_config.weights_on=device, and its worker "
                f"{context.rank_info.rank} has no GPU; set weights_on: host"
            )
        if context.device == HOST and (stages := self._stages) > 1:
            raise ValueError(
                f"role {context.role}: strategy_config.pipeline_parallel_size={stages}: vLLM 0.32 "
                "fails with stages on CPUs; leave it out"
            )
        self._is_empty = False
        """Whether the engine has dropped its weights."""
        self._is_asleep = False
        self.engine: VllmEngine | None = None
        self._loads: list[Future[Any]] = []

    def initialize(self, model_provider: ModelProvider) -> None:
        """Start the engine, and give it the weights of the model, without LoRA: they come merged,
        or the adapters alone.

        ConfigError for settings of the engine that vLLM doesn't know, or that don't go with devices
        or model; ValueError for what it refuses itself; RuntimeError for what else it can't start
        with.
        """
        context, config = self.context, self.context.model
        problems = list(engine_problems(context.config, config))
        if (args := context.config.strategy_args) is not None:
            further = args.further_problems() or []
            problems += [problem.under("strategy_args.strategy_config") for problem in further]
        if problems:
            raise ConfigError([problem.under(context.role) for problem in problems])
        self._owner = f"role {context.role}, worker {context.rank_info.rank}"
        # it imports vLLM while the model is loaded here
        self._engine = EngineProcess(self._owner, self._environment())
        if not self._adds_adapters:
            config = replace(config, lora=None)
        model: Any = model_provider(config, context.seed)
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError("the model provider left weights on the meta device; load them")
        kind = models.adapter_weights if self._adds_adapters else models.full_weights
        self.model = SharedWeights.holding(dict(kind(model)), self._weights_on)
        self._ends = _end_tokens(model)
        if config.tokenizer:
            self._ends |= {models.load_tokenizer(config).eos_token_id} - {None}
        self._model_config, self._architecture = model.config, type(model).__name__
        del model
        self._start()

    def generate(self, batch: DataProto, generation: GenerationConfig, seed: int) -> DataProto:
        """Responses to prompts, rows and columns as HfInfer.generate has them, the random numbers
        those of the engine: response j of a row has a seed of its own, made of `seed` and, with a
        column sample_id, sample_id · n + j, else row · n + j. What ends a response is the same.

        An engine that was lost while it took requests is started anew. ValueError for a prompt that
        is empty or leaves no room for a token, or while the engine is offloaded; TimeoutError if it
        hangs, see VllmConfig.request_timeout_s.
        """
        self._ready()
        lengths, n = batch["lengths"].tolist(), generation.num_return_sequences
        rows = batch["input_ids"].tolist()
        ids = batch["sample_id"].tolist() if "sample_id" in batch else range(len(rows))
        for sample_id, length in zip(ids, lengths, strict=True):
            require_room(f"prompt {sample_id}", length, self._most_tokens)
        shared = self._sampling(generation)
        responses = [Response(finish_reason="length") for _ in range(len(rows) * n)]
        calls, places = [], []
        for row, (length, sample_id) in enumerate(zip(lengths, ids, strict=True)):
            most = min(generation.max_new_tokens, self._most_tokens - length)
            for j in range(n):
                number = sampling.generator(seed, sample_id * n + j).integers(2**63)
                own = {"seed": int(number), "max_tokens": most}
                calls.append((rows[row][:length], shared | own))
                places.append(row * n + j)
        futures = self._engine.submit("generate", calls)
        for place, future in zip(places, futures, strict=True):
            answered = self._engine.wait(future, self._config.request_timeout_s)
            responses[place] = Response(*answered)
        return with_responses(batch, responses, self.weight_version)

    def open_engine(self, generation: GenerationConfig, seed: int) -> VllmEngine:
        """An engine that takes requests; its answers are those that `generate` gives to the same
        sample_id, unless they are begun again with tokens. ValueError as `generate`."""
        self._ready()
        self.engine = VllmEngine(
            self._engine,
            generation,
            self._sampling(generation),
            self._stop(generation),
            self._most_tokens,
            seed,
            version=lambda: self.weight_version,
            timeout_s=self.context.config.timeout_s,
        )
        return self.engine

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight once, with the name that Hugging Face has for it, in one order: as the engine
        was given it. With lora=adapters these alone."""
        return iter(self.model.state_dict().items())

    def update_parameter_in_bucket(self, parts: Iterable[Part]) -> None:
        """As HoldsWeights has it; the engine takes each weight as it has come whole, while the next
        ones come."""
        if self.engine is not None:
            self.engine.require_rest("new weights come")
        parts, begins = list(parts), self._incoming is None
        super().update_parameter_in_bucket(parts)
        if self._is_lost:
            return
        if self._adds_adapters:
            return
        ended = [
            part.name
            for part in parts
            if part.start + part.values.numel() == self.model[part.name].numel()
        ]
        with self._losing_it():
            if begins:
                self._call("begin_loading")
            self._begin_loads(ended)

    def process_weights_after_loading(self, version: int) -> None:
        """As HoldsWeights has it; what the engine's caches have of the old weights is gone."""
        if self.engine is not None:
            self.engine.forget()
        super().process_weights_after_loading(version)
        if self._is_lost:
            return
        with self._losing_it():
            if self._adds_adapters:
                self._load_all()
            else:
                self._finish_loading()

    def save_checkpoint(self, folder: Path) -> None:
        """Write the weights and their version into a folder, as HfInfer does."""
        states.save(folder, self._checkpoint(), self.context.groups["world"])

    def load_checkpoint(self, folder: Path) -> None:
        """Read what save_checkpoint wrote, HfInfer's too. Raises ValueError if it is of another
        model."""
        tensors = self._checkpoint()
        states.load(folder, tensors, self.context.groups["world"])
        self.weight_version = int(tensors[VERSION])
        self._load_all()

    def offload_states(self, include: Iterable[str] = ("model",)) -> None:
        """Give the engine's memory back until load_states, as far as sleep_level says and the
        platform can: on CPUs that of keys and values. ValueError for an unknown state."""
        if _has_model(include) and not self._is_asleep:
            self._call("sleep", self._config.sleep_level)
            self._is_asleep = True
            self._is_empty = self._config.sleep_level == 2

    def load_states(self, include: Iterable[str] = ("model",)) -> None:
        """Take the memory again. ValueError for an unknown state."""
        if _has_model(include) and self._is_asleep:
            self._call("wake_up")
            self._is_asleep = False

    def close(self) -> None:
        """End the engine; without it, it ends with this process."""
        self._engine.close()

    @property
    def _adds_adapters(self) -> bool:
        return self._config.lora == "adapters"

    @property
    def _is_lost(self) -> bool:
        """Whether others have taken over what the engine had: it is asked for nothing more."""
        return self.engine is not None and self.engine.is_lost

    @contextmanager
    def _losing_it(self) -> Iterator[None]:
        """For what an engine that takes requests is asked while it rests: if it dies or hangs then,
        the driver is told, as if it had been at work, and says what becomes of the job."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            if self.engine is None:
                raise
            self.engine.lose(error)

    def _require_model(self) -> None:
        if self._is_asleep:
            role = self.context.role
            raise ValueError(f"role {role}: the engine is offloaded; call load_states() first")

    def _ready(self) -> None:
        """For `generate` and the engine that takes requests."""
        self._require_model()
        if self._is_lost:
            logger.warning("%s: the engine that was lost is started anew", self._owner)
            self._engine.close()
            self._engine, self.engine = EngineProcess(self._owner, self._environment()), None
            self._start()
        elif self._is_empty:  # and no new ones have come
            self._load_all()

    def _start(self) -> None:
        """Have the engine's process make it, with the weights that lie here."""
        try:
            self._most_tokens = self._call("start", self._arguments())
        except ValueError as error:
            given = self._config.engine_args
            raise ValueError(
                f"{error}\nvLLM doesn't start with strategy_config={given} for this model; change "
                "the setting that it names, or leave it out"
            ) from None
        if not self._adds_adapters:
            self._call("share_weights", self.model.handle, self.model.weights)
        self._load_all()

    def _checkpoint(self) -> dict[str, Tensor]:
        tensors = {f"model.{name}": tensor for name, tensor in self.full_parameters()}
        return tensors | {VERSION: torch.tensor(self.weight_version)}

    def _load_all(self) -> None:
        if self._adds_adapters:
            assert self.context.model.lora is not None, "it has adapters"
            folder = self._engine.folder / "adapters"
            adapters.write(folder, self.model.state_dict(), self.context.model.lora)
            self._call("load_adapters", str(folder))
            return
        self._call("begin_loading")
        self._loads = []
        self._begin_loads(list(self.model.weights))
        self._finish_loading()

    def _begin_loads(self, names: list[str]) -> None:
        self.model.settle()
        self._loads += self._engine.submit("load_weights", [(names,)])

    def _finish_loading(self) -> None:
        for load in self._loads:
            self._engine.done("load_weights", load, self.context.config.timeout_s)
        self._call("finish_loading")
        self._loads, self._is_empty = [], False

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._engine.call(method, *arguments, timeout_s=self.context.config.timeout_s)

    def _sampling(self, generation: GenerationConfig) -> dict[str, Any]:
        if generation.stop and not self._has_tokenizer:
            raise ValueError(
                f"generation.stop={generation.stop} needs a tokenizer; set model.tokenizer"
            )
        wrong = temperature_problems(self.context.config.strategy_args, generation)
        if problems := [problem.under("generation") for problem in wrong]:
            raise ConfigError(problems)
        return {
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "stop": generation.stop,
            "stop_token_ids": sorted({*self._ends, *generation.stop_token_ids}),
        }

    def _stop(self, generation: GenerationConfig) -> Stop:
        """The strings alone: tokens end an answer wherever it is gone on with."""
        if not generation.stop:
            return Stop(())
        tokenizer: Any = models.load_tokenizer(self.context.model)
        return Stop((), generation.stop, as_sampled(tokenizer))

    @property
    def _has_tokenizer(self) -> bool:
        return bool(self.context.model.tokenizer or self.context.model.path)

    @property
    def _stages(self) -> int:
        return int(self._config.engine_args.get("pipeline_parallel_size", 1))

    def _arguments(self) -> dict[str, Any]:
        """Engine arguments that the role's config says."""
        context, config = self.context, self.context.model
        folder = str(self._engine.folder)
        arguments = {
            "model": config.path,
            "tokenizer": folder,
            "skip_tokenizer_init": not self._has_tokenizer,
            "dtype": config.dtype,
            "trust_remote_code": config.trust_remote_code,
            "seed": context.seed % 2**32,
            "tensor_parallel_size": context.config.num_gpus_per_worker // self._stages,
        }
        if self._adds_adapters:
            assert config.lora is not None, "it has adapters"
            rank = adapters.most_rank(config.lora)
            arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        self._model_config.save_pretrained(folder)
        if self._has_tokenizer:
            models.load_tokenizer(config).save_pretrained(folder)
        if config.path is None or config.path.endswith(".gguf"):
            overrides = self._config.engine_args.get("hf_overrides", {})
            own = {"architectures": [self._architecture]}
            arguments |= {"model": folder, "hf_overrides": overrides | own}
        return self._config.engine_args | arguments

    def _environment(self) -> dict[str, str]:
        """What the engine's environment has besides that of this process."""
        device, count = self.context.device, self.context.config.num_gpus_per_worker
        env = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # our process is the engine's own already
        if device.type == "cpu" and self._config.engine_args.get("enforce_eager", True):
            # else the first token waits for a compiler: 19 s, measured
            env["TORCHDYNAMO_DISABLE"] = "1"
        if device.type == "cuda":
            local = range(device.index, device.index + count)
            visible = [physical_device(number) or str(number) for number in local]
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        return env


def _end_tokens(model: Any) -> set[int]:
    """What ends a response, as the model's configs say."""
    ends = [
        source.eos_token_id for source in (model.generation_config, model.config.get_text_config())
    ]
    return {token for end in ends for token in (end if isinstance(end, list) else [end])} - {None}


def _has_model(include: Iterable[str]) -> bool:
    names = {include} if isinstance(include, str) else set(include)
    if unknown := sorted(names - STATES):
        raise ValueError(f"no state {', '.join(unknown)}; there are {', '.join(sorted(STATES))}")
    return "model" in names
