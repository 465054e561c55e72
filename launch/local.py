"""The ranks of one machine, started through torchrun's own API."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SHUTDOWN_S = 5
"""How long ranks may take to end after a signal before they are killed."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class _SignalledError(Exception):
    """A signal came while no rank was running."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_local(config_path: str, overrides: list[str], ranks: int) -> int:
    """Run a config on `ranks` processes of this machine and wait for their end.

    To be called from the main thread: signals are handled meanwhile. Returns 0 if every rank ended
    well, 1 if one failed, 128 + n after signal n. Ranks, whatever they have started, and the
    folder of their error files are gone afterwards.
    """
    run_id = uuid.uuid4().hex
    with _signals_raised() as signals, _environment(ranks):
        try:
            with tempfile.TemporaryDirectory(prefix="roll_td_") as folder:
                try:
                    return _launch(run_id, folder, signals, config_path, overrides, ranks)
                finally:
                    _ignore_signals()
                    _end_left_over(run_id)
                    gc.freeze()  # the interpreter's end takes 0.4 s to go through torch's objects
        except _SignalledError as ended:
            return 128 + ended.number


def _launch(
    run_id: str,
    folder: str,
    signals: Iterable[signal.Signals],
    config: str,
    overrides: list[str],
    ranks: int,
) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quieten_elastic()
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=run_id,
        role="roll_td",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        # otherwise ranks look each other up by the machine's full name, which may not resolve
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=SHUTDOWN_S,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        signals_to_handle=",".join(s.name for s in signals),
    )
    try:
        elastic_launch(launch, sys.executable)("-u", "-m", "roll_td", config, *overrides)
    except ChildFailedError as error:
        if not any(_told(failure) for failure in error.failures.values()):
            print(_last_words(error.failures), file=sys.stderr, flush=True)
        return 1
    except SignalException as ended:
        return 128 + ended.sigval
    return 0


def _told(failure: ProcessFailure) -> bool:
    """Whether the rank has left its cause; if so, it or the driver has printed it."""
    return isinstance(failure.message, dict)  # torch writes a string of its own where we did not


def _last_words(failures: Mapping[int, ProcessFailure]) -> str:
    """A line about the rank that ended first."""

    def order(rank: int) -> tuple[int, bool, bool, int]:
        # among those of one second: signals come from outside, exit codes may follow from them,
        # SIGTERM is what torchrun sends to the others
        failure = failures[rank]
        return failure.timestamp, failure.exitcode == -signal.SIGTERM, failure.exitcode > 0, rank

    rank = min(failures, key=order)
    code = failures[rank].exitcode
    if code >= 0:
        return f"roll-td: rank {rank} was ended by exit code {code}"
    return f"roll-td: rank {rank} was ended by signal {-code} ({failures[rank].signal_name()})"


@contextlib.contextmanager
def _environment(ranks: int) -> Iterator[None]:
    """What the ranks are to inherit; what the user has set stays."""
    before = set(os.environ)
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    os.environ.setdefault("ROLL_TD_SECRET", secrets.token_hex(32))  # only our ranks may join
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # fresh large CPU tensors: 3 times faster
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]


@contextlib.contextmanager
def _signals_raised() -> Iterator[Iterable[signal.Signals]]:
    """Raise on signals until torchrun's agent sets handlers of its own; restore all at the end.

    Gives those to handle: not SIGHUP under nohup.
    """

    def on_signal(number: int, _frame: FrameType | None) -> None:
        _ignore_signals()
        raise _SignalledError(number)

    hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    handled = [s for s in _SIGNALS if s is not signal.SIGHUP or not hangup_ignored]
    before = {s: signal.signal(s, on_signal) for s in handled}
    try:
        yield handled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _quieten_elastic() -> None:
    """Keep torchrun's own words off the terminal, so that the job's are the last.

    Its modules set a level on each logger, some of them late: their records are held back where
    they meet.
    """
    handler = logging.StreamHandler()
    handler.setLevel(logging.CRITICAL)
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.CRITICAL)
        logger.handlers = [handler]
        logger.propagate = False


def _end_left_over(run_id: str) -> None:
    """End what the ranks have left running, and ranks that torchrun lost track of.

    torchrun signals the process groups of ranks that still run, not what an ended rank leaves,
    and forgets ranks if a signal comes while it starts them. All inherit the run id.
    """
    for number, patience_s in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0)):
        left = _of_run(run_id)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = _of_run(run_id)


def _of_run(run_id: str) -> list[int]:
    """Live processes whose environment names this run."""
    mark = f"TORCHELASTIC_RUN_ID={run_id}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
