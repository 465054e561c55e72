"""A user's working directory with a module of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

USER_MODULE = """
from __future__ import annotations
from dataclasses import dataclass, field
from roll_td.config.base import BaseConfig, WorkerConfig

@dataclass
class Tracker:
    api_key: str | None = None
    url: str = ""

@dataclass
class MyConfig(BaseConfig):
    student: WorkerConfig = field(default_factory=WorkerConfig)
    teacher: WorkerConfig | None = None
    rewards: dict[str, WorkerConfig] = field(default_factory=dict)
    tracker: Tracker = field(default_factory=Tracker)
    learning_rate: float = 1e-3
    use_cls_token: bool = True
    num_tokens: int = 7

    def __post_init__(self):
        super().__post_init__()
        if self.student.worker_cls is None:
            self.student.worker_cls = "user_code.MyWorker"

class Forgotten(BaseConfig):
    extra: int = 1

class MyWorker: ...

class Base:
    def __init__(self, pipeline_config: BaseConfig): ...

class Plain(Base):
    def __init__(self, pipeline_config): ...

class Annotated(Base):
    def __init__(self, pipeline_config: MyConfig): ...

class Inherits(Annotated): ...

class Attribute(Base):
    config_cls = MyConfig

class AttributeText(Base):
    config_cls = "user_code.MyConfig"

class NoConfig(Base):
    config_cls = int

class NoDataclass(Base):
    config_cls = Forgotten

class Unreadable(Base):
    def __init__(self, pipeline_config: Nowhere): ...

a_function = len
"""


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; `user_code` in it is imported afresh."""
    (tmp_path / "user_code.py").write_text(USER_MODULE)
    (tmp_path / "broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("user_code", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path
