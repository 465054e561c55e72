"""Settings of advantages and losses: what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from roll_td.config.functions import AdvantageArgs, PolicyLossArgs
from roll_td.config.schema import ConfigError, read
from roll_td.config.weighting import DifficultyWeightConfig, LengthWeightConfig


def test_defaults_are_those_of_the_papers() -> None:
    right = {"good_low": 1.0, "good_high": 1.0, "bad_low": 0.0, "bad_high": 1.0}
    assert PolicyLossArgs("topr").arguments == right | {"ratio_level": "sequence"}
    assert PolicyLossArgs("tis").arguments == {"cap": 2.0, "ratio_level": "token"}
    assert PolicyLossArgs("kimi15", {"tau": 0.1}).arguments == {"tau": 0.1, "level": "sequence"}
    assert AdvantageArgs("turn_reinforce").arguments == {"gamma": 1.0, "baseline": "rows"}
    right = {"gamma": 0.95, "turn_weight": 1.0, "scale": "group", "ddof": 1}
    assert AdvantageArgs("gigpo").arguments == right


@pytest.mark.parametrize(
    ("cls", "name", "settings", "message"),
    [
        (PolicyLossArgs, "tis", {"cap": 0}, "settings.cap=0.0: must be above 0"),
        (PolicyLossArgs, "tis", {"capp": 2}, "settings.capp.*did you mean cap"),
        (PolicyLossArgs, "tis", {"ratio_level": "turn"}, "'segment'"),
        (PolicyLossArgs, "topr", {"good_low": 2}, "good_low=2.0: must lie in 0 to good_high=1.0"),
        (PolicyLossArgs, "topr", {"bad_low": -1}, "bad_low=-1.0: must lie in 0 to bad_high=1.0"),
        (PolicyLossArgs, "kimi15", {}, "settings.tau: is missing"),
        (PolicyLossArgs, "kimi15", {"tau": -1}, "tau=-1.0: must be at least 0"),
        (AdvantageArgs, "turn_reinforce", {"gamma": 2}, "gamma=2.0: must lie in 0 to 1"),
        (AdvantageArgs, "turn_reinforce", {"baseline": "row"}, "'rows', 'turns', 'none'"),
        (AdvantageArgs, "gigpo", {"turn_weight": -1}, "turn_weight=-1.0: must be at least 0"),
        (AdvantageArgs, "gigpo", {"scale": "batch"}, "'group', 'none'"),
    ],
)
def test_a_wrong_setting_is_named(
    cls: Any, name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cls(name, settings)


@pytest.mark.parametrize(
    ("cls", "given", "message"),
    [
        (LengthWeightConfig, {}, "alpha: is missing"),
        (LengthWeightConfig, {"alpha": -1}, "alpha=-1.0: must be a finite number of at least 0"),
        (DifficultyWeightConfig, {"low": 2}, "low=2.0: must lie in 0 to high=1.5"),
        (DifficultyWeightConfig, {"middle": 2}, "middle=2.0: must lie in 0 to 1"),
        (DifficultyWeightConfig, {"steepness": -1}, "steepness=-1.0: must be a finite number"),
    ],
)
def test_a_wrong_weight_is_named(cls: Any, given: dict[str, Any], message: str) -> None:
    assert message in "\n".join(map(str, read(cls, given).problems))
