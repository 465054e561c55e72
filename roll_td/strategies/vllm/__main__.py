"""The engine's process: `python -m roll_td.strategies.vllm SOCKET PARENT`, and what guards it.

The guard is there from the engine's first moment on, as importing vLLM alone takes seconds. It ends
the engine with its parent, whatever the engine is doing, stopped and hanging ones too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection, wait

from roll_td.strategies.vllm.process import end_group


def guard(group: int, watched: list[int]) -> None:
    """When one of these pidfds' processes has ended, end what the group has left. In a session of
    its own: what stops the engine doesn't reach it."""
    os.setsid()
    wait(watched)
    end_group(group)
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)


def main() -> None:
    """Serve an engine to the parent, over the socket that it has given."""
    socket, parent = map(int, sys.argv[1:])
    engine = os.getpid()
    if os.fork() == 0:
        os.close(socket)  # else the parent would not see the engine's end
        try:
            guard(engine, [os.pidfd_open(pid) for pid in (parent, engine)])
        except ProcessLookupError:  # one has ended already
            end_group(engine)
        finally:
            os._exit(0)
    from roll_td.strategies.vllm.engine import Engine

    code = 0
    try:
        with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
            Engine(Connection(socket)).serve()
    except Exception:  # the process's edge
        traceback.print_exc()
        code = 1
    # vLLM's own processes have nothing to put in order, and it would take seconds over its garbage
    end_group(engine)
    os._exit(code)


if __name__ == "__main__":
    main()
