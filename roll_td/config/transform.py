"""Settings of the transform pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll_td.config.base import BaseConfig, WorkerConfig
from roll_td.config.schema import ConfigError, Problem


@dataclass
class TransformConfig(BaseConfig):
    """A role that doubles numbers: shows that a job runs."""

    transform: WorkerConfig = field(default_factory=WorkerConfig)
    """The role that doubles."""
    steps: int = 3
    """Batches to send."""
    batch_size: int = 8
    """Rows of a batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [
            Problem(name, repr(value), "must be at least 1", "leave it out for the default")
            for name, value in (("steps", self.steps), ("batch_size", self.batch_size))
            if value < 1
        ]
        if problems:
            raise ConfigError(problems)
