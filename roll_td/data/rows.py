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
from roll_td.data.read import BadRow, read_rows
from roll_td.protocol import DataProto

CHUNK_ROWS = 1024
"""Rows that are tokenised at once: enough to keep the tokenizer's threads busy."""
MOST_NAMED = 5
"""Dropped rows that a report names."""
Kept = tuple[Tokens, list[Any]]
"""A row that can be used, and its columns that are kept."""


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
    """

    tokens: NDArray[np.int32]
    """Of all rows, one after the other."""
    learn: NDArray[np.bool_] | None
    """Of each token, whether it is to be learnt from; None: prompts."""
    starts: Numbers
    """(R,) where in `tokens` a row begins."""
    lengths: Numbers
    """(R,) tokens of a row."""
    objects: dict[str, Objects]
    """(R,) each; the columns that are kept."""

    def __len__(self) -> int:
        return len(self.starts)

    def select(self, numbers: Numbers) -> Rows:
        """The rows with these numbers; the tokens are shared."""
        return replace(
            self,
            starts=self.starts[numbers],
            lengths=self.lengths[numbers],
            objects={name: column[numbers] for name, column in self.objects.items()},
        )

    def batch(self, numbers: Numbers) -> DataProto:
        """The rows with these numbers (B,), in their order."""
        lengths = self.lengths[numbers]
        columns = np.arange(lengths.max(initial=0))
        is_real = columns < lengths[:, None]
        places = np.where(is_real, self.starts[numbers, None] + columns, 0)
        ids = self.tokens[places].astype(np.int64)
        made: dict[str, Any] = {
            "input_ids": torch.from_numpy(np.where(is_real, ids, pad_value("input_ids"))),
            "lengths": torch.from_numpy(lengths),
        }
        if self.learn is not None:
            labels = np.where(is_real & self.learn[places], ids, pad_value("labels"))
            made["labels"] = torch.from_numpy(labels)
        return DataProto(made, {name: column[numbers] for name, column in self.objects.items()})

    def batches(self, size: int) -> Iterator[DataProto]:
        """All rows in their order, `size` at a time; the last batch may have fewer."""
        numbers = np.arange(len(self))
        return (self.batch(numbers[at : at + size]) for at in range(0, len(self), size))


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
        encoded = encode([row for _, row in chunk], config, tokenizer, purpose)
        for (name, row), tokens in zip(chunk, encoded, strict=True):
            if not isinstance(row, BadRow) and not isinstance(tokens, BadRow):
                yield tokens, [row[column] for column in config.keep.values()]
                continue
            assert isinstance(tokens, BadRow)
            if config.on_bad_row == "fail" and tokens.kind not in CUT_KINDS:
                raise ValueError(f"{name} {tokens}; mend the row, or set on_bad_row: skip")
            report.drop(name, tokens)


def _rows(kept: Sequence[Kept], config: DataConfig, purpose: Purpose) -> Rows:
    lengths = np.array([len(tokens.ids) for tokens, _ in kept], np.int64)
    columns = zip(*(values for _, values in kept), strict=True)
    return Rows(
        tokens=np.concatenate([tokens.ids for tokens, _ in kept]),
        learn=np.concatenate([t.learn for t, _ in kept]) if purpose == "answers" else None,
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        objects={
            name: object_column(name, list(column))
            for name, column in zip(config.keep, columns, strict=True)
        },
    )
