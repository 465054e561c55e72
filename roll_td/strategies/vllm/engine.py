"""The engine itself, in a process of its own (`__main__`): the only importer of vLLM.

One loop takes requests from the socket and steps the engine, so that further requests reach it
while it generates. TP: the engine's workers are processes of vLLM, children of this one.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from roll_td.strategies.parts import Weight
from roll_td.strategies.vllm.process import shared_memory
from roll_td.strategies.vllm.shared import Handle, SharedWeights

ON_CPU = {
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_chunked_prefill": False,
}
"""Engine arguments unless others are given. vLLM's own block of 128 tokens is longer than many
prompts, and only whole blocks are found in the prefix cache; its own cache is all memory. Where it
cuts a prompt it winds the random numbers of the sample back, which no CPU generator can."""

FINAL = RequestOutputKind.FINAL_ONLY


class WeightsExtension:
    """What the engine's workers do beside vLLM's own methods, called by collective_rpc."""

    vllm_config: Any
    model_runner: Any
    shared_weights: SharedWeights
    emptied: list[tuple[torch.UntypedStorage, int]]

    def share_weights(self, handle: Handle, weights: dict[str, Weight]) -> None:
        """See the weights that a SharedWeights with this handle holds."""
        self.shared_weights = SharedWeights.at(handle, weights)

    def begin_loading(self) -> None:
        """What load_weights gives from now on is the model's."""
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.model)

    def load_weights(self, names: Sequence[str]) -> None:
        """Take these weights; they must stay as they are until finish_loading: a layer is made when
        it has all of its own."""
        with set_current_vllm_config(self.vllm_config):
            weights = ((name, self.shared_weights[name]) for name in names)
            self.model_runner.model.load_weights(weights)

    def finish_loading(self) -> None:
        """All weights have come; they may be overwritten when this returns."""
        with set_current_vllm_config(self.vllm_config):
            model = self.model_runner.model
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            # a head that is tied gets no weights of its own, and on CPUs keeps a packed copy
            seen = set()
            for layer in model.modules():
                weight = getattr(layer, "weight", None)
                if weight is not None and id(weight) in seen:
                    layer.quant_method.process_weights_after_loading(layer)
                seen.add(id(weight))
        self.shared_weights.settle()

    def empty_cache(self) -> None:
        """Give the memory of keys and values back. On CPUs, where vLLM has no sleep mode."""
        storages = (tensor.untyped_storage() for tensor in self.model_runner.kv_caches)
        by_place = {storage.data_ptr(): storage for storage in storages}
        self.emptied = [(storage, storage.nbytes()) for storage in by_place.values()]
        for storage, _ in self.emptied:
            storage.resize_(0)

    def refill_cache(self) -> None:
        """Take memory for them again."""
        for storage, nbytes in self.emptied:
            storage.resize_(nbytes)
        for tensor in self.model_runner.kv_caches:
            tensor.zero_()  # a mask hides by a product with 0, and what is NaN it doesn't hide
        self.emptied = []


