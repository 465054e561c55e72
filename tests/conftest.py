import os

# tensors here are small: more threads than one wait for each other longer than they compute
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# the same examples in every run: a machine is no reason for a test to fail or to pass
settings.register_profile("roll_td", deadline=None, derandomize=True)
settings.load_profile("roll_td")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what takes minutes unless all is asked for."""
    if item.get_closest_marker("long") and os.environ.get("ROLL_TD_TESTS") != "all":
        pytest.skip("takes minutes; set ROLL_TD_TESTS=all")
