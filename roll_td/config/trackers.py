"""Settings of trackers: where metrics go beside the run directory and the terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class TensorBoardConfig:
    """Event files for TensorBoard."""

    folder: str = "tensorboard"
    """Where they go; a relative path lies in the run directory."""


@dataclass
class WandbConfig:
    """Weights & Biases. Its key comes from the environment (WANDB_API_KEY) or `wandb login`."""

    project: str
    """Name of the project."""
    entity: str | None = None
    """User or team; None: the default one of the key."""
    name: str | None = None
    """Name of the run; None: exp_name."""
    mode: Literal["online", "offline"] = "online"
    """offline: files in the run directory, which `wandb sync` uploads later."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""


@dataclass
class TrackersConfig:
    """Trackers beside metrics.jsonl and the terminal, which every run has."""

    tensorboard: TensorBoardConfig | None = None
    """None: no event files."""
    wandb: WandbConfig | None = None
    """None: nothing goes to wandb."""
