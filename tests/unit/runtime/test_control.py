"""The control channel, over real sockets of this machine."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from roll_td.runtime import control
from roll_td.runtime.control import PREFIX, SIZE, Connection, Frame, Hub, Kind

TOKEN = "0123456789abcdef" * 2
HERE = ["127.0.0.1"]


@pytest.fixture
def pair() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection, and the bare socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    with theirs, ours:
        yield Connection(ours), theirs


def frame_bytes(kind: Kind, head: bytes, own: bytes = b"", *inline: bytes) -> bytes:
    sizes = [SIZE.pack(len(chunk)) for chunk in inline]
    prefix = PREFIX.pack(kind, len(head), len(own), len(inline), len(b"".join(inline)))
    return b"".join([prefix, *sizes, head, own, *inline])


def parts(frame: Frame | None) -> tuple[Kind, bytes, bytes, list[bytes]]:
    assert frame is not None
    return frame.kind, bytes(frame.head), bytes(frame.own), [bytes(c) for c in frame.inline]


def test_frames_arrive_whole_and_in_order(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    other = Connection(theirs)
    chunks = [b"ab", memoryview(b"cd"), b""]
    other.send(Kind.COMMAND, b"head", b"own", chunks)
    other.send(Kind.END, b"")
    assert parts(connection.receive()) == (Kind.COMMAND, b"head", b"own", [b"ab", b"cd", b""])
    assert parts(connection.receive()) == (Kind.END, b"", b"", [])
    assert other.bytes_sent == 2 * PREFIX.size + 3 * SIZE.size + 4 + 3 + 4
    other.close()
    assert connection.receive() is None


def test_a_frame_larger_than_any_buffer_arrives(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    big = bytes(range(256)) * 100_000
    chunks = [b"small", b"", big]
    sending = threading.Thread(target=Connection(theirs).send, args=(Kind.REPLY, b"h", b"", chunks))
    sending.start()
    assert parts(connection.receive()) == (Kind.REPLY, b"h", b"", chunks)
    sending.join()


def test_poll_waits_for_no_part_of_a_frame(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    whole = frame_bytes(Kind.ANSWER, b"head", b"", b"in", b"", b"line")
    for cut in (0, 3, PREFIX.size, PREFIX.size + 9, len(whole) - 5, len(whole) - 1):
        theirs.sendall(whole[:cut])
        time.sleep(0.01)
        with pytest.raises(BlockingIOError):
            connection.poll()
        theirs.sendall(whole[cut:])
        time.sleep(0.01)
        assert parts(connection.poll()) == (Kind.ANSWER, b"head", b"", [b"in", b"", b"line"])


def test_frames_that_are_read_at_once_all_arrive(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    third = frame_bytes(Kind.END, b"three")
    theirs.sendall(
        frame_bytes(Kind.ANSWER, b"one", b"", b"x") + frame_bytes(Kind.AT, b"two") + third[:-2]
    )
    time.sleep(0.01)
    assert [f and bytes(f.head) for f in connection.arrived()] == [b"one", b"two"]
    theirs.sendall(third[-2:])
    theirs.close()
    time.sleep(0.01)
    assert [f and bytes(f.head) for f in connection.arrived()] == [b"three"]
    assert list(connection.arrived()) == [None]


def test_an_end_in_the_middle_of_a_frame_is_an_end(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    theirs.sendall(frame_bytes(Kind.ANSWER, b"head")[:-1])
    theirs.close()
    assert connection.receive() is None


def test_a_reset_connection_is_an_end(pair: tuple[Connection, socket.socket]) -> None:
    connection, theirs = pair
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    assert connection.receive() is None


def test_sending_to_a_closed_peer_raises(pair: tuple[Connection, socket.socket]) -> None:
    """B07: in that call, or the next: the first bytes may leave before the reset comes."""
    connection, theirs = pair
    theirs.close()
    with pytest.raises(OSError):
        for _ in range(100):
            connection.send(Kind.COMMAND, b"head")
            time.sleep(0.01)


def test_the_last_word_waits_for_nobody(pair: tuple[Connection, socket.socket]) -> None:
    connection, _theirs = pair  # which reads nothing
    connection.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        connection.send(Kind.COMMAND, bytes(50_000_000))
    connection.sock.settimeout(None)
    began = time.monotonic()
    connection.send_now(Kind.ABORT, b"why")
    connection._lock.acquire()  # another thread is in the middle of sending
    connection.send_now(Kind.ABORT, b"why")
    assert time.monotonic() - began < 1


# --- all ranks ---------------------------------------------------------------------------------


class Ranks:
    """A hub that is served, and the ranks' ends of it."""

    def __init__(self, size: int):
        server = control.listen()
        port = server.getsockname()[1]
        with server:
            lines = [control.connect(HERE, port, TOKEN, r, 30) for r in reversed(range(size))]
            self.hub = control.accept(server, TOKEN, size, 10, 7)
        self.links, self.lifelines = zip(*reversed(lines), strict=True)
        self.heard: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def serve(self) -> None:
        def hear(rank: int, frame: Frame | None) -> None:
            self.heard.put((rank, frame and parts(frame)))
            if frame is not None and frame.head == b"bad":
                raise ValueError("bad")

        self.hub.serve(hear)

    def close(self) -> None:
        for end in (*self.links, *self.lifelines, *self.hub.connections, *self.hub.lifelines):
            end.close()


