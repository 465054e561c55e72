"""The control channel: one TCP connection from each rank to the driver, full frames only.

A frame is a kind, a head (pickled), and raw buffers. `Hub` is the driver's end of all connections.
The end of file of a connection is the sign of death, whether the rank is idle or busy. Every
rank connects, the driver's own too, so that there is one code path.

Beside it each rank has a lifeline to the driver, a connection that carries nothing. Nothing is ever
unacknowledged on it, so its keepalive tells within node_timeout_s that the other machine can't be
reached, however full the channel is; TCP_USER_TIMEOUT on the channel itself would take a rank that
is stopped, its receive buffer full, for a lost one. Kernels answer it: a rank that holds its GIL
for an hour in C, or is stopped by a debugger or by `scontrol suspend`, is not lost. A heartbeat of
the ranks' own could not tell those from a rank that hangs for good; that one is found by the
timeout of its collectives. And when a lifeline ends, the kernel ends a process that can't do so
itself (process.end_with).

Cost: the driver sends a call to R ranks with R writes of one prepared head each (about 10 us a
rank), and hears R small answers; nothing grows with the square of the world. At 10,000 ranks a
call costs about 0.1 s of the driver's thread to post, two file descriptors a rank, and the same
again to hear the answers: calls of that width should last seconds, which training steps do.
"""

from __future__ import annotations

import contextlib
import hmac
import pickle
import select
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

PREFIX = struct.Struct("<BxxxIIII")  # kind, bytes of head and own, inline buffers, see NEAR_BYTES
SIZE = struct.Struct("<Q")  # of an inline buffer; all sizes follow the prefix
NEAR_BYTES = 128 * 1024
"""If all inline buffers have less, they are read at once with the head, and then copied apart."""
AHEAD_BYTES = 64 * 1024
"""What is read beyond what is wanted, at most."""
HELLO = struct.Struct("<32sIB")  # token, rank, which of its two connections
TOKEN_CHARS = 32
Chunk = bytes | memoryview
"""A memoryview is of format B."""


class Kind(IntEnum):
    """What a frame says. To ranks: up to END. To the driver: from READY on."""

    COMMAND = 1
    GO = 2
    RELEASE = 3
    SEND = 4
    GOT = 5
    REQUEST = 6
    ABORT = 7
    END = 8
    READY = 21
    AT = 22
    ANSWER = 23
    ACK = 24
    REPLY = 25
    ERROR = 26
    SIGNAL = 27
    NOTICE = 28


class Frame:
    """A received frame: `head` is the shared part, `own` the receiver's, `inline` raw buffers,
    each in memory of its own."""

    __slots__ = ("head", "inline", "kind", "own")

    def __init__(self, kind: Kind, head: memoryview, own: memoryview, inline: list[memoryview]):
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
    total = sum(map(len, parts))
    sent = sock.sendmsg(parts[:512])
    if sent == total:
        return total
    views = _beyond([memoryview(p) for p in parts], sent)
    while views:
        views = _beyond(views, sock.sendmsg(views[:512]))
    return total


