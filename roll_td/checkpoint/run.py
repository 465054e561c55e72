"""The checkpoints of one run: where it goes on, when it saves, what stays, what is copied."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roll_td.checkpoint.files import read_json
from roll_td.checkpoint.store import find_start, new_checkpoint, retain, run_of, step_of
from roll_td.checkpoint.upload import Uploader
from roll_td.config.checkpoint import CheckpointConfig

logger = logging.getLogger(__name__)

STATE = "pipeline.json"
"""The driver's part of a checkpoint."""


class RunCheckpoints:
    """Used by the driver alone. ValueError where `config.resume` can't be done, or the state of
    the checkpoint that it means is damaged."""

    def __init__(self, folder: Path, config: CheckpointConfig):
        self._folder, self._config = folder, config
        self._uploader = Uploader(config.upload_to) if config.upload_to is not None else None
        self.start: Path | None = find_start(folder, config.resume)
        """The checkpoint that the run goes on from."""
        self.state: dict[str, Any] = {} if self.start is None else read_json(self.start / STATE)
        """What its pipeline.json says."""
        self.step = 0 if self.start is None else int(step_of(self.start) or 0)
        """Steps that it has done."""
        self.is_own = self.start is not None and self.start.parent.resolve() == folder.resolve()
        """Whether this run made it; it may be another one's."""
        self._finishing: threading.Thread | None = None
        self._run = run_of(self.start) if self.start and self.is_own else uuid.uuid4().hex

    def is_due(self, step: int) -> bool:
        """Whether `save_steps` asks for a checkpoint after so many steps."""
        every = self._config.save_steps
        return every is not None and step % every == 0

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """`with saving(step) as folder:` fill the folder. Afterwards the checkpoint is complete,
        those that need not stay are gone, and its copy is under way."""
        began = time.monotonic()
        with new_checkpoint(self._folder, step, self._run) as partial:
            yield partial
        path = self._folder / f"step_{step}"
        logger.info("saved %s in %.1f s", path, time.monotonic() - began)
        if self._uploader is not None:
            self._uploader.start(path)
        busy = self._uploader.busy() if self._uploader is not None else ()
        retain(self._folder, self._config.keep_checkpoints, self._run, busy)

    def finish(self, body: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        """Do the rest of a checkpoint beside the run; `fail` is told what goes wrong."""

        def guarded() -> None:
            try:
                body()
            except BaseException as error:  # a thread's edge
                fail(error)

        self._finishing = threading.Thread(target=guarded, name="roll-td checkpoint", daemon=True)
        self._finishing.start()

    def wait(self) -> None:
        """Until no checkpoint is being finished."""
        if self._finishing is not None:
            self._finishing.join()
            self._finishing = None

    def close(self) -> None:
        """Wait for the checkpoint and the copies that are under way."""
        self.wait()
        if self._uploader is not None:
            self._uploader.close(self._config.upload_timeout_s)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Settings that differ, as `data.train: old → new`."""
    old, new = dict(_flat(before, "")), dict(_flat(after, ""))
    keys = list(dict.fromkeys([*old, *new]))
    return [
        f"{key}: {old.get(key)!r} → {new.get(key)!r}"
        for key in keys
        if old.get(key) != new.get(key) and key != "resume"
    ]


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