class Engine:
    """An engine of vLLM. The methods without underscore are what its worker asks for."""

    def __init__(self, pipe: Connection) -> None:
        # it warns of layers without weights of their own at each update
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
        self.memory: set[Path] = set()
        """Shared memory that it began with: if one of its workers dies, vLLM lets go of it, and it
        would be left over."""
        self._pipe = pipe
        self._llm: Any = None
        self._in_flight: set[int] = set()
        self._served: dict[int, int] = {}
        """Requests that tell how far they are: by the name that they were given."""
        self._so_far: dict[int, Any] = {}
        """What these have, by number."""
        self._holds = False
        self._lora: LoRARequest | None = None
        """Adapters that requests are answered with."""
        self._sleeps = current_platform.is_sleep_mode_available()

    def start(self, arguments: dict[str, Any]) -> int:
        """Make it of these engine arguments; gives the most tokens of prompt and response. Its
        weights come later, or with enable_lora from the model's files."""
        defaults = ON_CPU if current_platform.is_cpu() else {}
        fixed = {
            "load_format": "auto" if arguments.get("enable_lora") else "dummy",
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": self._sleeps,
            "worker_extension_cls": f"{__name__}.{WeightsExtension.__name__}",
        }
        engine_args = vllm.EngineArgs(**(defaults | arguments | fixed))
        self._llm = vllm.LLMEngine.from_engine_args(engine_args)
        self.memory = shared_memory(os.getpgid(0))
        return int(self._llm.model_config.max_model_len)

    def share_weights(self, handle: Handle, weights: dict[str, Weight]) -> None:
        """Where weights will come from."""
        self._llm.collective_rpc("share_weights", args=(handle, weights))

    def begin_loading(self) -> None:
        """New weights will come. ValueError while requests are in flight and not held."""
        self._require_rest()
        self._llm.collective_rpc("begin_loading")

    def load_weights(self, names: list[str]) -> None:
        """Take weights by name."""
        self._llm.collective_rpc("load_weights", args=(names,))

    def finish_loading(self) -> None:
        """All weights have come; forget what was made by the old ones."""
        self._llm.collective_rpc("finish_loading")
        self._forget()

    def load_adapters(self, folder: str) -> None:
        """Answer with the adapters that this folder has, in the place of others. ValueError as
        begin_loading."""
        self._require_rest()
        self._llm.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
        self._lora = LoRARequest("policy", 1, folder)
        self._forget()

    def sleep(self, level: int) -> None:
        """Give keys and values back; on a GPU the weights too, to host memory or (level 2) to
        nowhere."""
        if self._sleeps:
            self._llm.sleep(level)
        else:
            self._forget()
            self._llm.collective_rpc("empty_cache")

    def wake_up(self) -> None:
        """Take the memory again that `sleep` gave back."""
        if self._sleeps:
            self._llm.wake_up()
        else:
            self._llm.collective_rpc("refill_cache")

    def hold(self) -> None:
        """Give no tokens until go_on."""
        self._holds = True

    def go_on(self) -> None:
        """Give tokens again."""
        self._holds = False

    def progress(self) -> dict[int, int]:
        """Tokens that requests with a name have, by this name; none yet is left out."""
        return {
            name: len(self._so_far[number].token_ids)
            for name, number in self._served.items()
            if number in self._so_far
        }

    def abort(self, names: Collection[int] | None) -> None:
        """Give up the requests that have these names, or all that have one; each is answered with
        what it has."""
        for name in [n for n in self._served if names is None or n in names]:
            number = self._served[name]
            self._llm.abort_request([str(number)])
            answer = self._so_far.get(number)
            tokens = [] if answer is None else list(answer.token_ids)
            log_probs = [] if answer is None else list(answer.logprobs.logprobs)
            self._answer(number, (tokens, log_probs, "abort"))

    def _require_rest(self) -> None:
        if self._in_flight and not self._holds:
            raise ValueError("new weights came while requests are in flight; wait for their end")

    def _forget(self) -> None:
        """Empty the prefix cache; what is in flight begins anew with the tokens that it has."""
        self._llm.reset_mm_cache()
        if not self._llm.reset_prefix_cache(reset_running_requests=bool(self._in_flight)):
            raise RuntimeError("the prefix cache can't be emptied: requests still use it")

    def _add(
        self, number: int, prompt: list[int], sampling: dict[str, Any], name: int | None = None
    ) -> None:
        params = vllm.SamplingParams(
            **sampling,
            logprobs=0,
            flat_logprobs=True,
            ignore_eos=True,  # stop_token_ids has all that count
            detokenize=bool(sampling["stop"]),
            skip_special_tokens=False,
            output_kind=FINAL if name is None else RequestOutputKind.CUMULATIVE,
        )
        self._llm.add_request(str(number), tokens_input(prompt), params, lora_request=self._lora)
        self._in_flight.add(number)
        if name is not None:
            self._served[name] = number

    # --- the loop ---------------------------------------------------------------------------

    def serve(self) -> None:
        """Do what comes until told to end."""
        while True:
            if self._pipe.poll(0 if self._in_flight and not self._holds else None):
                message = self._pipe.recv()
                if message is None:
                    return
                self._take(*message)
            else:
                self._step()

    def _take(self, method: str, calls: list[tuple[int, tuple[Any, ...]]]) -> None:
        for number, arguments in calls:
            try:
                if method == "generate":
                    self._add(number, *arguments)
                else:
                    self._pipe.send((number, None, getattr(self, method)(*arguments)))
            except (ValueError, VLLMClientError) as error:  # a process's edge: who asked is told
                self._pipe.send((number, "ValueError", str(error)))
            except Exception:
                self._pipe.send((number, "RuntimeError", self._why()))
                if self._is_broken:
                    raise

    def _step(self) -> None:
        try:
            outputs = self._llm.step()
        except Exception:
            for number in self._in_flight:
                self._pipe.send((number, "RuntimeError", self._why()))
            raise
        for output in outputs:
            (answer,) = output.outputs
            if not output.finished:
                self._so_far[int(output.request_id)] = answer
                continue
            log_probs = answer.logprobs.logprobs
            assert len(log_probs) == len(answer.token_ids), "a log-prob for each token"
            answered = list(answer.token_ids), log_probs, answer.finish_reason
            self._answer(int(output.request_id), answered)

    @property
    def _is_broken(self) -> bool:
        """Whether it has lost a worker: nothing can be asked of it any more."""
        return self._llm is not None and getattr(self._llm.model_executor, "is_failed", False)

    def _why(self) -> str:
        """What to say of an exception that is none of the caller's."""
        if self._is_broken:
            return "one of the engine's workers has died; vLLM's line above says which, and how"
        return traceback.format_exc()

    def _answer(self, number: int, answered: tuple[list[int], list[float], str]) -> None:
        self._in_flight.remove(number)
        self._so_far.pop(number, None)
        self._served = {name: own for name, own in self._served.items() if own != number}
        self._pipe.send((number, None, answered))