def _beyond(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What of buffers comes after so many bytes."""
    for i, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[i + 1 :]]
        count -= len(buffer)
    return []


def _frames() -> Iterator[list[memoryview] | Frame]:
    """Frame after frame: first the buffers that are to be filled next, then the frame."""
    prefix = memoryview(bytearray(PREFIX.size))
    while True:
        yield [prefix]
        kind, head, own, count, near = PREFIX.unpack(prefix)
        start = SIZE.size * count
        end = at = start + head + own
        front = memoryview(bytearray(end + near))
        if front:
            yield [front]
        inline: list[memoryview] = []
        for (size,) in SIZE.iter_unpack(front[:start]):
            if near:
                inline.append(memoryview(bytearray(front[at : at + size])))
                at += size
            else:
                inline.append(np.empty(size, dtype=np.uint8).data)
        if count and not near:
            yield [buffer for buffer in inline if len(buffer)]
        yield Frame(Kind(kind), front[start : start + head], front[start + head : end], inline)


class Connection:
    """A socket that carries frames. Sending is safe from any thread, one thread receives."""

    def __init__(self, sock: socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._lock = threading.Lock()
        self.bytes_sent = 0
        self._frames = _frames()
        self._wanted: list[memoryview] = []  # what comes in next
        self._spare = memoryview(bytearray(AHEAD_BYTES))
        self._ahead = self._spare[:0]  # read, and not wanted yet

    def send(self, kind: Kind, head: bytes, own: bytes = b"", inline: Sequence[Chunk] = ()) -> None:
        sizes = [SIZE.pack(len(chunk)) for chunk in inline]
        size = sum(map(len, inline))
        near = size if size < NEAR_BYTES else 0
        prefix = PREFIX.pack(kind, len(head), len(own), len(inline), near)
        parts = [prefix, *sizes, head, own, *inline]
        with self._lock:
            self.bytes_sent += _write(self.sock, parts)

    def send_now(self, kind: Kind, head: bytes) -> None:
        """Send if it can be done without waiting; a last word to a rank that may be stuck."""
        if not self._lock.acquire(timeout=0.2):
            return
        try:
            parts = [PREFIX.pack(kind, len(head), 0, 0, 0), head]
            self.sock.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except OSError:
            pass  # gone, or its buffer is full: its own watch ends it
        finally:
            self._lock.release()

    def receive(self) -> Frame | None:
        """Wait for the next frame; None at the end of file."""
        return self.poll(0)

    def poll(self, flags: int = socket.MSG_DONTWAIT) -> Frame | None:
        """The next frame; None at the end of file; BlockingIOError if not all of it is here."""
        while True:
            while self._wanted:
                try:
                    count = self._read(flags)
                except BlockingIOError:
                    raise
                except OSError:
                    return None
                if count == 0:
                    return None
                self._wanted = _beyond(self._wanted, count)
            step = next(self._frames)
            if isinstance(step, Frame):
                return step
            self._wanted = step

    def arrived(self) -> Iterator[Frame | None]:
        """Frames that are here, None at the end of file: after one all that was read ahead, as of
        that the socket tells nothing."""
        while True:
            try:
                frame = self.poll()
            except BlockingIOError:
                return
            yield frame
            if frame is None or not self._ahead:
                return

    def _read(self, flags: int) -> int:
        """Read into what is wanted, and ahead of it, so that a small frame takes one call."""
        if self._ahead:
            wanted = self._wanted[0]
            count = min(len(wanted), len(self._ahead))
            wanted[:count], self._ahead = self._ahead[:count], self._ahead[count:]
            return count
        wanted_now = self._wanted[:511]
        count = self.sock.recvmsg_into([*wanted_now, self._spare], 0, flags)[0]
        room = sum(map(len, wanted_now))
        self._ahead = self._spare[: max(0, count - room)]
        return min(count, room)

    def close(self) -> None:
        self.sock.close()


def listen() -> socket.socket:
    """A listening socket on a free port, for IPv6 and IPv4 where the host has both."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096
        )
    return socket.create_server(("", 0), backlog=4096)


def connect(
    addresses: Sequence[str], port: int, token: str, rank: int, node_timeout_s: int
) -> tuple[Connection, socket.socket]:
    """A rank's link and lifeline to the driver, by the first address that can be reached."""
    errors = []
    for address in addresses:
        try:
            lines = [socket.create_connection((address, port), timeout=10) for _ in range(2)]
        except OSError as error:
            errors.append(f"{address}: {error}")
            continue
        for number, sock in enumerate(lines):
            sock.settimeout(None)
            sock.sendall(HELLO.pack(token.encode(), rank, number))
        return Connection(lines[0]), _kept_alive(lines[1], node_timeout_s)
    raise ConnectionError(f"rank {rank} can't reach the driver on port {port}: {'; '.join(errors)}")


