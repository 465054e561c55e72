"""What a rank asks of the operating system; in processes of their own, which it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

HEAD = """
import os, signal, socket, sys, threading, time
from roll_td.runtime.process import *
from roll_td.distributed.world import World
"""


def start(program: str) -> subprocess.Popen[str]:
    """A Python process that runs `program`."""
    text = HEAD + textwrap.dedent(program)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)


def run(program: str) -> tuple[int, str]:
    """Exit code and output of `program`."""
    with start(program) as process:
        out, _ = process.communicate(timeout=30)
    return process.returncode, out


def test_a_process_that_holds_its_gil_in_c_ends_with_its_lifeline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = start(
            f"""
            lifeline = socket.create_connection(("127.0.0.1", {server.getsockname()[1]}))
            end_with(lifeline, 3)
            lifeline.sendall(b"!")
            sum(range(10**11))
            """
        )
        lifeline, _ = server.accept()
    with process, lifeline:
        lifeline.recv(1)
        lifeline.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        code = process.wait(15)
    assert code == -signal.SIGALRM
    assert 2.5 < time.monotonic() - began < 8


def test_a_lifelines_end_starts_the_clock_and_nothing_else_does() -> None:
    program = """
        ours, theirs = socket.socketpair()
        end_with(ours, {grace})
        {then}
        print(signal.alarm(0))
        """
    close = "theirs.close()"
    assert run(program.format(grace=3, then=close)) == (0, "3\n")
    assert run(program.format(grace=5, then=close)) == (0, "5\n")
    assert run(program.format(grace=5, then="theirs.shutdown(socket.SHUT_WR)")) == (0, "5\n")
    assert run(program.format(grace=5, then="ours.shutdown(socket.SHUT_WR)")) == (0, "0\n")
    assert run(program.format(grace=5, then="outlive_lifelines(); theirs.close()")) == (0, "0\n")


def test_signals_are_told_while_the_main_thread_is_in_c() -> None:
    code, out = run(
        """
        told = []
        pass_signals_on(told.append)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=0.3)  # a wait that frees the GIL, and runs no handler meanwhile
        print([n.name for n in told])
        """
    )
    assert (code, out) == (0, "['SIGTERM', 'SIGINT']\n")


def test_a_forked_child_ends_by_sigterm_and_its_parent_hears_nothing_of_it() -> None:
    code, out = run(
        """
        told = []
        pass_signals_on(told.append)
        ends = []
        for _ in range(200):
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        time.sleep(0.1)
        print(set(ends), told, signal.pthread_sigmask(signal.SIG_BLOCK, []))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        print(told[0].name)
        """
    )
    assert (code, out) == (0, "{-15} [] set()\nSIGTERM\n")


def test_a_rank_dies_with_its_launcher(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with start(
        f"""
        pid = os.fork()
        if pid == 0:
            die_with_parent(World(0, 1, 0, 1, 0, 1, "h", 1, "torchrun", True, 0))
            open({str(pid_file)!r}, "w").write(str(os.getpid()))
        print("ready", flush=True)
        time.sleep(60)
        """
    ) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        launcher.stdout.readline()
        launcher.kill()
    rank = int(pid_file.read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and is_running(rank):
        time.sleep(0.01)
    assert not is_running(rank)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_one_who_starts_a_rank_by_hand_may_leave() -> None:
    code, out = run(
        """
        import ctypes
        die_with_parent(World(0, 1, 0, 1, 0, 1, "h", 1, "user", False, 0))
        asked = ctypes.c_int(-1)
        ctypes.CDLL(None).prctl(2, ctypes.byref(asked), 0, 0, 0)  # PR_GET_PDEATHSIG
        print(asked.value)
        """
    )
    assert (code, out) == (0, "0\n")
