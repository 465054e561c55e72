"""Sampling of responses in a batch that samples leave as they end and others enter.

The keys and values of the samples in the batch lie right-aligned in common columns, so that each
step appends one column for all of them; a sample that is shorter than the longest has a mask. A
prompt is computed once, with others of its kind, however many responses it gets; and so is each
token of them as long as they are alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll_td import models
from roll_td.algorithms import functional
from roll_td.config.model import GenerationConfig
from roll_td.strategies import sampling
from roll_td.strategies.batches import Response

PREFILL_TOKENS = 8192
"""Of prompts in one forward pass, padding included."""
REFILL_SHARE = 8
"""One in so many places must be free before samples enter: each entry is a forward pass."""
CUT_CHARACTERS = 8
"""Of decoded text that may be wrong where it was cut out of a longer one."""
SPARE_COLUMNS, SPARE_SHARE = 8, 8
"""Columns for keys and values to come: so many, or one in so many. They are copied when these are
used up; more lie too far apart in memory (28 columns of 1,024 heads of 32 numbers: attention takes
0.56 ms with 1 spare column, 1.1 ms with 8, 1.4 ms with 64)."""


@dataclass
class Sample(Response):
    """A response on its way."""

    prompt: int = 0
    """Number of its prompt."""
    prompt_tokens: int = 0
    """Length of its prompt."""
    most_tokens: int = 1
    """Tokens it may have."""
    random: np.random.Generator = field(default_factory=np.random.default_rng)
    """Its own random numbers."""
    read_from: int = 0
    """First token that a stop string looked for may still begin in."""

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt_tokens + len(self.tokens)


class KeyValues:
    """Keys and values of right-padded prompts, as a forward pass gives them."""

    seen = 0
    """Columns that the next forward pass finds."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take those of new tokens (b, heads, t, head size); return those of all tokens."""
        self.layers[layer] = keys, values
        return keys, values


Twins = list[Sample]
"""Samples that have had the same tokens so far, prompts too: one row is computed for them."""


class Slots:
    """Keys and values of the rows in the batch: row i from column `start` at the earliest to `end`,
    where all of them end."""

    def __init__(self) -> None:
        self.used = self.rows = self.start = self.end = self.columns = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def seen(self) -> int:
        """Columns that the next forward pass finds."""
        return self.end - self.start

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take those of one new token (used, heads, 1, head size); return those of all tokens."""
        rows, (key_buffer, value_buffer) = self.used, self.layers[layer]
        key_buffer[:rows, :, self.end : self.end + 1] = keys
        value_buffer[:rows, :, self.end : self.end + 1] = values
        seen = slice(self.start, self.end + 1)
        return key_buffer[:rows, :, seen], value_buffer[:rows, :, seen]

    def place(
        self, prompts: KeyValues, numbers: Sequence[int], lengths: Sequence[int], most: int
    ) -> None:
        """Add a row for each of `numbers`, a row of `prompts` with this length; copies may make
        `most` of all of them."""
        width, used = max(lengths), self.used + len(numbers)
        if most > self.rows or width > self.end:
            self._move(most, max(width, self.seen), prompts.layers)
        old, new = slice(self.used), slice(self.used, used)
        own, first = slice(self.end - width, self.end), min(self.start, self.end - width)
        device = next(iter(prompts.layers.values()))[0].device
        rows = torch.tensor(numbers, device=device)[:, None]
        shift = width - torch.tensor(lengths, device=device)[:, None]
        columns = (torch.arange(width, device=device) - shift).clamp(min=0)
        for layer, states in prompts.layers.items():
            for buffer, state in zip(self.layers[layer], states, strict=True):
                # what a mask hides is multiplied by 0, and 0 · NaN is NaN
                buffer[old, :, first : self.start] = 0
                buffer[new, :, first : own.start] = 0
                buffer[new, :, own] = state.transpose(1, 2)[rows, columns].transpose(1, 2)
        self.used, self.start = used, first

    def reserve(self, most: int) -> None:
        """See to it that there is a column for the next token; copies may make `most` rows."""
        if self.end == self.columns:
            self._move(most, self.seen, self.layers)

    def copy(self, rows: Sequence[int]) -> None:
        """Add a copy of each of these rows."""
        new, seen = slice(self.used, self.used + len(rows)), slice(self.start, self.end)
        assert new.stop <= self.rows, "more than place was told of"
        for states in self.layers.values() if rows else ():
            for buffer in states:
                buffer[new, :, seen] = buffer[rows, :, seen]
        self.used = new.stop

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.used -= 1
        seen = slice(self.start, self.end)
        for states in self.layers.values() if row < self.used else ():
            for buffer in states:
                buffer[row, :, seen] = buffer[self.used, :, seen]

    def narrow(self, width: int) -> None:
        """Forget all but the last `width` columns."""
        self.start = self.end - width

    def _move(self, rows: int, end: int, like: dict[int, tuple[Tensor, Tensor]]) -> None:
        """To new buffers of `rows` rows, where all end in column `end` and more columns follow."""
        self.rows, self.columns = rows, end + max(SPARE_COLUMNS, end // SPARE_SHARE)
        old, new = slice(self.start, self.end), slice(end - self.seen, end)
        for layer, states in like.items():
            keys, values = (s.new_empty(rows, s.shape[1], self.columns, s.shape[3]) for s in states)
            if self.used:
                for to, of in zip((keys, values), self.layers[layer], strict=True):
                    to[: self.used, :, new] = of[: self.used, :, old]
            self.layers[layer] = keys, values
        self.start, self.end = new.start, new.stop


class Stop:
    """What ends a response, its most tokens aside."""

    def __init__(
        self,
        token_ids: Iterable[int],
        strings: Sequence[str] = (),
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        """`decode` gives the text of tokens, special ones included; strings need it."""
        self.token_ids, self.strings, self.decode = frozenset(token_ids), strings, decode
        self.longest = max(map(len, strings), default=0)

    def reason(self, sample: Sample) -> str:
        """The finish_reason after the last token of `sample`; empty: it goes on."""
        if sample.tokens[-1] in self.token_ids or (self.strings and self._ends_text(sample)):
            return "stop"
        return "length" if len(sample.tokens) >= sample.most_tokens else ""

    def _ends_text(self, sample: Sample) -> bool:
        assert self.decode is not None
        text = self.decode(sample.tokens[sample.read_from :])
        if any(string in text for string in self.strings):
            return True
        # decode less next time: the later half, if it holds what a string may begin in. Text that
        # is cut off may begin with a few wrong characters
        half = (sample.read_from + len(sample.tokens)) // 2
        if len(text) > 2 * (self.longest + CUT_CHARACTERS) and (
            len(self.decode(sample.tokens[half:])) >= self.longest + CUT_CHARACTERS
        ):
            sample.read_from = half
        return False


def as_sampled(tokenizer: Any) -> Callable[[list[int]], str]:
    """What decodes for a Stop: clean-up would take spaces out of what was sampled."""
    return lambda ids: tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


@dataclass(frozen=True)
class _Prefilled:
    """Prompts whose keys and values are known, one a row."""

    row: dict[int, int]
    """Number of a prompt → its row."""
    states: KeyValues
    """Of the rows."""
    logits: Tensor
    """float32 (rows, V): of each one's next token."""


