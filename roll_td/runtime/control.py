"""The control channel: one TCP connection from each rank to the driver, full frames only.

A frame is a kind, a head (pickled), and raw chunks. `Hub` is the driver's end, `Link` a rank's.
The end of file of a connection is the sign of death, whether the rank is idle or busy. Every
rank connects, the driver's own too, so that there is one code path.

Cost: the driver sends a call to R ranks with R writes of one prepared head each (about 10 us a
rank), and hears R small answers; nothing grows with the square of the world. At 10,000 ranks a
call costs about 0.1 s of the driver's thread to post, one file descriptor a rank, and the same
again to hear the answers: calls of that width should last seconds, which training steps do.
"""

from __future__ import annotations

import hmac
import pickle
import queue
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol

PREFIX = struct.Struct("<BxxxIIQ")
Chunk = bytes | memoryview


class Kind(IntEnum):
    """What a frame says. To ranks: up to END. To the driver: from HELLO on."""

    COMMAND = 1
    GO = 2
    RELEASE = 3
    SEND = 4
    GOT = 5
    REQUEST = 6
    ABORT = 7
    END = 8
    HELLO = 20
    READY = 21
    AT = 22
    ANSWER = 23
    ACK = 24
    REPLY = 25
    ERROR = 26
    SIGNAL = 27


class Frame:
    """A received frame: `head` is the shared part, `own` the receiver's, `inline` raw bytes."""

    __slots__ = ("head", "inline", "kind", "own")

    def __init__(self, kind: Kind, head: memoryview, own: memoryview, inline: memoryview):
        self.kind, self.head, self.own, self.inline = kind, head, own, inline

    def load(self) -> Any:
        """The unpickled head."""
        return pickle.loads(self.head)


class Sender(Protocol):
    """Where frames for one receiver go."""

    def send(self, kind: Kind, head: bytes, own: bytes = b"", inline: Sequence[Chunk] = ()) -> None:
        """Send a frame; complete and in order with others of this sender."""


def _write(sock: socket.socket, parts: list[Chunk]) -> int:
    """Write all parts; returns the bytes written."""
    views = [memoryview(p).cast("B") for p in parts if len(p)]
    total = sum(v.nbytes for v in views)
    while views:
        sent = sock.sendmsg(views[:512])
        while views and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
        if sent:
            views[0] = views[0][sent:]
    return total


class Connection:
    """A socket that carries frames. Sending is safe from any thread."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._lock = threading.Lock()
        self.bytes_sent = 0
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, 5),
            (socket.TCP_KEEPINTVL, 2),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, 10_000),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, kind: Kind, head: bytes, own: bytes = b"", inline: Sequence[Chunk] = ()) -> None:
        size = sum(memoryview(c).nbytes for c in inline)
        parts = [PREFIX.pack(kind, len(head), len(own), size), head, own, *inline]
        with self._lock:
            self.bytes_sent += _write(self.sock, parts)

    def send_now(self, kind: Kind, head: bytes) -> None:
        """Send if it can be done without waiting; a last word to a rank that may be stuck."""
        if not self._lock.acquire(timeout=0.2):
            return
        try:
            self.sock.setblocking(False)
            self.sock.sendmsg([PREFIX.pack(kind, len(head), 0, 0), head])
        except OSError:
            pass  # gone, or its buffer is full: its own watch ends it
        finally:
            self._lock.release()

    def receive(self) -> Frame | None:
        """The next frame; None at the end of file."""
        prefix = self._exactly(PREFIX.size)
        if prefix is None:
            return None
        kind, head, own, inline = PREFIX.unpack(prefix)
        body = self._exactly(head + own + inline)
        if body is None:
            return None
        return Frame(Kind(kind), body[:head], body[head : head + own], body[head + own :])

    def _exactly(self, size: int) -> memoryview | None:
        view = memoryview(bytearray(size))
        done = 0
        while done < size:
            try:
                count = self.sock.recv_into(view[done:])
            except (ConnectionError, TimeoutError):
                return None
            if count == 0:
                return None
            done += count
        return view

    def close(self) -> None:
        self.sock.close()


def listen() -> socket.socket:
    """A listening socket on a free port, for IPv6 and IPv4 where the host has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
        )
    return socket.create_server(("", 0), backlog=4096)


