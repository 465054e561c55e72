"""Settings of the data a pipeline learns from. No torch here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from roll_td.config.schema import ConfigError, Problem

FORMATS = (".jsonl", ".json", ".parquet")
"""How the name of a file ends: an object a line, a list of objects, a table."""
PERIOD = 10_000
"""Data sets are mixed in units of 1/PERIOD."""
_MADE_HERE = ("input_ids", "lengths", "labels", "group_id", "is_chosen")


@dataclass
class MixedConfig:
    """One of several data sets that are mixed."""

    path: str | list[str]
    """Its file, or several that make one data set."""
    weight: float = 1.0
    """Its share of the rows of a batch, relative to the weights of the others."""


@dataclass
class DataConfig:
    """Files, what their columns mean, and how a row becomes tokens.

    A batch may hold the end of one epoch and the start of the next, so all batches are full.
    """

    train: str | list[str | MixedConfig]
    """One file; several that make one data set; or data sets with weights, each with epochs of its
    own. JSONL, a JSON list or Parquet, by the ending of the name."""
    validation: str | list[str] | None = None
    """Files with rows to validate on."""
    validation_split: float = 0.0
    """Instead: this share of each data set's rows, which are not trained on. Which rows follows
    from the job's seed."""
    messages_key: str | None = None
    """Column with a chat: a list of {role, content}, or its JSON text. None: messages, unless
    prompt_key is given."""
    prompt_key: str | None = None
    """Column with the text of a prompt."""
    response_key: str | None = None
    """Column with the text of the answer to it."""
    chosen_key: str | None = None
    """Column with the better of two answers to a prompt: a text; the turns that follow those of
    messages_key; or, without prompt_key and messages_key, a chat as a whole, of which the last turn
    is the answer."""
    rejected_key: str | None = None
    """Column with the other one, in the same form."""
    keep: dict[str, str] = field(default_factory=dict)
    """Columns that stay with their rows, name in the batch: name in the file; for example
    ground_truth: answer."""
    template: Literal["chat", "none"] = "chat"
    """chat: the tokenizer's chat template. none: prompt, response and the end token as they are,
    after the start token if the tokenizer adds one."""
    max_length: int = 2048
    """Most tokens of a row."""
    truncation: Literal["drop", "left", "right"] = "drop"
    """Of a longer row: drop it, or cut that side off. A cut adds no start or end token. Rows that
    are dropped, or have nothing left to learn from, are counted."""
    train_on: Literal["all", "last"] = "all"
    """Answers of a chat that are learnt from: all of the assistant's, or its last."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """What a row does that can't be read or has no answer. skip: the first are named, all are
    counted."""
    shuffle: bool = True
    """Each epoch in an order of its own, which follows from the job's seed; else the files'."""

    def __post_init__(self) -> None:
        problems = [*_source_problems(self), *_column_problems(self)]
        if self.max_length < 2:
            rule = "must be at least 2: the first token has nothing before it to be told from"
            problems.append(Problem("max_length", repr(self.max_length), rule, ""))
        if not 0 <= self.validation_split < 1:
            rule, fix = "must be at least 0 and below 1", "it is a share, 0.01 for example"
            problems.append(Problem("validation_split", repr(self.validation_split), rule, fix))
        if self.validation_split and self.validation is not None:
            rule, fix = "is given beside validation", "drop one of the two"
            problems.append(Problem("validation_split", repr(self.validation_split), rule, fix))
        if problems:
            raise ConfigError(problems)
        if self.prompt_key is None and self.messages_key is None and self.chosen_key is None:
            self.messages_key = "messages"

    @property
    def data_sets(self) -> list[tuple[list[str], float]]:
        """The files and the weight of each data set of `train`."""
        items = [self.train] if isinstance(self.train, str) else self.train
        mixed = [item for item in items if isinstance(item, MixedConfig)]
        if mixed:
            return [(_listed(item.path), item.weight) for item in mixed]
        return [([path for path in items if isinstance(path, str)], 1.0)]

    @property
    def columns(self) -> list[str]:
        """The columns of a file that are read."""
        named = [self.messages_key, self.prompt_key, self.response_key]
        named += [self.chosen_key, self.rejected_key, *self.keep.values()]
        return list(dict.fromkeys(name for name in named if name is not None))


def check_files(config: DataConfig) -> list[Problem]:
    """Files of the config that can't be read: missing, a folder, without rights, empty, or no
    Parquet; and a first row of a JSONL file that can't be, or does not have the columns."""
    problems = []
    for key, name in _paths(config):
        path = Path(name)
        rule = ""
        if not path.exists():
            rule = "there is no such file"
        elif not path.is_file():
            rule = "is not a file"
        elif not os.access(path, os.R_OK):
            rule = "may not be read"
        elif path.stat().st_size == 0:
            rule = "is an empty file"
        elif path.suffix == ".parquet" and not _is_parquet(path):
            rule = "can't be read as Parquet"
        if rule:
            fix = f"give a path from {Path.cwd()}, or a whole one"
            problems.append(Problem(key, repr(name), rule, fix))
        elif path.suffix == ".jsonl" and config.on_bad_row == "fail":
            problems += _first_row_problems(config, key, path)
    return list(dict.fromkeys(problems))


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        begins = file.read(4)
        file.seek(max(path.stat().st_size - 4, 0))
        return begins == file.read(4) == b"PAR1"