NOTHING = _Prefilled({}, KeyValues(), torch.empty(0))


class Sampler:
    """Fills in samples, `batch_size` of them at once."""

    def __init__(
        self,
        model: Any,
        config: GenerationConfig,
        stop: Stop,
        batch_size: int,
        prompts: Sequence[Tensor] | Mapping[int, Tensor],
        samples: Sequence[Sample],
    ) -> None:
        """model: of roll_td.models. prompts: int64 (length,) each, on the CPU, of a sample that has
        tokens with these. A sample with most_tokens 0 stays empty."""
        self.model, self.config, self.stop = model, config, stop
        self.batch_size, self.prompts = batch_size, prompts
        self.body, head = models.body_and_head(model)
        self.head, self.device = head(), head().weight.device
        self.waiting: deque[Sample] = deque()
        self.active: list[Twins] = []
        """Of each row."""
        self.slots = Slots()
        self.cache = models.cache_in(model, self.slots)
        self.prefilled = NOTHING
        self.add(samples)

    def run(self) -> None:
        """Sample until all have ended."""
        while self.waiting or self.active:
            self.step()

    def add(self, samples: Sequence[Sample]) -> None:
        """Have these wait, behind those that do."""
        for sample in samples:
            sample.finish_reason = "" if sample.most_tokens > len(sample.tokens) else "length"
        # prompts of like length meet in a prefill, which pads them; those of one prompt too
        self.waiting.extend(
            sorted(
                (sample for sample in samples if not sample.finish_reason),
                key=lambda sample: (-sample.length, sample.prompt),
            )
        )

    def step(self) -> None:
        """Let samples enter, or give each in the batch a token."""
        room = self.batch_size - self._count()
        if self.waiting and room >= max(1, self.batch_size // REFILL_SHARE):
            self._admit([self.waiting.popleft() for _ in range(min(room, len(self.waiting)))])
        elif self.active:
            self._step()

    def remove(self, samples: Sequence[Sample]) -> None:
        """Give these up, those that have not ended."""
        for sample in samples:
            sample.finish_reason = sample.finish_reason or "abort"
        self.waiting = deque(sample for sample in self.waiting if not sample.finish_reason)
        self._leave()

    def forget(self) -> None:
        """The weights have changed, and no sample is in the batch."""
        assert not self.active, "its keys and values are of the old weights"
        self.prefilled = NOTHING

    def _admit(self, newcomers: list[Sample]) -> None:
        """Give each its first token, and a place if it goes on."""
        while newcomers:
            if newcomers[0].prompt not in self.prefilled.row:
                self._prefill(list(dict.fromkeys(sample.prompt for sample in newcomers)))
            row = self.prefilled.row
            groups: dict[int, Twins] = {}
            for sample in newcomers:
                if sample.prompt in row:
                    groups.setdefault(sample.prompt, []).append(sample)
            newcomers = [sample for sample in newcomers if sample.prompt not in row]
            self._extend(list(groups.values()), self.prefilled.logits[[row[p] for p in groups]])
            entering = [twins for group in groups.values() for twins in _parted(group)]
            if entering:
                self.active += entering
                numbers = [row[twins[0].prompt] for twins in entering]
                lengths = [twins[0].length - 1 for twins in entering]
                self.slots.place(self.prefilled.states, numbers, lengths, self._count())
        if not self.waiting or self.waiting[0].prompt not in self.prefilled.row:
            self.prefilled = NOTHING

    def _prefill(self, numbers: list[int]) -> None:
        """Compute the first of these prompts, as many as PREFILL_TOKENS hold."""
        width = len(self.prompts[numbers[0]])
        numbers = numbers[: max(1, PREFILL_TOKENS // width)]
        prompts = [self.prompts[number] for number in numbers]
        # padding on the right: what follows a token does not reach it, so no mask is needed
        ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(self.device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        states = KeyValues()
        hidden = self._hidden(input_ids=ids, cache=models.cache_in(self.model, states))
        hidden = hidden[torch.arange(len(ids), device=self.device), last]
        row = {number: place for place, number in enumerate(numbers)}
        self.prefilled = _Prefilled(row, states, functional.logits(hidden, self.head))

    def _step(self) -> None:
        """One more token for each sample in the batch."""
        lengths = [twins[0].length for twins in self.active]
        longest, places = max(lengths), torch.tensor(lengths, device=self.device)[:, None]
        columns = torch.arange(longest, device=self.device)
        ids = torch.tensor([[twins[0].tokens[-1]] for twins in self.active], device=self.device)
        self.slots.reserve(self._count())
        hidden = self._hidden(
            input_ids=ids,
            position_ids=places - 1,
            attention_mask=columns >= longest - places if min(lengths) < longest else None,
            cache=self.cache,
        )
        self.slots.end += 1
        self._extend(self.active, functional.logits(hidden[:, -1], self.head))
        self._leave()

    def _leave(self) -> None:
        """Part those that go on differently, and take those that have ended out of the batch."""
        copied = []
        for place, twins in enumerate(self.active[:]):
            self.active[place], *others = _parted(twins) or [[]]
            self.active += others
            copied += [place] * len(others)
        self.slots.copy(copied)
        for place in reversed(range(len(self.active))):
            if not self.active[place]:
                self.slots.drop(place)
                self.active[place] = self.active[-1]
                self.active.pop()
        self.slots.narrow(max((twins[0].length - 1 for twins in self.active), default=0))

    def _count(self) -> int:
        """Samples in the batch."""
        return sum(map(len, self.active))

    def _hidden(self, **inputs: Any) -> Tensor:
        hidden: Tensor = self.body(**inputs, use_cache=True).last_hidden_state
        return hidden

    def _extend(self, groups: Sequence[Twins], logits: Tensor) -> None:
        """Draw a token for each sample of each of `groups` from the group's row of logits."""
        config, samples = self.config, [sample for twins in groups for sample in twins]
        if len(samples) > len(groups):
            logits = logits[[row for row, twins in enumerate(groups) for _ in twins]]
        if config.temperature == 0:
            drawn = sampling.greedy(logits)
        else:
            numbers = [sample.random.random() for sample in samples]
            uniforms = torch.tensor(numbers, dtype=torch.float64).to(logits.device)
            drawn = sampling.sample(
                logits, uniforms, config.temperature, config.top_k, config.top_p
            )
        results = zip(samples, drawn.tokens.tolist(), drawn.log_probs.tolist(), strict=True)
        for sample, token, log_prob in results:
            sample.tokens.append(token)
            sample.log_probs.append(log_prob)
            sample.finish_reason = self.stop.reason(sample)


def _parted(twins: Twins) -> list[Twins]:
    """Those of them that go on, by their last token."""
    by_token: dict[int, Twins] = {}
    for sample in twins:
        if not sample.finish_reason:
            by_token.setdefault(sample.tokens[-1], []).append(sample)
    return list(by_token.values())
