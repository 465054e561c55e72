"""Files that are known to be whole: written through to the disk, with a checksum inside."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any) -> None:
    """Write plain data with its checksum, and through to the disk.

    TypeError for what JSON does not have; OSError if the disk does not take it.
    """
    plain = json.loads(json.dumps(content))
    with path.open("w", encoding="utf-8") as file:
        json.dump({"sha256": _digest(plain), "content": plain}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """What write_json has written; ValueError, naming the file, if it is no longer that."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if _digest(record["content"]) != record["sha256"]:
            raise ValueError("its checksum is another")
    except (ValueError, KeyError, TypeError) as error:  # a UnicodeDecodeError is a ValueError
        raise ValueError(
            f"{path} is damaged: {error}; move its checkpoint away to go on from the one before"
        ) from error
    return record["content"]


def sync_tree(folder: Path) -> None:
    """Have the disk take every file and folder under `folder`, and itself."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Have the disk take one file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
