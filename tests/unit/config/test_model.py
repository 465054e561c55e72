"""Models and tokenizers that can't be loaded are told without loading them."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_td.config.model import ModelConfig


def told(**given: str) -> list[tuple[str, str]]:
    return [(problem.key, problem.rule) for problem in ModelConfig(**given).file_problems()]


def test_folders_that_hold_none(tmp_path: Path) -> None:
    folder = str(tmp_path)
    no_model = ("path", "has no config.json that can be read")
    no_tokenizer = ("tokenizer", "has no file of a tokenizer")
    assert told(path=folder, tokenizer=folder) == [no_model, no_tokenizer]
    (tmp_path / "config.json").write_text("{")
    ((key, rule),) = told(path=folder)
    assert key == "path" and rule.startswith("has a config.json that is not JSON: ")
    (tmp_path / "config.json").write_text("[]")
    assert told(path=folder) == [("path", "has a config.json without fields")]
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert told(path=folder, tokenizer=folder) == [no_tokenizer]


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "spiece.model", "qwen.tiktoken"])
def test_any_file_of_a_tokenizer_is_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert told(path="org/name", tokenizer=str(tmp_path)) == []


def test_what_is_not_there(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    assert told(path=gone, tokenizer="~/gone") == [
        ("path", "is not there"),
        ("tokenizer", "is not there"),
    ]
    assert told(path="org/name", chat_template=gone) == [
        ("chat_template", "is no file, and no Jinja template")
    ]
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert told(path="org/name", chat_template=str(tmp_path / "chat.jinja")) == []
    assert told(path="org/name", chat_template="{{ messages }}") == []
