"""AlgorithmConfig: what it refuses, and that all of every function is reached from YAML."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from roll_td.algorithms.aggregation import AGGREGATIONS
from roll_td.algorithms.choosing import call
from roll_td.algorithms.kl import ESTIMATORS
from roll_td.algorithms.ratios import LEVELS, ratios
from roll_td.algorithms.rewards_shaping import STATISTICS
from roll_td.config.algorithm import (
    AlgorithmConfig,
    KlConfig,
    Statistic,
    generation_problems,
)
from roll_td.config.classes import import_object
from roll_td.config.function_settings import GrpoSettings, Level
from roll_td.config.functions import (
    ADVANTAGES,
    DIVERGENCES,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    AdvantageArgs,
    DivergenceArgs,
    Function,
    PolicyLossArgs,
    PreferenceLossArgs,
)
from roll_td.config.load import load
from roll_td.config.model import GenerationConfig
from roll_td.config.schema import ConfigError, read
from roll_td.config.signatures import check_settings, columns_of

ROWS = [
    row
    for table in (ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES, DIVERGENCES)
    for row in table.values()
]


def config(**given: Any) -> AlgorithmConfig:
    reading = read(AlgorithmConfig, given)
    if reading.value is None:
        raise ConfigError(reading.problems)
    return reading.value


def problems(**given: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config(**given)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_a_row_names_a_function_and_its_settings_are_the_functions(row: Function) -> None:
    function = import_object(row.path)
    parameters = inspect.signature(function).parameters.values()
    keywords = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert keywords.keys() == {field.name for field in dataclasses.fields(row.settings_cls)}
    # a default has one home, and it is the config
    assert all(p.default is p.empty for p in parameters)
    assert len(columns_of(function)) == len(list(parameters)) - len(keywords)
    assert row.critic == ("values" in columns_of(function))
    assert row.states == ("state_id" in columns_of(function))


def choices(cls: type, name: str) -> tuple[Any, ...]:
    return get_args(get_type_hints(cls)[name])


def test_names_a_config_takes_are_those_of_the_tables() -> None:
    assert set(choices(AlgorithmConfig, "aggregation")) == AGGREGATIONS.keys()
    assert set(choices(KlConfig, "estimator")) == ESTIMATORS.keys()
    assert set(get_args(Level)) == LEVELS.keys()
    assert set(get_args(Statistic)) == STATISTICS.keys()
    assert set(choices(GrpoSettings, "scale")) == STATISTICS.keys() - {"running"}


def test_defaults_are_grpo_by_token_without_a_reference() -> None:
    made = config()
    assert (made.advantage.name, made.policy_loss.name) == ("grpo", "ppo")
    assert made.advantage.arguments == {"scale": "group", "ddof": 1}
    right = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "ratio_level": "token"}
    assert made.policy_loss.arguments == right
    assert (made.aggregation, made.kl, made.importance_weights) == ("token-mean", None, None)
    assert generation_problems(made, GenerationConfig(num_return_sequences=2)) == []


CONFIG_CODE = """
from dataclasses import dataclass, field
from roll_td.config.algorithm import AlgorithmConfig
from roll_td.config.base import BaseConfig

