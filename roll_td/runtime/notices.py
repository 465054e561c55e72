"""Notices: signals that a launcher has declared to mean "make a checkpoint, then end".

Two variables declare them: ROLL_TD_NOTICES, such as TERM,USR2, and ROLL_TD_NOTICE_FILE, where a
job that has ended so leaves the names of the notices it had. Whether to start it again is the
launcher's to decide. A notice comes to all ranks; the first to reach the driver counts.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

NOTICES, NOTICE_FILE = "ROLL_TD_NOTICES", "ROLL_TD_NOTICE_FILE"


class Stopped(BaseException):
    """The pipeline ends for a notice. Not an Exception, as a pipeline may catch those."""


def hold_notices(env: Mapping[str, str]) -> None:
    """Have notices wait until `await_notices`, instead of ending a rank that has not joined yet.

    To be called from the main thread, before it starts others. All threads and children inherit
    it, so that a notice that a scheduler sends to all processes ends none of them. ValueError if
    the environment is not right.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, declared_notices(env))


def await_notices(env: Mapping[str, str], tell: Callable[[signal.Signals], None]) -> None:
    """Call `tell` from a thread on each notice, those that have waited first."""
    notices = declared_notices(env)

    def listen() -> None:
        while True:
            tell(signal.Signals(signal.sigwait(notices)))

    if notices:
        threading.Thread(target=listen, name="roll-td notices", daemon=True).start()


def declared_notices(env: Mapping[str, str]) -> frozenset[signal.Signals]:
    """The signals that the launcher has declared. ValueError for an unknown one, or without a
    file to tell it by."""
    names = [name for name in env.get(NOTICES, "").split(",") if name]
    unknown = [name for name in names if f"SIG{name}" not in signal.Signals.__members__]
    if unknown or (names and not env.get(NOTICE_FILE)):
        rule = f"{unknown} are no signals" if unknown else f"{NOTICE_FILE} is not set"
        raise ValueError(
            f"{NOTICES}={env[NOTICES]}: {rule}; give names such as TERM,USR2, and a file in which "
            "the job leaves those that it has ended for"
        )
    return frozenset(signal.Signals[f"SIG{name}"] for name in names)


def leave_notices(env: Mapping[str, str], notices: Sequence[signal.Signals]) -> None:
    """Write the notices, in order, for the launcher: TERM USR2. The file is whole or not there."""
    path = Path(env[NOTICE_FILE])
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(" ".join(number.name.removeprefix("SIG") for number in notices) + "\n")
    os.replace(partial, path)
