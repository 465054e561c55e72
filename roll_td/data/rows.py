"""Tokenised rows, all in one piece of memory, from which batches are gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from roll_td.columns import Objects, object_column, pad_value
from roll_td.config.data import DataConfig
from roll_td.data.encode import CUT_KINDS, Purpose, Tokens, encode
from roll_td.data.order import Numbers
from roll_td.data.pairs import encode_pairs
from roll_td.data.read import BadRow, read_rows
from roll_td.protocol import DataProto

CHUNK_ROWS = 1024
"""Rows that are tokenised at once: enough to keep the tokenizer's threads busy."""
MOST_NAMED = 5
"""Dropped rows that a report names."""
Kept = tuple[tuple[Tokens, ...], list[Any]]
"""A row that can be used, or both sides of a pair, and its columns that are kept."""


@dataclass
class Report:
    """What became of the rows of some files."""

    kept: int = 0
    """Rows that can be used."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Why → rows that were dropped for it."""
    named: list[str] = field(default_factory=list)
    """The first that were dropped: where they stand and why."""

    def drop(self, name: str, bad: BadRow) -> None:
        """Count a row that was dropped."""
        self.dropped[bad.kind] += 1
        if len(self.named) < MOST_NAMED:
            self.named.append(f"{name} {bad}")

    def __str__(self) -> str:
        total = self.kept + self.dropped.total()
        counts = ", ".join(f"{count} {kind}" for kind, count in self.dropped.items())
        first = f"kept {self.kept} of {total} rows{'; dropped: ' if counts else ''}{counts}"
        rest = self.dropped.total() - len(self.named)
        return "\n  ".join([first, *self.named, *([f"and {rest} more"] if rest else [])])


@dataclass(frozen=True)
class Rows:
    """R rows of tokens. A batch has, for its B rows and its longest row's T:

    input_ids int64 (B, T), right-padded with 0; lengths int64 (B); labels int64 (B, T), the tokens
    of answers to learn from and -100 elsewhere, unless the rows are prompts; object columns (B).

    Pairs are rows of two sides, which stay together: what counts, selects and numbers rows goes by
    pairs, and the batch of P pairs has 2 P rows, each pair's chosen one before its rejected one,
    with is_chosen bool (2 P).
    """

    tokens: NDArray[np.int32]
    """Of all rows, one after the other."""
    learn: NDArray[np.bool_] | None
    """Of each token, whether it is to be learnt from; None: prompts."""
    starts: Numbers
    """(R · sides,) where in `tokens` a side of a row begins."""
    lengths: Numbers
    """(R · sides,) tokens of a side."""
    objects: dict[str, Objects]
    """(R,) each; the columns that are kept."""
    sides: int = 1
    """2: pairs."""

    def __len__(self) -> int:
        return len(self.starts) // self.sides

    def select(self, numbers: Numbers) -> Rows:
        """The rows with these numbers; the tokens are shared."""
        return replace(
            self,
            starts=self.starts[self._sides_of(numbers)],
            lengths=self.lengths[self._sides_of(numbers)],
            objects={name: column[numbers] for name, column in self.objects.items()},
        )

    def batch(self, numbers: Numbers) -> DataProto:
        """The rows with these numbers (B,), in their order."""
        places_of = self._sides_of(numbers)
        lengths = self.lengths[places_of]
        columns = np.arange(lengths.max(initial=0))
        is_real = columns < lengths[:, None]
        places = np.where(is_real, self.starts[places_of, None] + columns, 0)
        ids = self.tokens[places].astype(np.int64)
        made: dict[str, Any] = {
            "input_ids": torch.from_numpy(np.where(is_real, ids, pad_value("input_ids"))),
            "lengths": torch.from_numpy(lengths),
        }
        if self.learn is not None:
            labels = np.where(is_real & self.learn[places], ids, pad_value("labels"))
            made["labels"] = torch.from_numpy(labels)
        if self.sides == 2:
            made["is_chosen"] = torch.tensor([True, False]).repeat(len(numbers))
        repeated = np.repeat(numbers, self.sides)
        return DataProto(made, {name: column[repeated] for name, column in self.objects.items()})

    def batches(self, size: int) -> Iterator[DataProto]:
        """All rows in their order, `size` at a time; the last batch may have fewer."""
        numbers = np.arange(len(self))
        return (self.batch(numbers[at : at + size]) for at in range(0, len(self), size))

    def _sides_of(self, numbers: Numbers) -> Numbers:
        """Where the sides of these rows stand in starts and lengths, one after the other."""
        return (numbers[:, None] * self.sides + np.arange(self.sides)).reshape(-1)


def tokenise(
    data_sets: Sequence[Sequence[str]], config: DataConfig, tokenizer: Any, purpose: Purpose
) -> tuple[Rows, list[int], Report]:
    """The rows of all files, how many each data set has, and what was dropped.

    Raises ValueError for a bad row, with its name, unless on_bad_row is skip; for a data set of
    which no row is left; and as read_rows and encode do.
    """
    report = Report()
    kept: list[Kept] = []
    sizes = []
    for paths in data_sets:
        before = len(kept)
        for path in paths:
            kept.extend(_usable(path, config, tokenizer, purpose, report))
        sizes.append(len(kept) - before)
        report.kept = len(kept)
        if not sizes[-1]:
            raise ValueError(f"{', '.join(paths)}: no row can be used; {report}")
    return _rows(kept, config, purpose), sizes, report


def _usable(
    path: str, config: DataConfig, tokenizer: Any, purpose: Purpose, report: Report
) -> Iterator[Kept]:
    named = read_rows(path, config.columns)
    while chunk := list(islice(named, CHUNK_ROWS)):
        rows = [row for _, row in chunk]
        encoded: Sequence[tuple[Tokens, ...] | BadRow] = (
            encode_pairs(rows, config, tokenizer)
            if purpose == "pairs"
            else [
                tokens if isinstance(tokens, BadRow) else (tokens,)
                for tokens in encode(rows, config, tokenizer, purpose)
            ]
        )
        for (name, row), tokens in zip(chunk, encoded, strict=True):
            if not isinstance(row, BadRow) and not isinstance(tokens, BadRow):
                yield tokens, [row[column] for column in config.keep.values()]
                continue
            assert isinstance(tokens, BadRow)
            if config.on_bad_row == "fail" and tokens.kind not in CUT_KINDS:
                raise ValueError(f"{name} {tokens}; mend the row, or set on_bad_row: skip")
            report.drop(name, tokens)


def _rows(kept: Sequence[Kept], config: DataConfig, purpose: Purpose) -> Rows:
    sides = [tokens for row, _ in kept for tokens in row]
    lengths = np.array([len(tokens.ids) for tokens in sides], np.int64)
    columns = zip(*(values for _, values in kept), strict=True)
    return Rows(
        tokens=np.concatenate([tokens.ids for tokens in sides]),
        learn=None if purpose == "prompts" else np.concatenate([side.learn for side in sides]),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        objects={
            name: object_column(name, list(column))
            for name, column in zip(config.keep, columns, strict=True)
        },
        sides=2 if purpose == "pairs" else 1,
    )
