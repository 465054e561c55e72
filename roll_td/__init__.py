"""Pipelines of clusters of workers, in one torch.distributed job.

Names are imported when first used, so that config code needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_td.config.base import BaseConfig as BaseConfig
    from roll_td.config.base import WorkerConfig as WorkerConfig
    from roll_td.distributed.topology import Topology as Topology
    from roll_td.metrics import Last as Last
    from roll_td.metrics import Max as Max
    from roll_td.metrics import Mean as Mean
    from roll_td.metrics import Min as Min
    from roll_td.metrics import Sum as Sum
    from roll_td.pipelines.base import BasePipeline as BasePipeline
    from roll_td.plan import StepPlan as StepPlan
    from roll_td.plan import default_plan as default_plan
    from roll_td.platform import current_platform as current_platform
    from roll_td.protocol import DataProto as DataProto
    from roll_td.runtime.cluster import Cluster as Cluster
    from roll_td.runtime.cluster import ResourceManager as ResourceManager
    from roll_td.runtime.dispatch import Dispatch as Dispatch
    from roll_td.runtime.dispatch import register as register
    from roll_td.runtime.dispatch import register_request as register_request
    from roll_td.runtime.failure import WorkerError as WorkerError
    from roll_td.runtime.refs import get as get
    from roll_td.runtime.worker import Worker as Worker
    from roll_td.strategies.factory import create_strategy as create_strategy
    from roll_td.workers.base import ModelWorker as ModelWorker

_NAMES = {
    "config.base": ("BaseConfig", "WorkerConfig"),
    "distributed.topology": ("Topology",),
    "metrics": ("Last", "Max", "Mean", "Min", "Sum"),
    "pipelines.base": ("BasePipeline",),
    "plan": ("StepPlan", "default_plan"),
    "platform": ("current_platform",),
    "protocol": ("DataProto",),
    "runtime.cluster": ("Cluster", "ResourceManager"),
    "runtime.refs": ("get",),
    "runtime.dispatch": ("Dispatch", "register", "register_request"),
    "runtime.failure": ("WorkerError",),
    "runtime.worker": ("Worker",),
    "strategies.factory": ("create_strategy",),
    "workers.base": ("ModelWorker",),
}
_MODULE_OF = {name: f"roll_td.{module}" for module, names in _NAMES.items() for name in names}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
