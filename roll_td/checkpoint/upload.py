"""Copies complete checkpoints to a folder or fsspec URL, beside the run. The one user of fsspec."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from pathlib import Path

from roll_td.checkpoint.store import MARK
from roll_td.config.masking import mask_urls

try:
    import fsspec  # type: ignore[import-untyped, import-not-found, unused-ignore]
except ModuleNotFoundError:
    fsspec = None

logger = logging.getLogger(__name__)


class Uploader:
    """Copies folders to `url`/NAME, one after the other, in a thread of its own.

    A copy that fails is reported and tried again with the next one; it stops nothing. The
    completion mark is copied last. ValueError if no package can write to such a URL.
    """

    def __init__(self, url: str):
        self._url, self._shown = url.rstrip("/"), mask_urls(url)
        if fsspec is None:
            raise ValueError(f"upload_to={self._shown} needs: pip install 'roll-td[upload]'")
        try:
            fsspec.get_filesystem_class(fsspec.utils.get_protocol(url))
        except (ImportError, ValueError) as error:
            raise ValueError(f"upload_to={self._shown}: {mask_urls(str(error))}") from error
        self._changed = threading.Condition()
        # all below is guarded by it
        self._waiting: list[Path] = []
        self._failed: list[Path] = []
        self._current: Path | None = None
        threading.Thread(target=self._work, name="roll-td upload", daemon=True).start()

    def start(self, folder: Path) -> None:
        """Copy `folder`, after those that failed before and are still there."""
        with self._changed:
            again = [path for path in self._failed if path != folder and path.exists()]
            self._failed = []
            self._waiting += [*again, folder]
            self._changed.notify_all()

    def busy(self) -> Collection[Path]:
        """The folders that are being copied or wait for it."""
        with self._changed:
            return {*self._waiting, *([] if self._current is None else [self._current])}

    def close(self, timeout_s: float) -> None:
        """Wait for what is under way and try once more what has failed, at most so long in all;
        name what could not be copied."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._wait_idle(deadline)
            self._waiting += self._failed
            self._failed = []
            self._changed.notify_all()
            self._wait_idle(deadline)
            left = [*self._failed, *self._waiting]
            left += [] if self._current is None else [self._current]
        if left:
            names = ", ".join(map(str, left))
            logger.warning("not copied to %s: %s; copy them by hand", self._shown, names)

    def _wait_idle(self, deadline: float) -> None:
        def is_idle() -> bool:
            return self._current is None and not self._waiting

        self._changed.wait_for(is_idle, max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                folder = self._current = self._waiting.pop(0)
            try:
                began = time.monotonic()
                self._copy(folder)
                logger.info(
                    "copied %s to %s in %.1f s", folder, self._shown, time.monotonic() - began
                )
                failed = []
            except Exception as error:  # a copy's edge: whatever it is, the run goes on
                failed = [folder]
                logger.warning(
                    "copying %s to %s failed: %s: %s; it is tried again after the next checkpoint",
                    folder, self._shown, type(error).__name__, mask_urls(str(error)),
                )  # fmt: skip
            with self._changed:
                self._failed += failed
                self._current = None
                self._changed.notify_all()

    def _copy(self, folder: Path) -> None:
        system, root = fsspec.core.url_to_fs(f"{self._url}/{folder.name}")
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MARK]
        for path in [*files, folder / MARK]:
            target = f"{root}/{path.relative_to(folder).as_posix()}"
            system.makedirs(target.rpartition("/")[0], exist_ok=True)
            system.put_file(str(path), target)
