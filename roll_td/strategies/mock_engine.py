"""What the engine of a `mock_infer` does: known responses, at a known pace."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roll_td.config.model import GenerationConfig
from roll_td.config.strategies import MockConfig
from roll_td.strategies import sampling
from roll_td.strategies.batches import Response
from roll_td.strategies.engine import Answer


@dataclass(eq=False)
class _Sample:
    answer: Answer
    whole: Response

    @property
    def left(self) -> int:
        return len(self.whole.tokens) - len(self.answer.tokens)

    def grow(self, count: int, version: int) -> None:
        answer, had = self.answer, len(self.answer.tokens)
        answer.tokens += self.whole.tokens[had : had + count]
        answer.log_probs += self.whole.log_probs[had : had + count]
        answer.versions += [version] * count
        answer.finish_reason = "" if self.left else self.whole.finish_reason


class MockCore:
    """A Core: the first `slots` samples have a token each `token_s` seconds."""

    def __init__(
        self,
        config: MockConfig,
        generation: GenerationConfig,
        seed: int,
        version: Callable[[], int],
        fault: Literal["fail", "hang"] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`version` tells that of the weights, `clock` the time in seconds; `fault` is what happens
        after config.fault_after answers."""
        self._config, self._generation, self._seed = config, generation, seed
        self._version, self._fault, self._clock = version, fault, clock
        self._given = 0
        self._active: list[_Sample] = []
        self._waiting: deque[_Sample] = deque()
        self._ended: list[Answer] = []
        self._now_s = clock()
        """How far it has come."""

    def rest(self) -> None:
        """Come up to the present."""
        self._advance()

    def begin(self) -> None:
        """What time there was since did not count."""
        self._now_s = self._clock()

    def add(self, answers: Sequence[Answer]) -> None:
        """Take further answers."""
        self._advance()
        config, generation = self._config, self._generation
        for answer in answers:
            whole = respond(config, generation, self._seed, answer.sample_id, answer.prompt[-1])
            self._waiting.append(_Sample(answer, whole))
        self._fill()

    def wait_s(self) -> float | None:
        """Until the next one ends."""
        if self._ended:
            return 0
        if not self._active:
            return None
        ends_s = self._now_s + min(sample.left for sample in self._active) * self._config.token_s
        return max(0.0, ends_s - self._clock())

    def step(self) -> list[Answer]:
        """What has ended by now. RuntimeError if it is to fail."""
        if self._fault is not None and self._given >= self._config.fault_after:
            if self._fault == "hang":
                threading.Event().wait()
            raise RuntimeError(f"mock_infer: fails after {self._given} answers, as fault says")
        self._advance()
        self._given += len(self._ended)
        ended, self._ended = self._ended, []
        return ended

    def abort(self, sample_ids: Collection[int] | None) -> list[Answer]:
        """Give these up, or all, as they are."""
        self._advance()

        def goes(sample: _Sample) -> bool:
            return sample_ids is None or sample.answer.sample_id in sample_ids

        given_up = [s.answer for s in (*self._active, *self._waiting) if goes(s)]
        self._active = [sample for sample in self._active if not goes(sample)]
        self._waiting = deque(sample for sample in self._waiting if not goes(sample))
        self._fill()
        for answer in given_up:
            answer.finish_reason = "abort"
        return given_up

    def forget(self) -> None:
        """It knows nothing of weights."""

    def _advance(self) -> None:
        """Give each sample the tokens that it has by now."""
        now_s, token_s = self._clock(), self._config.token_s
        while self._active:
            least = min(sample.left for sample in self._active)
            steps = min(least, int((now_s - self._now_s) / token_s + 1e-6)) if token_s else least
            if steps <= 0 and least > 0:
                return
            self._now_s += steps * token_s
            for sample in self._active:
                sample.grow(steps, self._version())
            self._ended += [s.answer for s in self._active if not s.left]
            self._active = [sample for sample in self._active if sample.left]
            self._fill()
        self._now_s = now_s

    def _fill(self) -> None:
        while self._waiting and len(self._active) < self._config.slots:
            self._active.append(self._waiting.popleft())


def respond(
    config: MockConfig, generation: GenerationConfig, seed: int, sample_id: int, prompt_end: int
) -> Response:
    """The response of a sample to a prompt that ends with this token."""
    most = generation.max_new_tokens
    longest = min(most, most if config.max_tokens is None else config.max_tokens)
    shortest = min(config.min_tokens, longest)
    random = sampling.generator(seed, sample_id)
    lengths = random if config.lengths_of == "sample" else sampling.generator(seed, prompt_end)
    if config.tail is None:
        count = int(lengths.integers(shortest, longest + 1))
    else:
        count = min(longest, int(shortest * (1 - lengths.random()) ** (-1 / config.tail)))
    tokens = random.integers(config.vocab_size, size=count).tolist()
    values = log_probs(torch.tensor([[prompt_end, *tokens]]))[0, 1:].tolist()
    return Response(tokens, values, "length" if count == most else "stop")


def log_probs(ids: Tensor, targets: Tensor | None = None) -> Tensor:
    """Of targets, or ids themselves, int64 (b, T), each after the id before it; 0 at index 0."""
    targets = ids if targets is None else targets
    # primes, so that neighbours and swapped tokens differ
    mixed = (ids[:, :-1] * 7919 + targets[:, 1:] * 104_729 + 1) % 997
    return torch.nn.functional.pad(-4 * (mixed + 1) / 999, (1, 0))
