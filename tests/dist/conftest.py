from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.harness import kill_all


@pytest.fixture(autouse=True)
def no_job_outlives_its_test() -> Iterator[None]:
    yield
    kill_all()
