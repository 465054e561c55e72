"""Copies of checkpoints: complete, or reported, tried again, and never in the way."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from roll_td.checkpoint import upload
from roll_td.checkpoint.run import RunCheckpoints
from roll_td.checkpoint.store import MARK, fault_of
from roll_td.checkpoint.upload import Uploader
from roll_td.config.checkpoint import CheckpointConfig


def save(checkpoints: RunCheckpoints, step: int) -> None:
    with checkpoints.saving(step) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "shard.bin").write_text(f"weights {step}")


@pytest.mark.parametrize("as_url", [False, True])
def test_each_checkpoint_is_copied_whole(as_url: bool, tmp_path: Path) -> None:
    target = tmp_path / "copies" / "run"
    url = f"file://{target}" if as_url else str(target)
    checkpoints = RunCheckpoints(tmp_path / "own", CheckpointConfig(upload_to=url))
    for step in (1, 2):
        save(checkpoints, step)
    checkpoints.close()
    for step in (1, 2):
        assert fault_of(target / f"step_{step}") is None
        copied = (target / f"step_{step}" / "actor" / "shard.bin").read_text()
        assert copied == f"weights {step}"


def test_another_kind_of_url(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path, CheckpointConfig(upload_to="memory://bucket/run/"))
    save(checkpoints, 1)
    checkpoints.close()
    target = fsspec.filesystem("memory")
    copied = {path: target.cat(path) for path in target.find("/bucket/run")}
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert copied == {f"/bucket/run/{p.relative_to(tmp_path)}": data for p, data in whole.items()}


class Flaky:
    """A file system that fails as often as asked, and notes what it is given."""

    def __init__(self, failures: int) -> None:
        self.failures, self.put, self.gate = failures, [], threading.Event()
        self.gate.set()

    def makedirs(self, path: str, exist_ok: bool) -> None:
        pass

    def put_file(self, local: str, remote: str) -> None:
        self.gate.wait(10)
        if self.failures:
            self.failures -= 1
            raise OSError("bucket https://user:S3CRET@host/ is closed")
        self.put.append(remote)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Flaky:
    system = Flaky(0)

    def url_to_fs(url: str) -> tuple[Any, str]:
        return system, url.partition("://")[2]

    monkeypatch.setattr(upload.fsspec.core, "url_to_fs", url_to_fs)
    return system


def test_a_failed_copy_is_reported_and_tried_again_after_the_next(
    flaky: Flaky, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flaky.failures = 1
    checkpoints = RunCheckpoints(tmp_path / "own", CheckpointConfig(upload_to="file://u/run"))
    save(checkpoints, 1)
    while "failed" not in caplog.text:
        time.sleep(0.01)
    save(checkpoints, 2)
    checkpoints.close()
    assert "step_1 to file://u/run failed: OSError: bucket https://***@host/" in caplog.text
    assert "S3CRET" not in caplog.text and "not copied" not in caplog.text
    marks = [path for path in flaky.put if path.endswith(MARK)]
    assert marks == [f"u/run/step_1/{MARK}", f"u/run/step_2/{MARK}"]
    assert len(flaky.put) == 4 and flaky.put[1] == marks[0], "the mark comes last"
    assert fault_of(tmp_path / "own" / "step_1") is None, "a failed copy costs nothing here"


def test_the_last_one_is_tried_once_more_at_the_end(
    flaky: Flaky, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flaky.failures = 2
    checkpoints = RunCheckpoints(tmp_path / "own", CheckpointConfig(upload_to="file://u/run"))
    save(checkpoints, 1)
    checkpoints.close()
    assert f"not copied to file://u/run: {tmp_path}/own/step_1; copy them by hand" in caplog.text
    checkpoints.close()
    assert f"u/run/step_1/{MARK}" in flaky.put


def test_what_is_being_copied_stays_until_it_is(flaky: Flaky, tmp_path: Path) -> None:
    config = CheckpointConfig(upload_to="file://u/run", keep_checkpoints=1)
    checkpoints = RunCheckpoints(tmp_path / "own", config)
    flaky.gate.clear()
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert {p.name for p in (tmp_path / "own").iterdir()} == {"step_1", "step_2", "step_3"}
    flaky.gate.set()
    checkpoints.close()
    save(checkpoints, 4)
    left = {p.name for p in (tmp_path / "own").iterdir()}
    assert left == {"step_4"}
    checkpoints.close()


def test_a_copy_that_hangs_holds_the_end_up_no_longer_than_set(
    flaky: Flaky, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CheckpointConfig(upload_to="file://u/run", upload_timeout_s=0.05)
    checkpoints = RunCheckpoints(tmp_path / "own", config)
    flaky.gate.clear()
    save(checkpoints, 1)
    checkpoints.close()
    assert "not copied to file://u/run" in caplog.text
    flaky.gate.set()


def test_a_url_that_nothing_can_write_to_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="upload_to=nope://x: Protocol not known: nope"):
        Uploader("nope://x")
    monkeypatch.setattr(upload, "fsspec", None)
    with pytest.raises(ValueError, match=r"pip install 'roll-td\[upload\]'"):
        Uploader("file://x")