def _first_row_problems(config: DataConfig, key: str, path: Path) -> list[Problem]:
    with path.open("rb") as file:
        line = next((line for line in file if not line.isspace()), None)
    if line is None:
        return [Problem(key, repr(str(path)), "has no row", "give another file")]
    try:
        row = json.loads(line)
    except ValueError as error:  # not JSON, or not UTF-8
        rule, fix = f"the first row is not JSON: {error}", "mend it, or set on_bad_row: skip"
        return [Problem(key, repr(str(path)), rule, fix)]
    if not isinstance(row, dict):
        rule = f"the first row is a {type(row).__name__}, not an object with columns"
        return [Problem(key, repr(str(path)), rule, "mend it, or set on_bad_row: skip")]
    keys = ("messages_key", "prompt_key", "response_key", "chosen_key", "rejected_key")
    named = {key: getattr(config, key) for key in keys} | {
        f"keep.{name}": column for name, column in config.keep.items()
    }
    rule = f"is no column of the first row of {path}, which has {', '.join(row)}"
    fixes = {
        "messages_key": "name the one with chats, or set prompt_key and response_key for texts"
    }
    return [
        Problem(key, repr(column), rule, fixes.get(key, "name one that is there"))
        for key, column in named.items()
        if column is not None and column not in row
    ]


def answer_problems(config: DataConfig) -> list[Problem]:
    """What keeps a pipeline that learns from answers in the data from running on it."""
    if config.prompt_key is None or config.response_key is not None:
        return []
    rule, fix = "is missing: there is nothing to learn from", "name the column with the answers"
    return [Problem("response_key", "", rule, fix)]


def pair_problems(config: DataConfig) -> list[Problem]:
    """What keeps a pipeline that learns from pairs of answers from running on the data."""
    problems = []
    if config.chosen_key is None:
        rule, fix = "is missing: there is nothing to learn from", "name the column with the answers"
        problems.append(Problem("chosen_key", "", rule, fix))
    if config.response_key is not None:
        rule = "is an answer that is neither chosen nor rejected"
        problems.append(Problem("response_key", repr(config.response_key), rule, "leave it out"))
    if config.truncation == "left":
        rule = "would take from the two prompts of a pair parts that differ"
        problems.append(Problem("truncation", "left", rule, "use drop or right"))
    return problems


def prompt_problems(config: DataConfig) -> list[Problem]:
    """What keeps a pipeline that generates answers from running on the data."""
    if config.truncation != "right":
        return []
    rule = "would cut off the end of a prompt, where the answer is to begin"
    return [Problem("truncation", "right", rule, "use drop or left")]


def _listed(paths: str | list[str]) -> list[str]:
    return [paths] if isinstance(paths, str) else list(paths)


def _paths(config: DataConfig) -> Iterator[tuple[str, str]]:
    """(key, path) of every file, once for each time it is named."""
    for key, value in (("train", config.train), ("validation", config.validation)):
        if isinstance(value, str):
            yield key, value
        for i, item in enumerate(value if isinstance(value, list) else []):
            if isinstance(item, str):
                yield f"{key}[{i}]", item
            else:
                yield from ((f"{key}[{i}].path", path) for path in _listed(item.path))


def _source_problems(config: DataConfig) -> list[Problem]:
    named: dict[tuple[str, str], str] = {}
    problems = []
    for key, path in _paths(config):
        if Path(path).suffix not in FORMATS:
            rule = f"must end with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
            problems.append(Problem(key, repr(path), rule, "convert or rename the file"))
        first = named.setdefault((key.partition("[")[0], path), key)
        if first != key:
            rule, fix = f"is the file of {first} too", "name it once; weights say how often"
            problems.append(Problem(key, repr(path), rule, fix))
    empty = [key for key in ("train", "validation") if getattr(config, key) in ([], "")]
    problems += [Problem(key, "", "names no file", "give a path") for key in empty]
    return problems + (_mix_problems(config.train) if isinstance(config.train, list) else [])


def _mix_problems(train: list[str | MixedConfig]) -> list[Problem]:
    weights = {i: item.weight for i, item in enumerate(train) if isinstance(item, MixedConfig)}
    if weights and len(weights) < len(train):
        rule = "has paths with a weight and paths without"
        return [Problem("train", "", rule, "write each as {path: …, weight: …}, or none")]
    problems = [
        Problem(f"train[{i}].path", "[]", "names no file", "give a path")
        for i, item in enumerate(train)
        if isinstance(item, MixedConfig) and item.path == []
    ]
    total = sum(weights.values())
    for i, weight in weights.items():
        rule = ""
        if not (math.isfinite(weight) and weight > 0):
            rule = "must be a number above 0"
        elif weight * PERIOD < total:
            rule = f"is less than 1/{PERIOD} of all weights"
        if rule:
            fix = "leave the data set out, or give it a greater weight"
            problems.append(Problem(f"train[{i}].weight", repr(weight), rule, fix))
    return problems


def _column_problems(config: DataConfig) -> list[Problem]:
    messages, prompt, response = config.messages_key, config.prompt_key, config.response_key
    problems = []
    if messages is not None and prompt is not None:
        rule, fix = "is given beside prompt_key", "drop one of them: a row has a chat or a prompt"
        problems.append(Problem("messages_key", repr(messages), rule, fix))
    if (config.chosen_key is None) != (config.rejected_key is None):
        key = "chosen_key" if config.chosen_key is None else "rejected_key"
        problems.append(Problem(key, "", "is missing: a pair has two answers", "name its column"))
    if response is not None and prompt is None:
        rule, fix = "is given without prompt_key", "add it, or use messages_key alone"
        problems.append(Problem("response_key", repr(response), rule, fix))
    if config.template == "none" and prompt is None:
        rule = "leaves no way to write a chat as text"
        fix = "use template: chat, or prompt_key and response_key"
        problems.append(Problem("template", "none", rule, fix))
    for name in [name for name in config.keep if name in _MADE_HERE]:
        rule, fix = "is a column of every batch", "keep it under another name"
        problems.append(Problem(f"keep.{name}", repr(config.keep[name]), rule, fix))
    return problems
