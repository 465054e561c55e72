"""DataConfig: what it refuses and derives; files that `roll-td check` finds missing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roll_td.config.data import (
    DataConfig,
    MixedConfig,
    answer_problems,
    check_files,
    prompt_problems,
)
from roll_td.config.schema import ConfigError, read


def test_a_path_alone_is_a_whole_config() -> None:
    config = DataConfig(train="my.jsonl")
    assert config.data_sets == [(["my.jsonl"], 1.0)]
    assert config.columns == ["messages"]


def test_paths_make_one_data_set_and_weights_several() -> None:
    assert DataConfig(["a.jsonl", "b.json"]).data_sets == [(["a.jsonl", "b.json"], 1.0)]
    given = {"train": [{"path": "a.jsonl", "weight": 3}, {"path": ["b.jsonl", "c.parquet"]}]}
    config = read(DataConfig, given).value
    assert config is not None
    assert config.data_sets == [(["a.jsonl"], 3.0), (["b.jsonl", "c.parquet"], 1.0)]


def test_columns_are_those_named() -> None:
    keep = {"ground_truth": "answer", "domain": "tag"}
    config = DataConfig("a.jsonl", prompt_key="question", response_key="answer", keep=keep)
    assert config.messages_key is None
    assert config.columns == ["question", "answer", "tag"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": "a.csv"}, "train='a.csv': must end with .jsonl, .json or .parquet; convert"),
        ({"train": ["a.jsonl", "b"]}, "train[1]='b': must end with .jsonl"),
        ({"train": []}, "train: names no file; give a path"),
        ({"train": ["a.jsonl", "a.jsonl"]}, "train[1]='a.jsonl': is the file of train[0] too"),
        ({"validation": ["v.txt"]}, "validation[0]='v.txt': must end with .jsonl"),
        ({"validation": []}, "validation: names no file"),
        ({"max_length": 1}, "max_length=1: must be at least 2"),
        ({"validation_split": 1.0}, "validation_split=1.0: must be at least 0 and below 1"),
        ({"validation_split": float("nan")}, "validation_split=nan: must be at least 0"),
        ({"validation_split": 0.1, "validation": "v.json"}, "is given beside validation; drop"),
        ({"messages_key": "m", "prompt_key": "p"}, "messages_key='m': is given beside prompt_key"),
        ({"response_key": "r"}, "response_key='r': is given without prompt_key; add it"),
        ({"template": "none"}, "template=none: leaves no way to write a chat as text; use"),
        ({"keep": {"labels": "x"}}, "keep.labels='x': is a column of every batch; keep it under"),
        ({"truncation": "middle"}, "truncation='middle': must be one of 'drop', 'left', 'right'"),
        ({"max_lenght": 3}, "max_lenght: is not a key at the top level; did you mean max_length?"),
        ({"train": ["a.jsonl", {"path": "b.jsonl"}]}, "train: has paths with a weight and paths"),
        ({"train": [{"path": []}]}, "train[0].path=[]: names no file"),
        ({"train": [{"path": "b.jsonl", "weight": 0}]}, "train[0].weight=0.0: must be a number"),
        ({"train": [{"path": "b.jsonl", "wieght": 1}]}, "did you mean weight?"),
        (
            {"train": [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 20_000}]},
            "train[0].weight=1.0: is less than 1/10000 of all weights; leave the data set out",
        ),
    ],
)
def test_what_is_wrong_is_told(given: dict[str, Any], message: str) -> None:
    problems = read(DataConfig, {"train": "a.jsonl", **given}).problems
    assert len(problems) == 1
    assert message in str(problems[0])


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig(train="a.csv", max_length=0, response_key="r")
    assert [p.key for p in caught.value.problems] == ["train", "response_key", "max_length"]


def test_what_a_pipeline_needs_beyond() -> None:
    prompts = DataConfig("a.jsonl", prompt_key="p", truncation="right")
    assert "response_key: is missing" in str(answer_problems(prompts)[0])
    assert "truncation=right: would cut off the end" in str(prompt_problems(prompts)[0])
    assert answer_problems(DataConfig("a.jsonl")) == prompt_problems(DataConfig("a.jsonl")) == []


def test_check_files_names_each_that_cannot_be_read(tmp_path: Path) -> None:
    good, empty, folder = (str(tmp_path / name) for name in ("g.jsonl", "e.jsonl", "f.jsonl"))
    Path(good).write_text('{"messages": []}\n')
    Path(empty).touch()
    Path(folder).mkdir()
    mixed: list[str | MixedConfig] = [MixedConfig(good), MixedConfig([empty, folder])]
    problems = check_files(DataConfig(mixed, validation="gone.jsonl"))
    found = [(p.key, p.rule) for p in problems]
    assert found == [
        ("train[1].path", "is an empty file"),
        ("train[1].path", "is not a file"),
        ("validation", "there is no such file"),
    ]
    assert re.search("^validation='gone.jsonl': .*; give a path from /", str(problems[2]))


def test_check_needs_no_torch() -> None:
    code = "import roll_td.config.data, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_columns_that_the_first_row_lacks(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2="}\n')
    named = {"prompt_key": "promt", "response_key": "answer", "keep": {"gold": "gold"}}
    assert [str(problem) for problem in check_files(DataConfig(str(path), **named))] == [
        f"{key}: is no column of the first row of {path}, which has prompt, answer; "
        "name one that is there"
        for key in ("prompt_key='promt'", "keep.gold='gold'")
    ]
    (problem,) = check_files(DataConfig(str(path)))
    assert problem.key == "messages_key" and problem.fix.endswith(
        "set prompt_key and response_key for texts"
    )
    assert check_files(DataConfig(str(path), on_bad_row="skip")) == []


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("a.jsonl", b"no JSON\n", "the first row is not JSON: Expecting value"),
        ("a.jsonl", b'\n{"messages": []', "the first row is not JSON: Expecting ',' delimiter"),
        ("a.jsonl", b"\xff\xfe{}\n", "the first row is not JSON: "),
        ("a.jsonl", b"\n[1, 2]\n", "the first row is a list, not an object with columns"),
        ("a.jsonl", b" \n\n", "has no row"),
        ("a.parquet", b"PAR", "can't be read as Parquet"),
        ("a.parquet", b"PAR1 and cut off", "can't be read as Parquet"),
    ],
)
def test_a_file_of_something_else(tmp_path: Path, name: str, content: bytes, rule: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (problem,) = check_files(DataConfig(str(path)))
    assert problem.key == "train" and problem.rule.startswith(rule)
    skipping = check_files(DataConfig(str(path), on_bad_row="skip"))
    assert skipping == ([] if name == "a.jsonl" else [problem])
