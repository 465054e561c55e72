"""Which prompts of the stream are drawn, and when a batch of them is whole.

A batch is made of the next prompts of the stream, in whatever order they were answered, so that the
place in the stream is all that a run has to remember: none is lost, none comes again.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Taken:
    """A batch."""

    looked_at: list[int]
    """Its prompts, by place in the stream."""
    learnt_from: list[int]
    """Those of them that it is made of."""


class Window:
    """The part of the stream between what has been learnt from and what has not been drawn."""

    def __init__(
        self, batch_size: int, max_refills: int, position: int, end: int | None = None
    ) -> None:
        """max_refills 0: a batch is batch_size prompts, whatever their answers are worth. Else it
        is the next batch_size with signal, or what of that (1 + max_refills) · batch_size prompts
        have; without any signal in these, the last batch_size. `end`: how many prompts the stream
        has; the last batch is smaller then. None: it never ends."""
        self.batch_size, self.max_refills = batch_size, max_refills
        self.position = position
        """First prompt of the next batch."""
        self.drawn = position
        """First prompt that has not been drawn."""
        self._end = sys.maxsize if end is None else end
        self._signal: dict[int, bool] = {}

    def draw(self, batches: float) -> range:
        """The prompts that are drawn now, to have as many as may be learnt from in the next so many
        batches."""
        most = math.floor(batches * self.batch_size)
        end = min(self.position + most * (1 + self.max_refills), self._end)
        dull = sum(not self._counts(number) for number in self._signal)
        count = min(most - (self.drawn - self.position - dull), end - self.drawn)
        first, self.drawn = self.drawn, self.drawn + max(0, count)
        return range(first, self.drawn)

    def answered(self, number: int, has_signal: bool) -> None:
        """A prompt that was drawn has all its answers, and their scores."""
        self._signal[number] = has_signal

    def refused(self, number: int) -> None:
        """Answers that a prompt had don't count any more."""
        del self._signal[number]

    def take(self) -> Taken | None:
        """The next batch, if it is whole; the place in the stream is behind it then."""
        looked_at: list[int] = []
        found: list[int] = []
        most = min(self.batch_size * (1 + self.max_refills), self._end - self.position)
        while len(found) < self.batch_size and len(looked_at) < most:
            number = self.position + len(looked_at)
            if number not in self._signal:
                return None
            looked_at.append(number)
            found += [number] if self._counts(number) else []
        self.position += len(looked_at)
        for number in looked_at:
            del self._signal[number]
        return Taken(looked_at, found or looked_at[-self.batch_size :])

    def _counts(self, number: int) -> bool:
        return self._signal[number] or self.max_refills == 0
