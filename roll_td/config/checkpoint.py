"""Settings of checkpoints. Every pipeline has them: they are fields of BaseConfig."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from roll_td.config.schema import Problem

LEAVE = "leave it out for the default"


@dataclass
class CheckpointConfig:
    """When checkpoints are made, how many stay, where a run goes on."""

    resume: str = "auto"
    """auto: go on from the newest complete checkpoint of this run, if there is one; none: begin
    at step 0; else the path of a step_N folder, used while this run has no checkpoint of its own.
    """
    save_steps: int | None = None
    """Steps between checkpoints; None: only the last step is saved, as it always is."""
    asynchronous_checkpoints: bool = True
    """Go on with the next step while a checkpoint is written; until it is, each rank holds what it
    writes once more in host memory. At most one is under way."""
    keep_checkpoints: int | None = None
    """How many of this run's checkpoints stay, the newest; None: all."""
    upload_to: str | None = None
    """A folder or fsspec URL to which each complete checkpoint is copied as step_N, beside the
    run; None: nowhere. Nothing is ever removed there."""
    upload_timeout_s: float = 600.0
    """Seconds that the end of the run waits for copies that are still under way."""

    def checkpoint_problems(self) -> list[Problem]:
        """What is wrong with these fields."""
        problems = [
            Problem(name, repr(value), "must be a whole number of at least 1", LEAVE)
            for name in ("save_steps", "keep_checkpoints")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.upload_timeout_s <= 0:
            rule = "must be above 0 seconds"
            problems.append(Problem("upload_timeout_s", repr(self.upload_timeout_s), rule, LEAVE))
        if not self.resume:
            rule, fix = "is empty", "set auto, none or the path of a step_N folder"
            problems.append(Problem("resume", "''", rule, fix))
        return problems

    def resume_problems(self, own: Path) -> list[Problem]:
        """That there is no checkpoint where `resume` says; `own`: the folder of this run's, which
        go before. What is in a checkpoint is looked at when the run starts."""
        if self.resume in ("auto", "none") or any(own.glob("step_*")):
            return []
        if Path(self.resume).is_dir():
            return []
        rule, fix = "there is no such folder", "set auto, none or the path of a step_N folder"
        return [Problem("resume", repr(self.resume), rule, fix)]
