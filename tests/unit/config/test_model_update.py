from __future__ import annotations

import pytest

from roll_td.config.model_update import ModelUpdateConfig


def test_a_bucket_holds_something() -> None:
    assert ModelUpdateConfig(bucket_mb=0.5).bucket_mb == 0.5
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"bucket_mb.*must be above 0 megabytes"):
            ModelUpdateConfig(bucket_mb=wrong)
