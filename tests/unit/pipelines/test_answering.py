"""When answers are asked for one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from roll_td.config.scheduling import SchedulingConfig
from roll_td.pipelines.answering import start_scheduler


def test_nothing_is_scheduled_where_one_call_asks_for_all() -> None:
    config: Any = SimpleNamespace(scheduling=SchedulingConfig())
    nobody: Any = None
    assert start_scheduler(config, nobody, nobody, nobody, nobody) is None
