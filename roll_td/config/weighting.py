"""Settings of weights by length and difficulty. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roll_td.config.function_settings import require


@dataclass
class LengthWeightConfig:
    """Right answers score less the longer they are, beside the right ones of their group."""

    alpha: float
    """Their score is multiplied by exp(-alpha) for each standard deviation that they are longer;
    0.05 in the code of its authors."""
    right_from: float = 1.0
    """The score from which on an answer is right."""

    def __post_init__(self) -> None:
        require(self, alpha=(0 <= self.alpha < math.inf, "must be a finite number of at least 0"))


@dataclass
class DifficultyWeightConfig:
    """Right answers count more the fewer of their group are right, wrong ones the more are."""

    low: float = 0.4
    """What advantages are multiplied by where the answer was to be expected."""
    high: float = 1.5
    """What they are multiplied by where it was not."""
    middle: float = 0.75
    """Share of the group at which it is the mean of both."""
    steepness: float = 10.0
    """How fast it changes there."""
    right_from: float = 1.0
    """The score from which on an answer is right."""

    def __post_init__(self) -> None:
        require(
            self,
            low=(0 <= self.low <= self.high, f"must lie in 0 to high={self.high}"),
            middle=(0 <= self.middle <= 1, "must lie in 0 to 1"),
            steepness=(0 <= self.steepness < math.inf, "must be a finite number of at least 0"),
        )
