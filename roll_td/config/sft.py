"""Settings of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass, field

from roll_td.config.base import BaseConfig, WorkerConfig
from roll_td.config.data import DataConfig, answer_problems, check_files
from roll_td.config.model import ModelConfig
from roll_td.config.schema import ConfigError, Problem
from roll_td.config.strategies import StrategyArgs

LEAVE = "leave it out for the default"


@dataclass
class SFTConfig(BaseConfig):
    """A language model learns the answers of a data set."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    data: DataConfig = field(kw_only=True)
    """What it learns from."""
    actor_train: WorkerConfig = field(default_factory=WorkerConfig)
    """The role that trains; without device_mapping and world_size it has device 0."""
    batch_size: int = 32
    """Rows of an optimiser step, over all ranks."""
    max_steps: int | None = None
    """Steps to train; None: as many as `epochs` take."""
    epochs: float | None = None
    """Times that each row is seen; None: once, unless max_steps is given."""
    eval_steps: int | None = None
    """Steps between validations; None: after the last step only. Without validation data: never."""
    export_dir: str | None = None
    """Folder for the trained model as transformers loads it; None: no export."""

    def __post_init__(self) -> None:
        role = self.actor_train
        if role.device_mapping is None and role.world_size is None:
            role.device_mapping, role.world_size = [0], 1
        role.worker_cls = role.worker_cls or "roll_td.workers.sft.SFTWorker"
        role.strategy_args = role.strategy_args or StrategyArgs("fsdp2_train")
        problems = [problem.under("data") for problem in answer_problems(self.data)]
        problems += [problem.under("model") for problem in self.model.text_problems()]
        problems += [*self._length_problems(), *self._role_problems()]
        try:
            super().__post_init__()
        except ConfigError as error:
            problems = [*error.problems, *problems]
        if problems:
            raise ConfigError(problems)

    def file_problems(self) -> list[Problem]:
        """Data, model and tokenizer."""
        data = [problem.under("data") for problem in check_files(self.data)]
        model = [problem.under("model") for problem in self.model.file_problems()]
        return [*super().file_problems(), *data, *model]

    def _length_problems(self) -> list[Problem]:
        problems = [
            Problem(name, repr(value), "must be a whole number of at least 1", LEAVE)
            for name in ("batch_size", "max_steps", "eval_steps")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.epochs is not None and self.epochs <= 0:
            problems.append(Problem("epochs", repr(self.epochs), "must be above 0", LEAVE))
        if self.epochs is not None and self.max_steps is not None:
            rule = "is given beside max_steps: a run has one length"
            problems.append(Problem("epochs", repr(self.epochs), rule, "drop one of the two"))
        return problems

    def _role_problems(self) -> list[Problem]:
        args = self.actor_train.strategy_args
        if args is None or args.row.trains:
            return []
        key, fix = "actor_train.strategy_args.strategy_name", "use one that does: fsdp2_train"
        return [Problem(key, repr(args.strategy_name), "is a strategy that can't train", fix)]