def connect(addresses: Sequence[str], port: int, token: str, rank: int) -> Connection:
    """A rank's connection to the driver, by the first address that answers to the token."""
    errors = []
    for address in addresses:
        try:
            sock = socket.create_connection((address, port), timeout=10)
        except OSError as error:
            errors.append(f"{address}: {error}")
            continue
        sock.settimeout(None)
        connection = Connection(sock)
        connection.send(Kind.HELLO, token.encode(), struct.pack("<I", rank))
        return connection
    raise ConnectionError(f"rank {rank} can't reach the driver on port {port}: {'; '.join(errors)}")


def accept(
    server: socket.socket, token: str, world_size: int, timeout_s: float
) -> list[Connection]:
    """Wait for all ranks of the job; a connection that doesn't know the token is dropped."""
    found: dict[int, Connection] = {}
    server.settimeout(timeout_s)
    while len(found) < world_size:
        try:
            sock, _ = server.accept()
        except TimeoutError:
            missing = sorted(set(range(world_size)) - set(found))
            raise TimeoutError(
                f"ranks {missing[:20]} of {world_size} did not join within {timeout_s:.0f} s"
            ) from None
        sock.settimeout(10)
        connection = Connection(sock)
        rank = _greet(connection, token)
        if rank is None or rank >= world_size or rank in found:
            connection.close()
            continue
        sock.settimeout(None)
        found[rank] = connection
    return [found[r] for r in range(world_size)]


def _greet(connection: Connection, token: str) -> int | None:
    """The rank that says hello; nothing of a stranger's is unpickled or waited for."""
    prefix = connection._exactly(PREFIX.size)
    if prefix is None:
        return None
    kind, head, own, inline = PREFIX.unpack(prefix)
    if kind != Kind.HELLO or head != len(token) or own != 4 or inline:
        return None
    body = connection._exactly(head + own)
    if body is None or not hmac.compare_digest(bytes(body[:head]), token.encode()):
        return None
    rank: int = struct.unpack("<I", body[head:])[0]
    return rank


OnFrame = Callable[[int, Frame | None], None]


class Hub:
    """The driver's end of all connections: one thread reads them, any thread writes."""

    def __init__(self, connections: Sequence[Connection]):
        self.connections = list(connections)

    def sender(self, rank: int) -> Sender:
        return self.connections[rank]

    @property
    def bytes_sent(self) -> int:
        return sum(c.bytes_sent for c in self.connections)

    def send_now(self, kind: Kind, head: bytes) -> None:
        for connection in self.connections:
            connection.send_now(kind, head)

    def serve(self, on_frame: OnFrame) -> None:
        """Read until every connection has ended; `on_frame(rank, None)` is an end of file."""
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self.connections):
                selector.register(connection.sock, selectors.EVENT_READ, (rank, connection))
            while selector.get_map():
                for key, _ in selector.select():
                    rank, connection = key.data
                    frame = connection.receive()
                    if frame is None:
                        selector.unregister(connection.sock)
                    on_frame(rank, frame)


class LocalLine:
    """A frame queue between two threads of one process, with the manners of a socket."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()

    def send(self, kind: Kind, head: bytes, own: bytes = b"", inline: Sequence[Chunk] = ()) -> None:
        raw = b"".join(bytes(c) for c in inline)
        self._queue.put(Frame(kind, memoryview(head), memoryview(own), memoryview(raw)))

    def receive(self) -> Frame | None:
        return self._queue.get()

    def close(self) -> None:
        self._queue.put(None)


class _Tagged:
    """A rank's end of the shared line to a local hub."""

    def __init__(self, rank: int, line: queue.SimpleQueue[tuple[int, Frame | None]]):
        self._rank, self._line = rank, line

    def send(self, kind: Kind, head: bytes, own: bytes = b"", inline: Sequence[Chunk] = ()) -> None:
        raw = b"".join(bytes(c) for c in inline)
        frame = Frame(kind, memoryview(head), memoryview(own), memoryview(raw))
        self._line.put((self._rank, frame))


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
