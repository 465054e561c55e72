"""Whether the roles of a config fit into its devices, by the estimates of roll_td.config.memory.

What stays adds up over the roles of a device. What comes and goes with a call does not: a rank
executes one command at a time, so the role that holds the most while it works counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roll_td.config.base import BaseConfig, WorkerConfig, roles
from roll_td.config.classes import import_object
from roll_td.config.data import DataConfig
from roll_td.config.evaluation import EvaluatedConfig
from roll_td.config.judges import JudgeConfig
from roll_td.config.memory import Load, RoleMemory
from roll_td.config.model import ModelConfig
from roll_td.config.model_size import model_size
from roll_td.config.schema import Problem
from roll_td.config.strategies import VllmConfig

PARTS = {
    "weights_mb": "weights",
    "optimizer_mb": "optimizer",
    "gradients_mb": "gradients",
    "activations_mb": "activations",
    "buffers_mb": "buffers",
    "kv_cache_mb": "KV cache",
    "allocator_mb": "allocator",
}


@dataclass(frozen=True)
class DeviceMemory:
    """What the roles on some devices take of each of these."""

    devices: tuple[int, ...]
    """Devices that have the same roles; none: a role on CPUs."""
    roles: dict[str, RoleMemory]
    """By the role's name."""
    offloads: bool = False
    """Whether only those are there that are at work: one, or two for new weights."""

    @property
    def peak_mb(self) -> float:
        """All that stays, and the most that one role holds beside it; with offloads the most that
        one takes, or that two have that stays."""
        kept = sum(role.kept_mb for role in self.roles.values())
        others = [role.without_kept() for role in self.roles.values()]
        stays = sorted(role.resident_mb for role in others)
        if self.offloads:
            return kept + max(*(role.peak_mb for role in others), sum(stays[-2:]))
        return kept + sum(stays) + max(role.working_mb for role in others)


def memory_by_device(config: BaseConfig) -> tuple[list[DeviceMemory], list[str]]:
    """What is taken of each device; and of which roles this can't be told, with the reason.

    Roles whose strategy has no model are left out.
    """
    on_cpus: list[dict[str, RoleMemory]] = []
    unknown = []
    by_device: dict[int, dict[str, RoleMemory]] = {}
    for name, role in roles(config).items():
        try:
            memory = role_memory(config, role)
        except ValueError as error:
            unknown.append(f"memory of {name} is not known: {error}")
            continue
        if memory is not None:
            assert role.strategy_args is not None, "it has a model"
            if not isinstance(role.device_mapping, list):
                on_cpus.append({name: memory})
                continue
            for place, device in enumerate(role.device_mapping):
                is_first = place % role.num_gpus_per_worker == 0
                if is_first or role.strategy_args.row.spreads:
                    here = memory if is_first else memory.without_kept()
                    by_device.setdefault(device, {})[name] = here
    offloads = bool(getattr(config, "offload", False))
    alike: dict[tuple[tuple[str, RoleMemory], ...], list[int]] = {}
    for device, taken in sorted(by_device.items()):
        alike.setdefault(tuple(taken.items()), []).append(device)
    return [
        *(DeviceMemory(tuple(devices), dict(taken), offloads) for taken, devices in alike.items()),
        *(DeviceMemory((), taken, offloads) for taken in on_cpus),
    ], unknown


def role_memory(config: BaseConfig, role: WorkerConfig) -> RoleMemory | None:
    """What a role takes of the first device of a worker; None without a model. ValueError if it
    can't be told."""
    row = role.strategy_args.row if role.strategy_args else None
    if row is None or row.memory is None:
        return None
    model = role.model or getattr(config, "model", None)
    if not isinstance(model, ModelConfig):
        raise ValueError("it has no model; set its own or the pipeline's")
    estimate = import_object(row.memory)
    load = replace(_load(config, role), device_gb=config.device_memory_gb)
    memory: RoleMemory = estimate(role, model, model_size(model), load)
    return memory if config.asynchronous_checkpoints else replace(memory, checkpoint_mb=0.0)


