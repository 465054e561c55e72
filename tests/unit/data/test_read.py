"""Rows of files and their names; rows that can't be used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from roll_td.config.data import FORMATS
from roll_td.data.read import READERS, BadRow, read_rows

ROWS = [{"q": "1+1", "a": "2", "n": 1}, {"q": "ü", "a": None, "n": 2}]


def test_each_format_has_a_reader() -> None:
    assert tuple(READERS) == FORMATS


def test_jsonl_rows_are_named_by_line(write: Callable[..., str]) -> None:
    path = write("my.jsonl", [ROWS[0], "", "  ", ROWS[1]])
    assert list(read_rows(path, ["q"])) == [(f"{path}:1", ROWS[0]), (f"{path}:4", ROWS[1])]


def test_a_json_list(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps(ROWS))
    found = list(read_rows(str(path), ["q", "a"]))
    assert found == [(f"{path}, row 1", ROWS[0]), (f"{path}, row 2", ROWS[1])]


def test_parquet_gives_the_columns_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "my.parquet"
    chat = [{"role": "user", "content": "hi"}]
    parquet.write_table(pa.table({"m": [chat] * 3000, "n": range(3000), "x": ["x"] * 3000}), path)
    found = list(read_rows(str(path), ["n", "m"]))
    assert found[2999] == (f"{path}, row 3000", {"m": chat, "n": 2999})
    assert [row["n"] for _, row in found if not isinstance(row, BadRow)] == list(range(3000))


@pytest.mark.parametrize(
    ("line", "kind", "why"),
    [
        (b'{"q": "1', "not JSON", "is not JSON: Unterminated string"),
        (b'{"q": "\xff"}', "not JSON", "is not JSON: 'utf-8' codec can't decode"),
        (b"[1]", "wrong type", "is a list, not an object with columns"),
        (b'{"Q": 1, "n": 2}', "no column", "has no column 'q'; it has ['Q', 'n']"),
    ],
)
def test_a_bad_row_comes_in_its_place(tmp_path: Path, line: bytes, kind: str, why: str) -> None:
    path = tmp_path / "my.jsonl"
    path.write_bytes(b'{"q": 1}\n' + line + b'\n{"q": 3}')
    first, (name, bad), last = read_rows(str(path), ["q"])
    assert (first[1], last[1]) == ({"q": 1}, {"q": 3})
    assert name == f"{path}:2"
    assert isinstance(bad, BadRow)
    assert (bad.kind, str(bad)[: len(why)]) == (kind, why)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"q": 1}\n{"q": 2}', "a.json is not JSON: Extra data.* name it .jsonl"),
        ("a.json", b'{"q": 1}', "a.json holds a dict: want a list of objects"),
        ("a.parquet", b'{"q": 1}', "a.parquet can't be read as Parquet: "),
    ],
)
def test_a_file_that_is_not_what_its_ending_says(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_rows(str(path), ["q"]))


def test_a_table_without_the_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"m": [1], "n": [2]}), path)
    with pytest.raises(ValueError, match=r"a.parquet has no column 'q'; it has \['m', 'n'\]"):
        list(read_rows(str(path), ["q"]))


def test_parquet_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'roll-td\[parquet\]'"):
        list(read_rows("a.parquet", []))


def test_values_stay_as_they_are(write: Callable[..., str]) -> None:
    value: Any = {"q": [{"role": "user"}], "n": 1e300, "none": None}
    ((_, row),) = read_rows(write("a.jsonl", [value]), ["none"])
    assert row == value
