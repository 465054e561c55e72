"""The folder of an engine of vLLM; what needs vLLM itself is in tests/vllm."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_td.strategies.vllm.process import FOLDER, remove_folder


def test_nothing_but_the_engines_own_folder_is_ever_removed(tmp_path: Path) -> None:
    own, others = tmp_path / f"{FOLDER}a", tmp_path / "others"
    own.mkdir()
    others.write_text("kept")
    for _ in range(2):  # owner and guard are both at it
        remove_folder(own)
    assert [path.name for path in tmp_path.iterdir()] == ["others"]
    with pytest.raises(AssertionError):
        remove_folder(tmp_path)
    assert others.read_text() == "kept"
