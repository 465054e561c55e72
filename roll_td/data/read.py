"""Rows of JSONL, JSON and Parquet files, each with a name that says where it stands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""Column → value."""


class BadRow(ValueError):
    """A row that can't be used; its text says why."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind
        """What it is counted under."""


def read_rows(path: str, columns: Sequence[str]) -> Iterator[tuple[str, Row | BadRow]]:
    """(name, row) in the order of the file; the name is `my.jsonl:17` or `my.parquet, row 17`.

    Rows have at least `columns`; one that has not, or is no object, comes as a BadRow. Lines and
    rows count from 1; blank lines are no rows. ValueError for a file that can't be read as what
    its ending says, OSError for one that can't be opened.
    """
    for name, value in READERS[Path(path).suffix](path, columns):
        yield name, value if isinstance(value, BadRow) else _checked(value, columns)


def _checked(value: Any, columns: Sequence[str]) -> Row | BadRow:
    if not isinstance(value, dict):
        return BadRow("wrong type", f"is a {type(value).__name__}, not an object with columns")
    missing = [column for column in columns if column not in value]
    if missing:
        return BadRow("no column", f"has no column {missing[0]!r}; it has {list(value)}")
    return value


def _read_jsonl(path: str, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            value: Any
            try:
                value = json.loads(line.rstrip(b"\r\n"))
            except ValueError as error:  # not JSON, or not UTF-8
                value = BadRow("not JSON", f"is not JSON: {error}")
            yield f"{path}:{number}", value


def _read_json(path: str, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    try:
        values = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON: {error}; mend it, or name it .jsonl if it has an object a line"
        ) from None
    if not isinstance(values, list):
        raise ValueError(f"{path} holds a {type(values).__name__}: want a list of objects")
    yield from _numbered(path, values)


def _read_parquet(path: str, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException  # type: ignore[import-untyped]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ValueError(f"{path}: reading Parquet needs pip install 'roll-td[parquet]'") from None
    try:
        with ParquetFile(path) as file:
            there = file.schema_arrow.names
            missing = [column for column in columns if column not in there]
            if missing:
                raise ValueError(f"{path} has no column {missing[0]!r}; it has {there}")
            batches = file.iter_batches(batch_size=1024, columns=list(columns))
            yield from _numbered(path, (row for batch in batches for row in batch.to_pylist()))
    except ArrowException as error:
        raise ValueError(f"{path} can't be read as Parquet: {error}") from None


def _numbered(path: str, values: Any) -> Iterator[tuple[str, Any]]:
    return ((f"{path}, row {number}", value) for number, value in enumerate(values, 1))


READERS: dict[str, Callable[[str, Sequence[str]], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
