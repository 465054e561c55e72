"""Settings of weight updates, from a role that trains to one that answers."""

from __future__ import annotations

from dataclasses import dataclass

from roll_td.config.schema import ConfigError, Problem


@dataclass
class ModelUpdateConfig:
    """How weights go from one role to another."""

    bucket_mb: float = 16.0
    """Megabytes (10^6 bytes) that are sent at once; two such buckets lie on each rank meanwhile."""
    verify: bool = False
    """Compare checksums of every weight on both sides after each update; it takes about as long
    as the update again."""

    def __post_init__(self) -> None:
        if not self.bucket_mb > 0:
            rule = "must be above 0 megabytes"
            raise ConfigError([Problem("bucket_mb", repr(self.bucket_mb), rule, "try 16")])