@dataclass
class MyConfig(BaseConfig):
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
"""
OVERRIDES = {
    "advantage.name": "grpo",
    "advantage.settings.scale": "none",
    "advantage.settings.ddof": 0,
    "policy_loss.settings.clip_high": 0.28,
    "policy_loss.settings.dual_clip": 3.0,
    "policy_loss.settings.ratio_level": "sequence-mean",
    "scores.mean": "running",
    "scores.overlong.buffer_tokens": 4,
    "kl.coefficient": 0.04,
    "kl.place": "reward",
    "kl.target": 0.1,
    "importance_weights.cap": 3.0,
    "importance_filter.low": 0.5,
    "importance_filter.high": 2.0,
    "aggregation": "constant",
    "divisor": 100.0,
}


def test_every_setting_is_reached_from_the_command_line(workdir: Path) -> None:
    (workdir / "my_config.py").write_text(CONFIG_CODE)
    (workdir / "my.yaml").write_text(
        "pipeline_cls: user_code.Plain\nconfig_cls: my_config.MyConfig\n"
    )
    given = [f"algorithm.{key}={value}" for key, value in OVERRIDES.items()]
    made = load(workdir / "my.yaml", given).algorithm  # type: ignore[attr-defined]
    for key, value in OVERRIDES.items():
        found: Any = made
        for part in key.split("."):
            found = found[part] if isinstance(found, dict) else getattr(found, part)
        assert found == value, key
    assert made.advantage.arguments == {"scale": "none", "ddof": 0}
    assert made.policy_loss.arguments == {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 3.0,
        "ratio_level": "sequence-mean",
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"advantage": {"name": "gpro"}}, "advantage.name='gpro': is none of grpo, rloo, rein"),
        ({"advantage": {"name": "gpro"}}, "did you mean grpo?"),
        # C07: false is no name
        (
            {"advantage": {"settings": {"scale": False}}},
            "advantage.settings.scale=False: must be one of 'group', 'batch', 'none'",
        ),
        ({"scores": {"std": False}}, "scores.std=False: must be one of 'none', 'group', 'batch'"),
        (
            {"advantage": {"name": "rloo", "settings": {"scale": "group"}}},
            "advantage.settings.scale: is not a key of section settings; it has no keys",
        ),
        (
            {"policy_loss": {"settings": {"clip_hgih": 1}}},
            "policy_loss.settings.clip_hgih: is not a key of section settings; did you mean clip_h",
        ),
        ({"advantage": {"name": "gae", "settings": {"lam": 2}}}, "settings.lam=2.0: must lie in 0"),
        ({"advantage": {"name": "reinforce", "settings": {"gamma": -1}}}, "gamma=-1.0: must lie"),
        (
            {"policy_loss": {"settings": {"dual_clip": 1}}},
            "dual_clip=1.0: must be above 1",
        ),
        ({"policy_loss": {"settings": {"clip_low": 2}}}, "settings.clip_low=2.0: must lie in 0"),
        (
            {"policy_loss": {"settings": {"clip_high": float("nan")}}},
            "clip_high=nan: must be",
        ),
        ({"policy_loss": {"name": "cispo"}}, "policy_loss.settings.clip_high: is missing; set it"),
        ({"aggregation": "constant"}, "divisor=None: must be above 0 with aggregation constant"),
        ({"divisor": 5}, "divisor=5.0: must be above 0 with aggregation constant, and left out"),
        ({"kl": {}}, "kl.coefficient: is missing; set it"),
        ({"kl": {"coefficient": -1}}, "kl.coefficient=-1.0: must be at least 0"),
        ({"kl": {"coefficient": 1, "target": 0}}, "kl.target=0.0: must be above 0"),
        ({"kl": {"coefficient": 1, "gain": 2}}, "kl.gain=2.0: must be above 0 and at most 1"),
        ({"scores": {"clip_low": 2, "clip_high": 1}}, "clip_low=2.0: must be at most clip_high=1"),
        ({"scores": {"overlong": {"buffer_tokens": 0}}}, "buffer_tokens=0: must be at least 1"),
        ({"importance_weights": {"cap": 0}}, "importance_weights.cap=0.0: must be above 0"),
        ({"importance_filter": {"low": 3, "high": 2}}, "importance_filter.low=3.0: must be at l"),
        ({"off_policy_threshold": 0}, "off_policy_threshold=0.0: must be above 0"),
        ({"entropy_coefficient": -1}, "entropy_coefficient=-1.0: must be at least 0"),
        ({"value_clip": 0}, "value_clip=0.0: must be above 0"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    found = problems(**given)
    assert len(found) == 1 and message in found[0]


def test_f16_n13_a_cut_support_and_an_importance_correction_exclude_each_other() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    kept = probabilities[:2] / probabilities[:2].sum()  # top-p .8
    engine, trainer = kept[:1].log()[None], probabilities[:1].log()[None]
    assert engine.item() == pytest.approx(-0.470004, abs=1e-6)
    assert trainer.item() == pytest.approx(-0.693147, abs=1e-6)
    ratio = ratios(trainer, engine, torch.tensor([[True]]), level="token")
    assert ratio.item() == pytest.approx(0.8)

    rule = "needs the engine's log-probs over all tokens, with top_p=0.8 and top_k=0 they are"
    generation = GenerationConfig(top_p=0.8, num_return_sequences=2)
    for given in ({"importance_weights": {}}, {"importance_filter": {"low": 0.5, "high": 2}}):
        (problem,) = generation_problems(config(**given), generation)
        assert problem.key == next(iter(given)) and problem.rule.startswith(rule)
        assert generation_problems(config(**given), GenerationConfig(num_return_sequences=2)) == []
    (problem,) = generation_problems(
        config(importance_weights={}), GenerationConfig(top_k=5, num_return_sequences=2)
    )
    assert problem.key == "importance_weights"
    assert generation_problems(config(), generation) == []


def test_one_response_a_prompt_teaches_nothing_where_responses_are_compared() -> None:
    def keys(**given: Any) -> list[str]:
        found = generation_problems(config(**given), GenerationConfig(num_return_sequences=1))
        assert all("num_return_sequences=1: nothing is learnt" in p.rule for p in found)
        return [problem.key for problem in found]

    assert keys() == keys(advantage={"name": "rloo"}) == ["advantage.name"]
    for name in ("reinforce", "reinforce++", "reinforce++_baseline", "gae", "my.own"):
        assert keys(advantage={"name": name}) == []
    scores = {"mean": "group", "drop_without_signal": True}
    right = ["scores.mean", "scores.drop_without_signal"]
    assert keys(advantage={"name": "reinforce"}, scores=scores) == right
    weights = {"scores": {"length_weight": {"alpha": 0.1}}, "difficulty_weight": {}}
    right = ["scores.length_weight", "difficulty_weight"]
    assert keys(advantage={"name": "reinforce"}, **weights) == right


def test_an_overlong_buffer_fits_into_the_longest_response() -> None:
    made = config(scores={"overlong": {"buffer_tokens": 9}})
    generation = GenerationConfig(max_new_tokens=8, num_return_sequences=2)
    (problem,) = generation_problems(made, generation)
    assert str(problem).startswith("scores.overlong.buffer_tokens=9: is more than max_new_tokens=8")


OWN_CODE = """
def my_advantage(token_level_rewards, response_mask, *, power, offset=1.0):
    return {"advantages": (token_level_rewards ** power + offset) * response_mask}
