"""Settings of the replay of a recorded step. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from roll_td.config.distill import DistillConfig
from roll_td.config.dpo import DPOConfig
from roll_td.config.evaluation import OF_PROMPTS
from roll_td.config.onpolicy_distill import OnPolicyDistillConfig
from roll_td.config.rlvr import RLVRConfig
from roll_td.config.sft import SFTConfig

_PIPELINES = "roll_td.pipelines."
REPLAYED = {
    _PIPELINES + "rlvr.RLVRPipeline": _PIPELINES + "replay.ReplayPipeline",
    _PIPELINES + "onpolicy_distill.OnPolicyDistillPipeline": (
        _PIPELINES + "replay.OnPolicyReplayPipeline"
    ),
    _PIPELINES + "sft.SFTPipeline": _PIPELINES + "replay_text.SFTReplayPipeline",
    _PIPELINES + "dpo.DPOPipeline": _PIPELINES + "replay_text.DPOReplayPipeline",
    _PIPELINES + "distill.DistillPipeline": _PIPELINES + "replay_text.DistillReplayPipeline",
}
"""The pipelines whose steps are recorded, and what does them again."""
RECORDS = "records"
"""Folder of a run with a file for each recorded step."""


@dataclass
class ReplayOf:
    """What is replayed."""

    run_dir: str
    """The folder of the run."""
    step: int
    """The step, as metrics count them: from 0."""
    sample: int | None = None
    """The sample_id of what is looked at, an answer, or a row or pair by its place in the stream of
    data; None: all of the step."""


@dataclass
class Replay:
    """The config of a run, on one rank."""

    replay: ReplayOf = field(kw_only=True)
    """What is replayed."""


@dataclass
class ReplayConfig(Replay, RLVRConfig):
    """Of RLVR."""


@dataclass
class OnPolicyReplayConfig(OnPolicyDistillConfig, ReplayConfig):
    """Of on-policy distillation."""


@dataclass
class SFTReplayConfig(Replay, SFTConfig):
    """Of fine-tuning."""


@dataclass
class DPOReplayConfig(Replay, DPOConfig):
    """Of learning from pairs."""


@dataclass
class DistillReplayConfig(Replay, DistillConfig):
    """Of distillation."""


def record_path(run_dir: str | Path, step: int) -> Path:
    """Where a step of a run is recorded."""
    return Path(run_dir) / RECORDS / f"step_{step}.pt"


def write_replay_config(run_dir: str, step: int, sample: int | None) -> Path:
    """A config that replays a step of a run, written to a folder replay/ there: the run's own, with
    every role on one rank. ValueError for a run or a step that can't be replayed."""
    path, record = Path(run_dir) / "config.yaml", record_path(run_dir, step)
    if not path.is_file():
        raise ValueError(f"{run_dir} is no folder of a run: it has no config.yaml")
    if not record.is_file():
        there = sorted(int(p.stem.removeprefix("step_")) for p in record.parent.glob("step_*.pt"))
        known = f"there are {', '.join(map(str, there))}" if there else "nothing is recorded"
        raise ValueError(f"{run_dir} has no record of step {step}: {known}; see record_steps")
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    if config["pipeline_cls"] not in REPLAYED:
        known = ", ".join(REPLAYED)
        raise ValueError(f"{run_dir} is of {config['pipeline_cls']}: what is replayed is {known}")
    for section in config.values():
        for role in [section, *section.values()] if isinstance(section, dict) else []:
            if isinstance(role, dict) and "worker_cls" in role:
                _put_on_one_rank(role)
    config.pop("scheduling", None)  # nothing is generated, so roles may share a device
    config.pop("reference_cache", None)  # the reference is asked again
    if config.pop("prompts", None) is not None:
        for name in OF_PROMPTS:
            config.pop(name)
    config |= {
        "pipeline_cls": REPLAYED[config["pipeline_cls"]],
        "config_cls": None,
        "output_dir": str(Path(run_dir) / "replay"),
        "exp_name": f"step_{step}",
        "num_nodes": 1,
        "num_gpus_per_node": 1,
        "num_cpu_ranks_per_node": 0,
        "resume": "auto",
        "upload_to": None,
        "trackers": {},
        "record_steps": None,
        "replay": {"run_dir": run_dir, "step": step, "sample": sample},
    }
    made = Path(run_dir) / "replay" / f"step_{step}.yaml"
    made.parent.mkdir(exist_ok=True)
    made.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return made


def _put_on_one_rank(role: dict[str, Any]) -> None:
    role |= {"world_size": 1, "num_gpus_per_worker": 1}
    role["device_mapping"] = None if role["device_mapping"] is None else [0]
    if role["strategy_args"] is not None:
        role["strategy_args"]["strategy_config"].pop("fsdp_size", None)
