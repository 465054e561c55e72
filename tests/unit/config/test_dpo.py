"""DPOConfig: what it derives and refuses; the shipped configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_td.config.dpo import DPOConfig
from roll_td.config.load import load
from roll_td.config.schema import ConfigError, read

ROOT = Path(__file__).parents[3]
PAIRS = {"train": "my.jsonl", "prompt_key": "q", "chosen_key": "good", "rejected_key": "bad"}


def config(**given: Any) -> DPOConfig:
    reading = read(DPOConfig, {"model": {"path": "my-model"}, "data": PAIRS} | given)
    if reading.value is None:
        raise ConfigError(reading.problems)
    return reading.value


def test_a_model_and_pairs_are_enough() -> None:
    made = config(actor_train={"device_mapping": "0-1"})
    assert made.reference is not None and made.reference.device_mapping == [0, 1]
    args = made.actor_train.strategy_args, made.reference.strategy_args
    assert [a.strategy_name for a in args if a] == ["fsdp2_train", "fsdp2_infer"]
    assert made.loss.arguments == {"beta": 0.1, "label_smoothing": 0.0} and made.over == "sum"
    assert config(max_steps=7).optimizer_steps("actor_train") == 7
    low = config(actor_train={"training": {"compute_dtype": "bfloat16"}})
    assert low.reference is not None and low.reference.training.compute_dtype == "bfloat16"


def test_with_adapters_or_free_there_is_no_reference_role() -> None:
    lora = {"path": "my-model", "lora": {"rank": 4}}
    assert config(model=lora).reference is None and config(model=lora).has_adapters
    own = config(model=lora, reference={"model": {"path": "another"}})
    assert own.reference is not None and not own.has_adapters
    free = config(reference_free=True)
    assert free.reference is None and not free.has_adapters
    assert not config(model=lora, reference_free=True).has_adapters


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": {"train": "a.jsonl", "prompt_key": "q"}}, "data.chosen_key: is missing"),
        ({"loss": {"name": "sigmod"}}, "did you mean sigmoid?"),
        ({"loss": {"settings": {"beta": 0}}}, "loss.settings.beta=0.0: must be above 0"),
        ({"loss": {"name": "ipo", "settings": {"label_smoothing": 0.1}}}, "label_smoothing"),
        ({"over": "max"}, "over='max'"),
        ({"batch_size": 0}, "batch_size=0: must be a whole number of at least 1"),
        ({"epochs": 1, "max_steps": 2}, "epochs=1.0: is given beside max_steps"),
        (
            {"reference_free": True, "reference": {}},
            "reference={…}: is given beside reference_free; drop one of the two",
        ),
        (
            {"reference_free": True, "reference_cache": "x"},
            "reference_cache='x': has nothing to keep with reference_free",
        ),
        (
            {"actor_train": {"strategy_args": {"strategy_name": "hf_infer"}}},
            "actor_train.strategy_args.strategy_name='hf_infer': is a strategy that can't train",
        ),
    ],
)
def test_what_is_refused(given, message) -> None:
    with pytest.raises(ConfigError) as raised:
        config(**given)
    assert message in str(raised.value)


def test_the_shipped_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    tiny = load(ROOT / "configs" / "dpo" / "tiny.yaml", [])
    assert isinstance(tiny, DPOConfig) and tiny.outside_problems() == []
    made = load(ROOT / "configs" / "dpo" / "dpo.yaml", ["model.path=m", "data.train=my.jsonl"])
    assert isinstance(made, DPOConfig)
