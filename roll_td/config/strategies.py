"""Strategies by name, and what `strategy_config` of each may hold. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from roll_td.config.schema import ConfigError, Problem, read


@dataclass
class Fsdp2Config:
    """Fully sharded data parallel, second version, by torch."""

    fsdp_size: int | None = None
    """Ranks that share one copy of the model; None: all of the role. Fewer: hybrid sharding, with
    as many copies as fit. A divisor of the role's workers."""
    reshard_after_forward: bool = True
    """Free gathered weights between forward and backward; False is faster and takes more memory."""


@dataclass
class HfInferConfig:
    """Generation and log-probs by a model of transformers on each worker."""

    batch_size: int = 64
    """Sequences that are generated at once; as one ends the next takes its place."""


@dataclass
class MockConfig:
    """Deterministic answers without a model, for tests and dry runs."""

    latency_s: float = 0.0
    """Seconds that each call takes."""
    min_tokens: int = 1
    """Shortest response."""
    max_tokens: int | None = None
    """Longest response; None: max_new_tokens of the generation."""
    vocab_size: int = 32
    """Response tokens are below this number."""
    fail_on_call: int | None = None
    """Number of the call, from 0, that raises; None: none does."""


@dataclass(frozen=True)
class Strategy:
    """A row of the table."""

    cls: str
    """Dotted path of the class."""
    config_cls: type[Any]
    """What strategy_config is read into."""
    topology: str
    """Dotted path of a pure function, WorkerConfig → Topology, in a module without torch."""
    trains: bool = False
    """Whether it is a TrainStrategy."""
    generates: bool = False
    """Whether it makes responses to prompts."""
    memory: str | None = None
    """Dotted path of a pure function, (WorkerConfig, ModelConfig, ModelSize, Load) → RoleMemory, in
    a module without torch; None: it takes no memory to speak of."""


_APART = "roll_td.distributed.topology.apart"
_TOGETHER = "roll_td.distributed.topology.together"
_MEMORY = "roll_td.config.memory."

STRATEGIES = {
    "fsdp2_train": Strategy(
        "roll_td.strategies.fsdp2.Fsdp2Train",
        Fsdp2Config,
        _TOGETHER,
        trains=True,
        memory=f"{_MEMORY}fsdp2",
    ),
    "fsdp2_infer": Strategy(
        "roll_td.strategies.fsdp2.Fsdp2Infer", Fsdp2Config, _TOGETHER, memory=f"{_MEMORY}fsdp2"
    ),
    "hf_infer": Strategy(
        "roll_td.strategies.hf.HfInfer",
        HfInferConfig,
        _APART,
        generates=True,
        memory=f"{_MEMORY}hf",
    ),
    "mock_infer": Strategy("roll_td.strategies.mock.MockInfer", MockConfig, _APART, generates=True),
}


@dataclass
class StrategyArgs:
    """The backend of a role."""

    strategy_name: str
    """A name of STRATEGIES."""
    strategy_config: dict[str, Any] = field(default_factory=dict)
    """Its own settings."""

    def __post_init__(self) -> None:
        if self.strategy_name not in STRATEGIES:
            near = get_close_matches(self.strategy_name, STRATEGIES, 1)
            fix = f"did you mean {near[0]}?" if near else ""
            rule = f"is no strategy; there are {', '.join(STRATEGIES)}"
            raise ConfigError([Problem("strategy_name", self.strategy_name, rule, fix)])
        problems = read(self.row.config_cls, self.strategy_config).problems
        if problems:
            raise ConfigError([problem.under("strategy_config") for problem in problems])

    @property
    def row(self) -> Strategy:
        """The strategy's row of the table."""
        return STRATEGIES[self.strategy_name]

    @property
    def settings(self) -> Any:
        """strategy_config as an object of the row's config_cls."""
        return read(self.row.config_cls, self.strategy_config).value
