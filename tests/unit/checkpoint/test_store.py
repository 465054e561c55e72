"""Checkpoint folders: whole or not counted, kept as asked, never more removed than was made."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from roll_td.checkpoint.store import (
    MARK,
    fault_of,
    find_newest,
    find_start,
    new_checkpoint,
    retain,
    run_of,
)


def save(folder: Path, step: int, run: str = "mine", text: str = "weights") -> Path:
    with new_checkpoint(folder, step, run) as partial:
        (partial / "actor").mkdir()
        (partial / "actor" / "shard.bin").write_text(text)
    return folder / f"step_{step}"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"), new_checkpoint(tmp_path, 1, "mine") as partial:
        (partial / "half").write_text("x")
        assert names(tmp_path) == {"step_1.partial"}
        assert find_newest(tmp_path) is None
        raise OSError("No space left on device")
    assert find_newest(tmp_path) is None
    path = save(tmp_path, 1)
    assert find_newest(tmp_path) == path and names(tmp_path) == {"step_1"}
    assert not (path / "half").exists() and run_of(path) == "mine"


def test_the_mark_is_written_when_all_else_is(tmp_path: Path) -> None:
    with new_checkpoint(tmp_path, 1, "mine") as partial:
        (partial / "a").write_text("x")
        assert not (partial / MARK).exists()
    assert fault_of(tmp_path / "step_1") is None
    assert "no completion mark" in str(fault_of(tmp_path))


def test_d07_by_number_and_only_what_it_made(tmp_path: Path) -> None:  # D07
    for name in ("best", "step_x", "step_007", "my step_3"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_5").write_text("a file")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "step_2").mkdir()  # of someone else: nothing in it
    save(tmp_path, 3, run="another")
    foreign = names(tmp_path)
    for step in (9, 10, 100):
        save(tmp_path, step)
        retain(tmp_path, 2, "mine")
    assert names(tmp_path) == foreign | {"step_10", "step_100"}
    save(tmp_path, 100, text="again")
    retain(tmp_path, 2, "mine")
    assert names(tmp_path) == foreign | {"step_10", "step_100"}
    assert (tmp_path / "step_100" / "actor" / "shard.bin").read_text() == "again"
    assert find_newest(tmp_path) == tmp_path / "step_100"


def test_nothing_is_removed_without_a_limit_nor_while_busy(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3)]
    retain(tmp_path, None, "mine")
    assert names(tmp_path) == {"step_1", "step_2", "step_3"}
    retain(tmp_path, 1, "mine", busy=paths[:1])
    assert names(tmp_path) == {"step_1", "step_3"}


def test_a_torn_newer_one_counts_neither_for_resuming_nor_for_keeping(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    torn = save(tmp_path, 20)
    (torn / "actor" / "shard.bin").write_text("weig")
    save(tmp_path, 2)
    retain(tmp_path, 1, "mine")
    assert names(tmp_path) == {"step_2", "step_20"}
    assert find_newest(tmp_path) == tmp_path / "step_2"
    assert f"{torn} does not count as a checkpoint: its file actor/shard.bin has 4" in caplog.text


@pytest.mark.parametrize("harm", ["no mark", "no file", "cut mark", "half written"])
def test_each_kind_of_torn_newest_is_named_and_skipped(
    harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, torn = save(tmp_path, 9), save(tmp_path, 10)
    if harm == "no mark":
        (torn / MARK).unlink()
    elif harm == "no file":
        (torn / "actor" / "shard.bin").unlink()
    elif harm == "cut mark":
        (torn / MARK).write_text((torn / MARK).read_text()[:-9])
    else:
        (torn / MARK).unlink()
        torn = torn.rename(f"{torn}.partial")
    assert find_newest(tmp_path) == good
    assert [str(torn) in record.message for record in caplog.records] == [True]
    replaced = save(tmp_path, 10, text="new")
    assert find_newest(tmp_path) == replaced
    assert (replaced / "actor" / "shard.bin").read_text() == "new"
    moved = [path for path in tmp_path.iterdir() if ".moved-" in path.name]
    assert len(moved) == (0 if harm == "half written" else 1), "what is not ours is moved, not lost"


def test_an_end_between_mark_and_name_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / "step_2.partial")
    assert find_newest(tmp_path) == tmp_path / "step_2"
    assert names(tmp_path) == {"step_1", "step_2"}
    # while step 2 was saved again: the old one renamed, the new one not yet
    save(tmp_path, 2, text="old").rename(tmp_path / "step_2.replaced")
    shutil.copytree(tmp_path / "step_2.replaced", tmp_path / "step_2.partial")
    assert find_newest(tmp_path) == tmp_path / "step_2"
    # the new one in place, the old one not yet removed
    (tmp_path / "step_2.replaced" / "actor" / "shard.bin").write_text("gone")
    assert find_newest(tmp_path) == tmp_path / "step_2"
    retain(tmp_path, None, "mine")
    assert names(tmp_path) == {"step_1", "step_2"}


def test_where_a_run_goes_on(tmp_path: Path) -> None:
    own, other = tmp_path / "own", save(tmp_path / "other", 7, run="other")
    assert find_start(own, "auto") is None and find_start(own, "none") is None
    assert find_start(own, str(other)) == other
    with pytest.raises(ValueError, match=r"resume=.*other is no complete checkpoint: it is not na"):
        find_start(own, str(tmp_path / "other"))
    (other / "actor" / "shard.bin").unlink()
    with pytest.raises(ValueError, match=r"shard.bin is missing; give the path"):
        find_start(own, str(other))
    older, newer = save(own, 3), save(own, 12)
    assert find_start(own, "auto") == newer == find_start(own, str(newer))
    assert find_start(own, str(other)) == newer, "started again, it goes on from its own"
    with pytest.raises(ValueError, match=r"resume=none, but .*step_12"):
        find_start(own, "none")
    with pytest.raises(ValueError, match=r"step_12 of the same run is newer"):
        find_start(own, str(older))
