"""The engine's process: `python -m roll_td.strategies.vllm SOCKET PARENT FOLDER`, and its guard.

The guard is there from the engine's first moment on, as importing vLLM alone takes seconds. It ends
the engine with its parent, whatever the engine is doing, stopped and hanging ones too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from multiprocessing.connection import Connection, wait

from roll_td.strategies.vllm.process import end_group, remove_folder


def guard(group: int, watched: list[int], folder: str) -> None:
    """When one of these pidfds' processes has ended, end what the group has left. In a session of
    its own: what stops the engine doesn't reach it."""
    os.setsid()
    wait(watched)
    end_group(group)
    remove_folder(folder)


def main() -> None:
    """Serve an engine to the parent, over the socket that it has given."""
    socket, parent, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    engine = os.getpid()
    if os.fork() == 0:
        os.close(socket)  # else the parent would not see the engine's end
        try:
            guard(engine, [os.pidfd_open(pid) for pid in (parent, engine)], folder)
        except ProcessLookupError:  # one has ended already
            end_group(engine)
            remove_folder(folder)
        finally:
            os._exit(0)
    from roll_td.strategies.vllm.engine import Engine

    made, code = Engine(Connection(socket)), 0
    try:
        with contextlib.suppress(EOFError, ConnectionError):  # the parent has ended
            made.serve()
    except Exception:  # the process's edge
        traceback.print_exc()
        code = 1
    # vLLM's own processes have nothing to put in order, and it would take seconds over its garbage
    end_group(engine, made.memory)
    os._exit(code)


if __name__ == "__main__":
    main()
