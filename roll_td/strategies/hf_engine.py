"""What the engine of an `hf_infer` does: continuous batching by one Sampler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from roll_td.config.model import GenerationConfig
from roll_td.strategies import sampling
from roll_td.strategies.engine import Answer
from roll_td.strategies.generation import Sample, Sampler, Stop


class HfCore:
    """A Core: answers enter a batch between two tokens, and leave it as they end. What an answer's
    tokens are does not depend on what is beside it, to float rounding."""

    def __init__(
        self,
        model: Any,
        generation: GenerationConfig,
        stop: Stop,
        batch_size: int,
        seed: int,
        version: Callable[[], int],
        begin: Callable[[], None],
    ) -> None:
        """`version` tells that of the weights; `begin` readies the model after others have used
        it."""
        self._seed, self._version, self.begin = seed, version, begin
        self._generation = generation
        self._last = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._contexts: dict[int, Tensor] = {}
        """What there is before the next token of an answer that waits, by number."""
        self._sampler = Sampler(model, generation, stop, batch_size, self._contexts, [])
        self._uses: Counter[int] = Counter()
        """How many answers there are of each."""
        self._flying: dict[int, tuple[Answer, Sample]] = {}
        """By sample_id."""
        self._count = 0

    def rest(self) -> None:
        """Nothing is under way between two steps."""

    def add(self, answers: Sequence[Answer]) -> None:
        """Take further answers, those to one prompt together."""
        numbers: dict[tuple[int, ...], int] = {}
        samples = []
        for answer in answers:
            context = (*answer.prompt, *answer.tokens)
            if context not in numbers:
                numbers[context] = self._count
                self._contexts[self._count] = torch.tensor(context)
                self._count += 1
            sample = self._sample(answer, numbers[context])
            self._flying[answer.sample_id] = answer, sample
            self._uses[sample.prompt] += 1
            samples.append(sample)
        self._sampler.add(samples)

    def wait_s(self) -> float | None:
        """None while there is nothing to do."""
        return 0 if self._flying else None

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """A token for each in the batch, or the first of some that enter it."""
        self._sampler.step()
        ended = [n for n, (_, sample) in self._flying.items() if sample.finish_reason]
        return [self._landed(n) for n in ended]

    @torch.inference_mode()
    def abort(self, sample_ids: Collection[int] | None) -> list[Answer]:
        """Give these up, or all, as they are."""
        wanted = [n for n in self._flying if sample_ids is None or n in sample_ids]
        self._sampler.remove([self._flying[n][1] for n in wanted])
        return [self._landed(n) for n in wanted]

    def forget(self) -> None:
        """Keys and values are computed anew, of the tokens that there are."""
        answers = self.abort(None)
        self._sampler.forget()
        for answer in answers:
            answer.finish_reason = ""
        self.add(answers)

    def _sample(self, answer: Answer, context: int) -> Sample:
        length, most = len(answer.prompt), self._generation.max_new_tokens
        random = sampling.generator(self._seed, answer.sample_id)
        random.random(len(answer.tokens))  # those that its tokens were drawn with
        return Sample(
            list(answer.tokens),
            list(answer.log_probs),
            prompt=context,
            prompt_tokens=length,
            most_tokens=min(most, self._last - length) if self._last else most,
            random=random,
        )

    def _landed(self, sample_id: int) -> Answer:
        answer, sample = self._flying.pop(sample_id)
        self._uses[sample.prompt] -= 1
        if not self._uses[sample.prompt]:
            del self._uses[sample.prompt], self._contexts[sample.prompt]
        new = len(sample.tokens) - len(answer.tokens)
        answer.versions += [self._version()] * new
        answer.tokens, answer.log_probs = sample.tokens, sample.log_probs
        answer.finish_reason = sample.finish_reason
        return answer
