"""What configs of pipelines with a language model and a data set of text have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from roll_td.config.base import BaseConfig, WorkerConfig, role_sections
from roll_td.config.data import DataConfig, check_files
from roll_td.config.model import ModelConfig
from roll_td.config.schema import ConfigError, Problem
from roll_td.config.strategies import StrategyArgs
from roll_td.config.vllm import engine_problems

LEAVE = "leave it out for the default"


@dataclass
class TextConfig(BaseConfig):
    """A model and text. A subclass fills its roles in, and adds to the problems."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig = field(kw_only=True)
    """The data set."""
    batch_size: int = 32
    """Rows of a step, over all ranks."""

    def __post_init__(self) -> None:
        self.fill_in_roles()
        problems = list(self.problems())
        try:
            super().__post_init__()
        except ConfigError as error:
            problems = [*error.problems, *problems]
        if problems:
            raise ConfigError(problems)

    def fill_in_roles(self) -> None:
        """Give roles what their sections leave out; see `fill_in`."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong, beside what BaseConfig finds."""
        yield from (problem.under("model") for problem in self.model.text_problems())
        yield from count_problems(self, "batch_size")
        for key, role in role_sections(vars(self)).items():
            found = engine_problems(role, role.model or self.model)
            yield from (problem.under(key) for problem in found)

    def outside_problems(self) -> list[Problem]:
        """Data, model and tokenizer; and models that roles have of their own."""
        problems = [problem.under("data") for problem in check_files(self.data)]
        of_roles = {f"{key}.model": role.model for key, role in role_sections(vars(self)).items()}
        for key, model in {"model": self.model, **of_roles}.items():
            problems += [] if model is None else [p.under(key) for p in model.file_problems()]
        return [*super().outside_problems(), *problems]


def fill_in(
    role: WorkerConfig, strategy: str, worker_cls: str, beside: WorkerConfig | None = None
) -> None:
    """Where the section of a role leaves them out: its strategy, its class, and the devices, which
    are those of the role `beside`, or device 0."""
    role.worker_cls = role.worker_cls or worker_cls
    role.strategy_args = role.strategy_args or StrategyArgs(strategy)
    if role.device_mapping is None and role.world_size is None:
        role.device_mapping = [0] if beside is None else beside.device_mapping
        role.world_size = 1 if beside is None else beside.world_size


def ability_problems(config: BaseConfig, name: str, ability: str, verb: str) -> Iterator[Problem]:
    """If the strategy of the role `name` lacks an ability, a field of Strategy."""
    args: StrategyArgs = getattr(config, name).strategy_args
    if not getattr(args.row, ability):
        key = f"{name}.strategy_args.strategy_name"
        yield Problem(key, repr(args.strategy_name), f"is a strategy that can't {verb}", "")


def count_problems(config: object, *names: str) -> Iterator[Problem]:
    """Of fields that are given and less than 1."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < 1:
            yield Problem(name, repr(value), "must be a whole number of at least 1", LEAVE)


@dataclass
class TrainedTextConfig(TextConfig):
    """Steps on batches of a data set, one optimiser step each."""

    max_steps: int | None = None
    """Steps to train; None: as many as `epochs` take."""
    epochs: float | None = None
    """Times that each row is seen; None: once, unless max_steps is given."""
    eval_steps: int | None = None
    """Steps between validations; None: after the last step only. Without validation data: never."""
    record_steps: int | None = None
    """Each so many-th step, from the first on, is recorded for `roll-td replay`, with all of its
    batch, for which the model looks at it once more; None: none."""
    export_dir: str | None = None
    """Folder for the trained model as transformers loads it; None: no export."""

    def problems(self) -> Iterator[Problem]:
        """Also of how long it is."""
        yield from super().problems()
        yield from count_problems(self, "max_steps", "eval_steps", "record_steps")
        if self.epochs is not None and self.epochs <= 0:
            yield Problem("epochs", repr(self.epochs), "must be above 0", LEAVE)
        if self.epochs is not None and self.max_steps is not None:
            rule = "is given beside max_steps: a run has one length"
            yield Problem("epochs", repr(self.epochs), rule, "drop one of the two")