def _load(config: BaseConfig, of: WorkerConfig) -> Load:
    if isinstance(of, JudgeConfig):
        return Load(of.max_length, of.max_length + of.generation.max_new_tokens)
    data = getattr(config, "data", None)
    if not isinstance(data, DataConfig):
        raise ValueError("the config has no data.max_length, which says how long rows are")
    if isinstance(config, EvaluatedConfig):  # its answers are not learnt from
        if of is config.actor_infer and config.prompts is not None:
            most = config.prompts.max_length
            return Load(most, most + of.generation.max_new_tokens)
        return Load(data.max_length, data.max_length, config.batch_size)
    responses = [
        role.generation.max_new_tokens
        for role in roles(config).values()
        if role.strategy_args
        and role.strategy_args.row.generates
        and not isinstance(role, JudgeConfig)
    ]
    if responses:
        return Load(data.max_length, data.max_length + max(responses))
    return Load(data.max_length, data.max_length, getattr(config, "batch_size", None))


def memory_problems(config: BaseConfig, taken: Sequence[DeviceMemory]) -> list[Problem]:
    """Where roles don't fit into device_memory_gb."""
    limit_gb = config.device_memory_gb
    return [
        Problem("device_memory_gb", f"{limit_gb:g}", _needs(some), _way_out(config, some.roles))
        for some in taken
        if limit_gb is not None and some.devices and some.peak_mb > limit_gb * 1024
    ]


def _needs(some: DeviceMemory) -> str:
    stays = ", ".join(f"{name} {_gb(role.resident_mb)}" for name, role in some.roles.items())
    needs = f"is less than the {_gb(some.peak_mb)} GB that device {_ranges(some.devices)} needs: "
    if some.offloads:
        peaks = ", ".join(f"{name} {_gb(role.peak_mb)}" for name, role in some.roles.items())
        return f"{needs}the most of one ({peaks}), or what stays of two for new weights ({stays})"
    name, most = max(some.roles.items(), key=lambda item: item[1].working_mb)
    working = _gb(most.working_mb)
    return f"{needs}what stays ({stays}) and what {name} holds while it works ({working})"


def _way_out(config: BaseConfig, of: dict[str, RoleMemory]) -> str:
    """What to do about the largest part."""
    sizes = {(name, part): getattr(of[name], part) for name in of for part in PARTS}
    name, part = max(sizes, key=lambda key: sizes[key])
    role = roles(config)[name]
    assert role.strategy_args is not None
    if part == "kv_cache_mb":
        settings, setting = role.strategy_args.settings, "batch_size"
        if isinstance(settings, VllmConfig):
            by_bytes = settings.engine_args.get("kv_cache_memory_bytes")
            setting = "kv_cache_memory_bytes" if by_bytes else "gpu_memory_utilization"
        fix = f"lower {name}.strategy_args.strategy_config.{setting}"
    elif part == "activations_mb" and role.strategy_args.row.spreads:
        fix = f"lower {name}.strategy_args.strategy_config.max_num_batched_tokens"
    elif part == "activations_mb":
        fix = f"lower {name}.training.micro_batch_size or max_tokens_per_micro_batch"
        if not role.training.gradient_checkpointing:
            fix += f", set {name}.training.gradient_checkpointing: true"
    elif part == "weights_mb" and of[name].kept_mb:
        fix = f"set {name}.strategy_args.strategy_config.weights_on: host"
    else:
        fix = f"shard {name} over more devices"
        fix += ", train adapters (model.lora)" if role.strategy_args.row.trains else ""
    return f"{fix}, or give each role devices of its own" if len(of) > 1 else fix


def memory_table(taken: Sequence[DeviceMemory]) -> str:
    """The estimate as text: a line for each role on devices that have the same roles, and one for
    several together; empty if there is none."""
    if not taken:
        return ""
    rows = [["memory in GB", "device", *PARTS.values(), "peak", "host, to save"]]
    for some in taken:
        device = _ranges(some.devices) or "-"
        for name, role in some.roles.items():
            sizes = [getattr(role, part) for part in [*PARTS, "peak_mb", "checkpoint_mb"]]
            cells = [_gb(size) if size else "-" for size in sizes]
            rows.append([name, device, *cells])
        if len(some.roles) > 1:
            rows.append(["together", device, *[""] * len(PARTS), _gb(some.peak_mb), ""])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (zip(row, widths, strict=True) for row in rows)
    return "\n".join("  ".join(cell.ljust(w) for cell, w in line).rstrip() for line in lines)


def _gb(size_mb: float) -> str:
    return f"{size_mb / 1024:.2f}" if size_mb >= 0.01 * 1024 else "<0.01"


def _ranges(devices: Sequence[int]) -> str:
    """As a device_mapping is written: 0-3,6."""
    spans: list[list[int]] = []
    for device in devices:
        if spans and device == spans[-1][1] + 1:
            spans[-1][1] = device
        else:
            spans.append([device, device])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
