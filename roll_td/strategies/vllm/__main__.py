"""The engine's process: `python -m roll_td.strategies.vllm SOCKET PARENT`.

It ends when its parent does, from its first moment on: importing vLLM alone takes seconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import Connection, wait

from roll_td.strategies.vllm.process import end_group


def end(code: int = 0) -> None:
    """End this process and those of vLLM. They have nothing to put in order, and vLLM would take
    seconds over its garbage."""
    end_group(os.getpgrp())
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    os._exit(code)


def end_with(parent: int) -> None:
    """End when the process of this pidfd has ended, whatever the loop is doing."""
    wait([parent])
    end()


def main() -> None:
    """Serve an engine to the parent, over the socket that it has given."""
    socket, parent_pid = map(int, sys.argv[1:])
    try:
        parent = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        end()
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    from roll_td.strategies.vllm.engine import Engine

    try:
        with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
            Engine(Connection(socket)).serve()
    except Exception:  # the process's edge: else vLLM's own processes would go on
        traceback.print_exc()
        end(1)
    end()


if __name__ == "__main__":
    main()
