"""What `from roll_td import …` has."""

import importlib
import inspect

import pytest

import roll_td

CONTRACT = [
    "BasePipeline",
    "Cluster",
    "Worker",
    "register",
    "register_request",
    "Dispatch",
    "DataProto",
    "get",
    "BaseConfig",
    "WorkerConfig",
    "create_strategy",
    "ResourceManager",
    "WorkerError",
    "current_platform",
]


@pytest.mark.parametrize("name", sorted({*CONTRACT, *roll_td.__all__}))
def test_a_public_name_is_what_its_module_has(name: str) -> None:
    found = getattr(roll_td, name)
    home = inspect.getmodule(found)
    assert home is not None and getattr(importlib.import_module(home.__name__), name) is found