"""


def test_a_function_of_the_users_own(workdir: Path) -> None:
    (workdir / "own.py").write_text(OWN_CODE)
    args = config(advantage={"name": "own.my_advantage", "settings": {"power": 2}}).advantage
    assert (args.row, args.path, args.arguments) == (None, "own.my_advantage", {"power": 2})
    function = import_object(args.path)
    check_settings(function, args.arguments)
    columns = {"token_level_rewards": torch.tensor([[3.0]]), "response_mask": torch.ones(1, 1)}
    assert call(function, columns, args.arguments)["advantages"].item() == 10
    for settings, message in (
        ({}, "settings [] do not fit own.my_advantage(token_level_rewards, response_mask, *, pow"),
        ({"power": 1, "pwr": 2}, "got an unexpected keyword argument 'pwr'; settings are its"),
    ):
        with pytest.raises(ValueError) as caught:
            check_settings(function, settings)
        assert message in str(caught.value)


NAMED = [
    (cls, name)
    for cls in (AdvantageArgs, PolicyLossArgs, PreferenceLossArgs, DivergenceArgs)
    for name in cls.table
]


@pytest.mark.parametrize(("cls", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_setting_of_every_function_is_taken_and_no_other(cls: Any, name: str) -> None:
    fields = dataclasses.fields(cls.table[name].settings_cls)
    settings = {f.name: 0.5 if f.default is dataclasses.MISSING else f.default for f in fields}
    assert cls(name, settings).arguments == settings
    with pytest.raises(ConfigError, match=r"settings\.level_of_it: is not a key"):
        cls(name, settings | {"level_of_it": "token"})


@pytest.mark.parametrize("level", LEVELS)
def test_the_gap_to_the_engine_is_weighed_and_bounded_at_every_level(level: str) -> None:
    bounds = {"low": 0.5, "high": 2.0, "level": level}
    made = config(importance_weights={"cap": 3.0, "level": level}, importance_filter=bounds)
    assert made.importance_weights is not None and made.importance_filter is not None
    assert vars(made.importance_weights) == {"cap": 3.0, "level": level}
    assert vars(made.importance_filter) == bounds
    (message,) = problems(importance_weights={"level": level, "clip": 2.0})
    assert "importance_weights.clip: is not a key" in message


def test_names_of_one_choice_are_not_those_of_another() -> None:
    with pytest.raises(ConfigError, match="'ppo': is none of grpo"):
        AdvantageArgs("ppo")
    with pytest.raises(ConfigError, match="'gae': is none of ppo, cispo, reinforce"):
        PolicyLossArgs("gae")


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (PreferenceLossArgs, {"beta": 0}, "beta=0.0: must be above 0"),
        (PreferenceLossArgs, {"label_smoothing": 0.5}, "label_smoothing=0.5: must be at least 0 a"),
        (DivergenceArgs, {"skew": 0.1}, "settings.skew: is not a key"),
    ],
)
def test_settings_of_pairs_and_teachers(make: Any, settings: dict[str, Any], message: str) -> None:
    assert make().path.endswith((".sigmoid", ".forward_kl"))
    with pytest.raises(ConfigError) as caught:
        make(settings=settings)
    assert message in str(caught.value)