def accept(
    server: socket.socket, token: str, world_size: int, timeout_s: float, node_timeout_s: int
) -> Hub:
    """Wait for all ranks of the job; a connection that doesn't know the token is dropped."""
    found: dict[tuple[int, int], socket.socket] = {}
    server.settimeout(timeout_s)
    while len(found) < 2 * world_size:
        try:
            sock, _ = server.accept()
        except TimeoutError:
            for sock in found.values():
                sock.close()
            missing = sorted(set(range(world_size)) - {rank for rank, _ in found})
            raise TimeoutError(
                f"ranks {missing[:20]} of {world_size} did not join within {timeout_s:.0f} s"
            ) from None
        sock.settimeout(10)
        who = _greet(sock, token)
        if who is None or who[0] >= world_size or who in found:
            sock.close()
            continue
        sock.settimeout(None)
        found[who] = sock
    ranks = range(world_size)
    lifelines = [_kept_alive(found[r, 1], node_timeout_s) for r in ranks]
    return Hub([Connection(found[r, 0]) for r in ranks], lifelines)


def _greet(sock: socket.socket, token: str) -> tuple[int, int] | None:
    """Who says hello; nothing else of a stranger's is read or waited for."""
    hello = b""
    while len(hello) < HELLO.size:
        try:
            part = sock.recv(HELLO.size - len(hello))
        except OSError:
            return None
        if not part:
            return None
        hello += part
    given, rank, number = HELLO.unpack(hello)
    return (rank, number) if hmac.compare_digest(given, token.encode()) else None


def _kept_alive(lifeline: socket.socket, node_timeout_s: int) -> socket.socket:
    """After some silence the kernel asks; four times no answer end it, at node_timeout_s."""
    every_s = max(1, node_timeout_s // 8)
    lifeline.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, node_timeout_s - 4 * every_s),
        (socket.TCP_KEEPINTVL, every_s),
        (socket.TCP_KEEPCNT, 4),
    ):
        lifeline.setsockopt(socket.IPPROTO_TCP, option, value)
    return lifeline


def is_lost(lifeline: socket.socket) -> bool:
    """Wait for a lifeline's end: whether the other end can't be reached; else it has ended."""
    poll = select.poll()  # the kernel raises no signal for a socket that a recv() waits on
    poll.register(lifeline, select.POLLIN)
    poll.poll()
    try:
        lifeline.recv(1)
    except ConnectionResetError:
        return False
    except OSError:
        return True
    return False


OnFrame = Callable[[int, Frame | None], None]


class Hub:
    """The driver's end of all connections: one thread reads them, any thread writes."""

    def __init__(self, connections: Sequence[Connection], lifelines: Sequence[socket.socket]):
        self.connections, self.lifelines = list(connections), list(lifelines)

    def sender(self, rank: int) -> Sender:
        return self.connections[rank]

    @property
    def bytes_sent(self) -> int:
        return sum(c.bytes_sent for c in self.connections)

    def send_now(self, kind: Kind, head: bytes) -> None:
        for connection in self.connections:
            connection.send_now(kind, head)

    def cut(self, own_rank: int) -> None:
        """End the lifelines of all ranks but our own: who can't end itself is ended."""
        for rank, lifeline in enumerate(self.lifelines):
            if rank != own_rank:
                with contextlib.suppress(OSError):  # its rank has gone
                    lifeline.shutdown(socket.SHUT_WR)

    def serve(self, on_frame: OnFrame) -> None:
        """Read until every link has ended; `on_frame(rank, None)` is the end of a rank.

        A rank that stops in the middle of a frame holds nobody up. If `on_frame` raises, no frame
        is torn: this can be called again.
        """
        with selectors.DefaultSelector() as selector:
            for rank, (link, lifeline) in enumerate(
                zip(self.connections, self.lifelines, strict=True)
            ):
                selector.register(link.sock, selectors.EVENT_READ, (rank, link))
                selector.register(lifeline, selectors.EVENT_READ, (rank, None))
            links = len(self.connections)
            while links:
                for key, _ in selector.select():
                    rank, link = key.data
                    if link is None:
                        selector.unregister(key.fileobj)
                        if is_lost(self.lifelines[rank]):
                            on_frame(rank, None)
                        continue
                    for frame in link.arrived():
                        if frame is None:
                            selector.unregister(key.fileobj)
                            links -= 1
                        on_frame(rank, frame)
