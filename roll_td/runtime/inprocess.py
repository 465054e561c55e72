"""A job whose ranks are threads of this process: for unit tests.

Calls, dispatch and wire format are those of a real job. There are no process groups: worker
methods can't run collectives. All ranks share one random state.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from types import TracebackType

import torch

from roll_td.placement import world_layout
from roll_td.runtime import driver as driver_module
from roll_td.runtime.control import Chunk, Frame, Kind, OnFrame, Sender
from roll_td.runtime.driver import Driver
from roll_td.runtime.executor import Executor
from roll_td.runtime.failure import Cause, WorkerError
from roll_td.runtime.rendezvous import RankPlace
from roll_td.runtime.transport import LocalTransport, Mailboxes

END_S = 5.0
"""How long the end waits for each thread."""


class LocalJob:
    """`with LocalJob([(0, 0), (0, 1)], 1, 1):` the caller is the driver, as in a pipeline's run.

    `world_places` has (node, local rank) of each rank. A failure raises WorkerError in the calls
    that wait, and at the end if none did.
    """

    def __init__(
        self,
        world_places: Sequence[tuple[int, int]],
        num_nodes: int,
        num_gpus_per_node: int,
        seed: int = 0,
    ):
        self.layout = world_layout(world_places, num_nodes, num_gpus_per_node)
        self.places = [
            RankPlace(n, r, f"node{n}", "127.0.0.1", None, os.getpid()) for n, r in world_places
        ]
        size = len(self.places)
        self.hub = LocalHub(size)
        mailboxes = Mailboxes()
        transports = [LocalTransport(rank, mailboxes) for rank in range(size)]
        self.executors = [
            Executor(
                rank=rank,
                host=self.places[rank].host,
                link=self.hub.link(rank),
                transport=transports[rank],
                driver_rank=self.layout.driver_rank,
                device=torch.device("cpu"),
                local_rank=self.places[rank].local_rank,
                on_error=lambda *_: None,
            )
            for rank in range(size)
        ]
        transport = transports[self.layout.driver_rank]
        self.driver = Driver(self.layout, self.hub, transport, self.fail, self.places, seed=seed)
        self._threads: list[threading.Thread] = []
        self._before: Driver | None = None

    def fail(self, cause: Cause) -> None:
        """Make every waiting call raise."""
        self.driver.on_failure(cause)

    def __enter__(self) -> LocalJob:
        self._before = driver_module._current
        self.driver.install()
        self._hub_thread = threading.Thread(target=self._serve, daemon=True)
        self._hub_thread.start()
        for rank, executor in enumerate(self.executors):
            for target, args in ((self._read, (rank,)), (self._run, (rank, executor))):
                thread = threading.Thread(target=target, args=args, daemon=True)
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self.driver.failed is None:
                self.driver.drain()
        finally:
            driver_module._current = self._before
            self.driver.end()
            for line in self.hub.lines:
                line.close()
            # after a failure some wait for what will never come
            patience_s = END_S if self.driver.failed is None and kind is None else 0.1
            for thread in self._threads:
                thread.join(patience_s)
            self.hub.close()
            self._hub_thread.join(END_S)
        if kind is None and self.driver.failed is not None:
            raise WorkerError(self.driver.failed.render())

    def _serve(self) -> None:
        try:
            self.hub.serve(self.driver.on_frame)
        except BaseException as error:  # else every call would hang
            self.fail(Cause.of(error, "driver", self.layout.driver_rank))

    def _read(self, rank: int) -> None:
        try:
            while (frame := self.hub.lines[rank].receive()) is not None:
                self.executors[rank].on_frame(frame)
        except BaseException as error:
            self.fail(Cause.of(error, "exception", rank, method="the reader of the channel"))

    def _run(self, rank: int, executor: Executor) -> None:
        try:
            executor.run()
        except BaseException as error:
            self.fail(Cause.of(error, "exception", rank, method="the executor"))


def _copied(kind: Kind, head: bytes, own: bytes, inline: Sequence[Chunk]) -> Frame:
    """A frame as it arrives: buffers are the receiver's own."""
    own_buffers = [memoryview(bytearray(chunk)) for chunk in inline]
    return Frame(kind, memoryview(head), memoryview(own), own_buffers)


class LocalLine:
    """A frame queue between two threads of one process, with the manners of a socket."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()

    def send(self, kind: Kind, head: bytes, own: bytes = b"", inline: Sequence[Chunk] = ()) -> None:
        self._queue.put(_copied(kind, head, own, inline))

    def receive(self) -> Frame | None:
        return self._queue.get()

    def close(self) -> None:
        self._queue.put(None)


class _Tagged:
    """A rank's end of the shared line to a local hub."""

    def __init__(self, rank: int, line: queue.SimpleQueue[tuple[int, Frame | None]]):
        self._rank, self._line = rank, line

    def send(self, kind: Kind, head: bytes, own: bytes = b"", inline: Sequence[Chunk] = ()) -> None:
        self._line.put((self._rank, _copied(kind, head, own, inline)))


class LocalHub:
    """A hub for executors that are threads of this process: what unit tests use."""

    def __init__(self, world_size: int):
        self._line: queue.SimpleQueue[tuple[int, Frame | None]] = queue.SimpleQueue()
        self.lines = [LocalLine() for _ in range(world_size)]
        self.bytes_sent = 0

    def sender(self, rank: int) -> Sender:
        return self.lines[rank]

    def link(self, rank: int) -> Sender:
        """What rank `rank` sends with."""
        return _Tagged(rank, self._line)

    def send_now(self, kind: Kind, head: bytes) -> None:
        for line in self.lines:
            line.send(kind, head)

    def close(self) -> None:
        for line in self.lines:
            line.close()
        self._line.put((-1, None))

    def serve(self, on_frame: OnFrame) -> None:
        while True:
            rank, frame = self._line.get()
            if rank < 0:
                return
            on_frame(rank, frame)