@pytest.fixture
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def test_each_rank_has_its_own_line(two: Ranks) -> None:
    thread = threading.Thread(target=two.serve)
    thread.start()
    for rank in (1, 0):
        two.links[rank].send(Kind.ANSWER, b"from %d" % rank)
        assert two.heard.get(timeout=5) == (rank, (Kind.ANSWER, b"from %d" % rank, b"", []))
        two.hub.sender(rank).send(Kind.GO, b"to %d" % rank)
        assert parts(two.links[rank].receive()) == (Kind.GO, b"to %d" % rank, b"", [])
    for rank in (0, 1):
        two.links[rank].close()
        assert two.heard.get(timeout=5) == (rank, None)
    thread.join(5)
    assert not thread.is_alive()


def test_a_rank_that_stops_in_the_middle_of_a_frame_holds_nobody_up(two: Ranks) -> None:
    thread = threading.Thread(target=two.serve)
    thread.start()
    whole = frame_bytes(Kind.ANSWER, b"late")
    two.links[0].sock.sendall(whole[:-2])
    time.sleep(0.05)
    two.links[1].send(Kind.ANSWER, b"in time")
    assert two.heard.get(timeout=5)[1][1] == b"in time"
    two.links[0].sock.sendall(whole[-2:])
    assert two.heard.get(timeout=5) == (0, (Kind.ANSWER, b"late", b"", []))
    for link in two.links:
        link.close()
    thread.join(5)


def test_serving_goes_on_after_an_error_without_loss(two: Ranks) -> None:
    two.links[0].send(Kind.ANSWER, b"bad")
    two.links[0].send(Kind.ANSWER, b"good")
    with pytest.raises(ValueError, match="bad"):
        two.serve()
    for link in two.links:
        link.close()
    two.serve()
    heard = [two.heard.get(timeout=5) for _ in range(4)]
    assert [h[1] and h[1][1] for h in heard if h[0] == 0] == [b"bad", b"good", None]


def test_a_lifelines_end_is_no_death_until_the_links_end(two: Ranks) -> None:
    """What the rank has said before it went comes first."""
    two.lifelines[0].close()
    two.links[0].send(Kind.ERROR, b"why")
    for link in two.links:
        link.close()
    two.serve()
    heard = [two.heard.get(timeout=5) for _ in range(3)]
    assert [h for h in heard if h[0] == 0] == [(0, (Kind.ERROR, b"why", b"", [])), (0, None)]


def test_cut_ends_every_lifeline_but_ones_own(two: Ranks) -> None:
    two.hub.cut(own_rank=1)
    assert two.lifelines[0].recv(1) == b""
    assert not control.is_lost(two.lifelines[0])
    two.lifelines[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        two.lifelines[1].recv(1)


def test_only_the_lifeline_has_a_clock(two: Ranks) -> None:
    """A rank that is stopped for long, its buffer full, must not lose its link."""
    for link in (*two.links, *two.hub.connections):
        assert link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert link.sock.gettimeout() is None
    ends = [(end, 30) for end in two.lifelines] + [(end, 7) for end in two.hub.lifelines]
    for lifeline, node_timeout_s in ends:
        assert lifeline.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, every, count = (
            lifeline.getsockopt(socket.IPPROTO_TCP, o)
            for o in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + every * count == node_timeout_s


def test_strangers_are_dropped_and_who_is_missing_is_named() -> None:
    with control.listen() as server:
        port = server.getsockname()[1]
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        strangers[0].sendall(control.HELLO.pack(b"x" * 32, 1, 0))
        strangers[1].sendall(control.HELLO.pack(TOKEN.encode(), 7, 0))
        strangers[2].close()
        lines = control.connect(HERE, port, TOKEN, 0, 30)
        with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not join within 0 s"):
            control.accept(server, TOKEN, 2, 0.2, 30)
        for stranger in strangers[:2]:
            assert stranger.recv(1) == b""
            stranger.close()
    for line in lines:
        line.close()


def test_connect_takes_the_first_address_that_can_be_reached() -> None:
    with control.listen() as server:
        port = server.getsockname()[1]
        link, lifeline = control.connect(["nowhere.invalid", *HERE], port, TOKEN, 0, 30)
        hub = control.accept(server, TOKEN, 1, 5, 30)
    assert isinstance(hub, Hub)
    for end in (link, lifeline, *hub.connections, *hub.lifelines):
        end.close()
    with pytest.raises(ConnectionError, match=r"rank 3 can't reach the driver on port .*: nowhere"):
        control.connect(["nowhere.invalid"], port, TOKEN, 3, 30)
