"""The engine of a `vllm` as requests know it: a strategies.engine.Engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from roll_td.config.model import GenerationConfig
from roll_td.strategies import sampling
from roll_td.strategies.engine import Answer, Ended, Failure, until_the_end
from roll_td.strategies.generation import Sample, Stop
from roll_td.strategies.vllm.process import END_S, EngineProcess


class VllmEngine:
    """Hands answers to the engine's process, and takes them back as they end."""

    def __init__(
        self,
        process: EngineProcess,
        generation: GenerationConfig,
        shared: dict[str, Any],
        stop: Stop,
        most_tokens: int,
        seed: int,
        version: Callable[[], int],
        timeout_s: float,
    ) -> None:
        """`shared`: sampling parameters of all. `stop`: strings that end an answer. `most_tokens`:
        of prompt and response. `version` tells that of the weights."""
        self._process, self._generation, self._shared = process, generation, shared
        self._stop = stop
        self._most_tokens, self._seed, self._version = most_tokens, seed, version
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._flying: dict[int, Answer] = {}
        """By sample_id; guarded by the lock."""
        self._is_held = self._is_lost = False
        self._ended: Ended = queue.SimpleQueue()

    @property
    def is_lost(self) -> bool:
        """Whether it has failed, and others have taken over what it had."""
        return self._is_lost

    def submit(self, answers: Sequence[Answer]) -> None:
        """Begin these, or go on with them. A prompt that it can't answer is the end, by `ended`."""
        calls, begun = [], []
        for answer in answers:
            try:
                require_room("its prompt", len(answer.prompt), self._most_tokens)
            except ValueError as error:
                return self._ended.put(Failure(str(error), answer.sample_id))
            whole = min(self._generation.max_new_tokens, self._most_tokens - len(answer.prompt))
            if whole <= len(answer.tokens):
                answer.finish_reason = "length"
                self._ended.put([answer])
                continue
            random = sampling.generator(self._seed, answer.sample_id)
            random.random(len(answer.tokens))  # other numbers than it began with
            own = {"seed": int(random.integers(2**63)), "max_tokens": whole - len(answer.tokens)}
            calls.append((answer.prompt + answer.tokens, self._shared | own, answer.sample_id))
            begun.append(answer)
        with self._lock:
            self._flying |= {answer.sample_id: answer for answer in begun}
        try:
            futures = self._process.submit("generate", calls)
        except RuntimeError as error:  # the process has ended
            return self._fail(error)
        for answer, future in zip(begun, futures, strict=True):
            future.add_done_callback(partial(self._landed, answer))

    def ended(self) -> Iterator[list[Answer] | Failure]:
        """What has ended or was given up, as it comes; a Failure is the last. One reader."""
        return until_the_end(self._ended)

    def abort(self, sample_ids: Collection[int]) -> None:
        """Give these up; those that have not ended come back as they are."""
        self._call("abort", list(sample_ids))

    def close(self) -> None:
        """No further answers; an engine that does not give up what is in flight within END_S is
        killed, and who waits for it waits no more."""
        self._ended.put(None)
        try:
            self._process.call("abort", None, timeout_s=END_S)
            self._process.call("go_on", timeout_s=END_S)
        except TimeoutError:
            self._process.kill()
            self._is_lost = True
        except RuntimeError:  # it has ended, which `ended` has told
            self._is_lost = True

    def pause(self, abort: bool, timeout_s: float) -> None:
        """Return when it rests, between two steps; `abort` gives up what is in flight. If the step
        has not ended after timeout_s, it is lost."""
        self._call("hold", timeout_s=timeout_s)
        self._is_held = True
        if abort:
            self._call("abort", None)

    def resume(self) -> None:
        """Go on."""
        self._call("go_on")
        self._is_held = False

    def forget(self) -> None:
        """The weights change: tokens that there are were made by the old ones."""
        for sample_id, count in (self._call("progress") or {}).items():
            with self._lock:
                answer = self._flying[sample_id]
                made = len(answer.tokens) + count - len(answer.versions)
                answer.versions += [self._version()] * made

    def require_rest(self, what: str) -> None:
        """RuntimeError that says `what`, if it is at work and has not been paused."""
        with self._lock:
            if self._flying and not (self._is_held or self._is_lost):
                owner = self._process.owner
                raise RuntimeError(f"{owner}: {what} while the engine is at work; pause it before")

    def lose(self, error: BaseException) -> None:
        """It is of no use any more, which `ended` tells; if it hangs, it is killed."""
        self._fail(error)
        self._process.kill()

    def _fail(self, error: BaseException) -> None:
        self._is_lost = True
        self._ended.put(Failure(str(error)))

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """None of an engine that is lost; that it is then, the driver is told by `ended`."""
        if self._is_lost:
            return None
        try:
            return self._process.call(method, *arguments, timeout_s=timeout_s or self._timeout_s)
        except (RuntimeError, TimeoutError) as error:
            return self.lose(error)

    def _landed(self, answer: Answer, future: Future[Any]) -> None:
        """By the thread that reads from the process."""
        with self._lock:
            self._flying.pop(answer.sample_id, None)
        if isinstance(error := future.exception(), ValueError):
            return self._ended.put(Failure(str(error), answer.sample_id))
        if error is not None:
            return self._fail(error)
        tokens, log_probs, answer.finish_reason = future.result()
        if (count := self._to_the_stop(answer.tokens, tokens)) is not None:
            tokens, log_probs, answer.finish_reason = tokens[:count], log_probs[:count], "stop"
        answer.tokens, answer.log_probs = answer.tokens + tokens, answer.log_probs + log_probs
        made = len(answer.tokens) - len(answer.versions)
        answer.versions += [self._version()] * made
        del answer.versions[len(answer.tokens) :]
        self._ended.put([answer])

    def _to_the_stop(self, had: list[int], made: list[int]) -> int | None:
        """How many of the tokens made complete a stop string with those that an answer had: these
        are a part of the prompt to vLLM, which looks at what it makes alone."""
        if had and self._stop.strings:
            sample = Sample(list(had), most_tokens=len(had) + len(made) + 1)
            for count, token in enumerate(made, 1):
                sample.tokens.append(token)
                if self._stop.reason(sample):
                    return count
        return None


def require_room(what: str, length: int, most_tokens: int) -> None:
    """ValueError unless `what`, a prompt of so many tokens, has some and leaves one of most_tokens
    for an answer."""
    if length == 0:
        raise ValueError(f"{what} is empty; give it a token to start from")
    if length >= most_tokens:
        raise ValueError(
            f"{what} has {length} tokens, and max_model_len={most_tokens} leaves none for an "
            "answer; lower data.max_length, or raise strategy_config.max_model_len"
        )
