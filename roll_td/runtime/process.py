"""What a rank asks of the operating system: to end with others, and to be told of signals."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from roll_td.distributed.world import World

LIFELINE_SIGNALS = {3: signal.SIGQUIT, 5: signal.SIGTRAP}
"""Seconds of grace → the signal of that number, which a lifeline's end raises."""

PASSED_ON = (signal.SIGTERM, signal.SIGINT)
"""The signals of which the driver is told."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(world: World) -> None:
    """A launcher that is killed takes its ranks along. To be called before anything slow."""
    if world.launcher not in ("torchrun", "slurm"):
        return
    parent = os.getppid()
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def end_with(lifeline: socket.socket, grace_s: int) -> None:
    """Have the kernel end this process `grace_s` (3 or 5) seconds after `lifeline` has ended.

    For a process that can do nothing itself any more: a thread in C holds its GIL. The end of the
    socket raises a signal, the signal's handler is alarm() of the C library, which takes the
    number of the signal for seconds; SIGALRM, unhandled, ends the process.
    """
    number = LIFELINE_SIGNALS[grace_s]
    _handle(number, ctypes.cast(_libc().alarm, ctypes.c_void_p).value)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, number)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def outlive_lifelines() -> None:
    """Undo `end_with`: the job is over, others may end before this process."""
    for number in LIFELINE_SIGNALS.values():
        _handle(number, int(signal.SIG_IGN))


def pass_signals_on(tell: Callable[[signal.Signals], None]) -> None:
    """Call `tell` from a thread on each SIGTERM and SIGINT, even while the main thread is in C++.

    To be called from the main thread.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    for number in PASSED_ON:
        signal.signal(number, lambda *_: None)

    def listen() -> None:
        while data := reading.recv(64):
            for number in PASSED_ON:
                if number in data:
                    tell(number)

    _keep_from_children(writing)
    threading.Thread(target=listen, name="roll-td signals", daemon=True).start()


def _keep_from_children(writing: socket.socket) -> None:
    """Give a forked child the usual handling back: else no SIGTERM would end it, and its parent
    would be told of it. Signals wait until that is done. Keeps `writing` open, too."""
    masks = threading.local()

    def hold() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)

    def resume() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def forget() -> None:
        signal.set_wakeup_fd(-1)
        writing.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resume()

    os.register_at_fork(before=hold, after_in_parent=resume, after_in_child=forget)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _handle(number: int, handler: Any) -> None:
    """signal() of the C library, for handlers that are no Python; callable from any thread."""
    libc = _libc()
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    libc.signal(number, handler)
