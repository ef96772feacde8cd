"""Frames between two ends that know a secret: what arrives, what is refused, and what both ends are told when one is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from soap.elastic.faults import ElasticError
from soap.elastic.transport import HEADER, MAGIC, NONCE_BYTES, PROOF_BYTES, Answer, Buffer, Listener, PeerLost, Status, connect
from soap.errors import ModelError

SECRET = b"s" * 32


@contextmanager
def listening(answer: Answer) -> Iterator[Listener]:
    listener = Listener(answer, SECRET, "127.0.0.1")
    try:
        yield listener
    finally:
        listener.close()


def reversed_frame(frame: memoryview) -> Sequence[Buffer]:
    return [bytes(frame)[::-1]]


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (3, 0, 5), (70_000, 2, 1_000_003), (1,) * 1500])
def test_parts_arrive_as_one_frame_and_are_counted(sizes: tuple[int, ...]) -> None:
    parts = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)]
    whole = b"".join(part.tobytes() for part in parts)
    with listening(reversed_frame) as listener:
        peer = connect(listener.host, listener.port, SECRET)
        for _ in range(2):
            assert bytes(peer.ask(parts)) == whole[::-1]
        assert peer.sent_bytes == peer.received_bytes == 2 * (HEADER.size + len(whole))
        peer.close()


def test_numbers_of_any_type_and_shape_are_sent_as_they_lie() -> None:
    numbers = np.arange(12, dtype=np.float64).reshape(3, 4)
    with listening(lambda frame: [frame]) as listener:
        peer = connect(listener.host, listener.port, SECRET)
        answer = peer.ask([numbers, b"end"])
        assert np.array_equal(np.frombuffer(answer[:96], np.float64).reshape(3, 4), numbers) and bytes(answer[96:]) == b"end"
        peer.close()


def test_connections_are_answered_at_the_same_time() -> None:
    """Each of three answers waits for the other two questions."""
    meeting = threading.Barrier(3, timeout=20)

    def meet(frame: memoryview) -> Sequence[Buffer]:
        meeting.wait()
        return [frame]

    with listening(meet) as listener:
        peers = [connect(listener.host, listener.port, SECRET) for _ in range(3)]
        for number, peer in enumerate(peers):
            peer.send([bytes([number])])
        assert [bytes(peer.receive()) for peer in peers] == [b"\0", b"\1", b"\2"]
        for peer in peers:
            peer.close()


def test_second_question_before_the_answer_is_refused() -> None:
    """Both ends could wait for the other to read."""
    with listening(reversed_frame) as listener:
        peer = connect(listener.host, listener.port, SECRET)
        peer.send([b"ab"])
        with pytest.raises(ElasticError, match="asked again before it has answered"):
            peer.send([b"cd"])
        assert bytes(peer.receive()) == b"ba"
        assert bytes(peer.ask([b"cd"])) == b"dc"
        peer.close()


def test_errors_go_to_who_asked_and_the_connection_lives() -> None:
    def fail(frame: memoryview) -> Sequence[Buffer]:
        if bytes(frame) == b"ours":
            raise ModelError("no such row")
        if bytes(frame) == b"bug":
            raise KeyError("table")
        return [frame]

    with listening(fail) as listener:
        peer = connect(listener.host, listener.port, SECRET)
        with pytest.raises(ElasticError, match=r"^no such row$"):
            peer.ask([b"ours"])
        with pytest.raises(ElasticError, match=r"^the server failed: KeyError: 'table'$"):
            peer.ask([b"bug"])
        assert bytes(peer.ask([b"fine"])) == b"fine"
        peer.close()


def test_who_does_not_know_the_secret_is_refused_unread() -> None:
    asked = []

    def note(frame: memoryview) -> Sequence[Buffer]:
        asked.append(bytes(frame))
        return [frame]

    with listening(note) as listener:
        with pytest.raises(PeerLost, match=r"closes the connection: .*; expected one of this run, with its secret"):
            connect(listener.host, listener.port, b"t" * 32)
        with socket.create_connection((listener.host, listener.port)) as stranger:
            stranger.recv(NONCE_BYTES)
            stranger.sendall(bytes(NONCE_BYTES + PROOF_BYTES) + HEADER.pack(MAGIC, Status.MESSAGE, 3) + b"abc")
            with pytest.raises(ConnectionResetError):
                while stranger.recv(1):
                    pass
                raise ConnectionResetError
        assert listener.refused == 2
    assert asked == []


def test_server_that_does_not_know_the_secret_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def accept() -> None:
            peer, _ = impostor.accept()
            with peer:
                peer.sendall(bytes(NONCE_BYTES))
                peer.recv(NONCE_BYTES + PROOF_BYTES)
                peer.sendall(bytes(PROOF_BYTES))

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(ElasticError, match="does not know this run's secret"):
            connect("127.0.0.1", impostor.getsockname()[1], SECRET)
        thread.join()


@pytest.mark.parametrize("header", [b"HTTP" + bytes(HEADER.size - 4), HEADER.pack(MAGIC, Status.MESSAGE, 2**60), HEADER.pack(MAGIC, 9, 0)])
def test_what_is_no_frame_ends_the_connection(header: bytes) -> None:
    with listening(reversed_frame) as listener:
        peer = connect(listener.host, listener.port, SECRET)
        peer._socket.sendall(header)
        with pytest.raises(PeerLost):
            peer.receive()
        peer.close()


def test_lost_ends_are_told() -> None:
    with listening(reversed_frame) as listener:
        peer = connect(listener.host, listener.port, SECRET)
        assert bytes(peer.ask([b"ab"])) == b"ba"
    with pytest.raises(PeerLost, match=r"the server at 127\.0\.0\.1:\d+ is lost"):
        for _ in range(3):  # the first may still be taken by the kernel
            peer.ask([b"ab"])
    peer.close()
    with pytest.raises(PeerLost, match="cannot be reached"):
        connect(listener.host, listener.port, SECRET)
    with pytest.raises(ElasticError, match="expected an address of this machine"):
        Listener(reversed_frame, SECRET, "192.0.2.1")
