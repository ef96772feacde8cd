"""How bytes travel between workers and servers: frames over TCP, one connection for each pair, on which a server answers in order.

Nothing of what peers send is unpickled: a frame is opaque here, and ``soap.elastic.messages`` reads it. Both ends prove that they know
the run's secret before the first frame, each by a keyed hash of what the other drew; the secret itself never travels here (Ray brings it
to actors). Frames are neither encrypted nor signed: whoever can change packets on the way can change them, as with Ray and gloo.

Ray's calls and objects, and gloo, were measured beside it: ``benchmarks/transport.py``, docs/elastic.md.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from soap.elastic.faults import ElasticError
from soap.errors import SoapError, first_line

Buffer: TypeAlias = "bytes | bytearray | memoryview | NDArray[Any]"
Answer: TypeAlias = Callable[[memoryview], Sequence[Buffer]]
"""What a server does with a frame: returns the parts of the frame that answers it."""

HEADER = struct.Struct("<4sB3xQ")
"""Magic, status, bytes that follow."""
MAGIC = b"Frme"
LIMIT_BYTES = 2**32
"""A longer frame is refused, not allotted."""
MOST_PARTS = 512
"""Parts handed to the kernel at once; Linux takes 1024."""
NONCE_BYTES = 32
PROOF_BYTES = 32
PATIENCE_S = 10.0
"""How long a peer may take to be reached and to prove itself."""
BACKLOG = 128
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4, socket.TCP_USER_TIMEOUT: 30_000}
"""Seconds of silence, seconds between questions, how many of them; milliseconds that what was sent may stay unconfirmed."""


class Status(IntEnum):
    """What a frame is."""

    MESSAGE = 0
    ERROR = 1
    """The text of an error, instead of an answer."""


class PeerLost(ElasticError):
    """The other end cannot be reached, or is gone."""


class Connection:
    """One end of a connection whose other end knows the secret. ``sent_bytes`` and ``received_bytes`` count frames with their headers."""

    def __init__(self, own: socket.socket, name: str, *, asks: bool) -> None:
        self._socket, self._name, self._asks, self._asked = own, name, asks, False
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that is switched off says no farewell
        for option, value in KEEP_ALIVE.items():
            own.setsockopt(socket.IPPROTO_TCP, option, value)
        self.sent_bytes = self.received_bytes = 0

    def ask(self, parts: Sequence[Buffer]) -> memoryview:
        """Send a frame and wait for its answer."""
        self.send(parts)
        return self.receive()

    def send(self, parts: Sequence[Buffer], status: Status = Status.MESSAGE) -> None:
        """Send a frame. A worker sends the next one when it has received the answer: else both ends may wait for the other to read."""
        if self._asked:
            raise ElasticError(f"{self._name} is asked again before it has answered")
        views = [view for part in parts if (view := _flat(part)).nbytes]
        size = sum(view.nbytes for view in views)
        if size > LIMIT_BYTES:
            raise ElasticError(f"a message of {size} bytes to {self._name}; expected at most {LIMIT_BYTES}: make batches smaller")
        try:
            self._send_all([memoryview(HEADER.pack(MAGIC, status, size)), *views])
        except OSError as cause:
            raise self._lost(cause) from None
        self.sent_bytes += HEADER.size + size
        self._asked = self._asks

    def receive(self) -> memoryview:
        """The next frame. ElasticError with the other end's words if it is an error; PeerLost if the other end is gone."""
        try:
            magic, status, size = HEADER.unpack(self._receive_exactly(HEADER.size))
            if magic != MAGIC or size > LIMIT_BYTES or status not in (Status.MESSAGE, Status.ERROR):
                raise ElasticError(f"{self._name} sent what is no frame of ours, or {size} bytes, above the limit of {LIMIT_BYTES}")
            data = self._receive_exactly(size)
        except OSError as cause:
            raise self._lost(cause) from None
        self._asked = False
        self.received_bytes += HEADER.size + size
        if status == Status.ERROR:
            raise ElasticError(bytes(data).decode("utf-8", "replace"))
        return data

    def close(self) -> None:
        """End the connection; whoever waits at the other end, or in another thread here, is told that it is lost."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_all(self, views: list[memoryview]) -> None:
        while views:
            sent = self._socket.sendmsg(views[:MOST_PARTS])
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    def _receive_exactly(self, size: int) -> memoryview:
        view = _flat(np.empty(size, np.uint8))  # not filled with zeros first
        received = 0
        while received < size:
            count = self._socket.recv_into(view[received:])
            if not count:
                raise ConnectionResetError(None, "it has closed the connection")
            received += count
        return view

    def _lost(self, cause: OSError) -> PeerLost:
        return PeerLost(f"{self._name} is lost: {cause.strerror or first_line(cause)}")


def connect(host: str, port: int, secret: bytes) -> Connection:
    """A connection to the listener there. PeerLost if nobody answers; ElasticError if it does not know the secret."""
    name = f"the server at {host}:{port}"
    try:
        own = socket.create_connection((host, port), PATIENCE_S)
    except OSError as cause:
        raise PeerLost(f"{name} cannot be reached: {cause.strerror or first_line(cause)}") from None
    try:
        peer = Connection(own, name, asks=True)
        drawn = secrets.token_bytes(NONCE_BYTES)
        theirs = bytes(peer._receive_exactly(NONCE_BYTES))
        own.sendall(drawn + _proof(secret, b"worker", theirs, drawn))
        proof = bytes(peer._receive_exactly(PROOF_BYTES))
    except OSError as cause:
        own.close()
        raise PeerLost(
            f"{name} closes the connection: {cause.strerror or first_line(cause)}; expected one of this run, with its secret"
        ) from None
    if not hmac.compare_digest(proof, _proof(secret, b"server", drawn, theirs)):
        own.close()
        raise ElasticError(f"{name} does not know this run's secret; expected a server of this run")
    own.settimeout(None)
    return peer


class Listener:
    """Answers frames at an address: each connection in a thread of its own, its frames in order.

    ``answer`` is called from many threads. An error of ours goes to the one who asked; any other is told there as well, since it is the
    asking side that shows errors.
    """

    def __init__(self, answer: Answer, secret: bytes, host: str, port: int = 0) -> None:
        self._answer, self._secret = answer, secret
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as cause:
            raise ElasticError(f"cannot listen on {host}:{port}: {cause.strerror}; expected an address of this machine") from None
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._closed = False
        self.refused = 0
        """How many could not prove that they know the secret."""
        self._thread = threading.Thread(target=self._accept, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # accept returns
        self._socket.close()
        for connection in connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                own, (host, port, *_) = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                continue
            name = f"the worker at {host}:{port}"
            threading.Thread(target=self._serve, args=(own, name), name=name, daemon=True).start()

    def _serve(self, own: socket.socket, name: str) -> None:
        connection = Connection(own, name, asks=False)
        with suppress(OSError, ElasticError):
            if self._admit(own, connection):
                own.settimeout(None)
                with self._lock:
                    self._connections.add(connection)
                    closed = self._closed
                while not closed:
                    self._answer_one(connection)
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _admit(self, own: socket.socket, connection: Connection) -> bool:
        """Let the other end prove that it knows the secret, and then prove it."""
        own.settimeout(PATIENCE_S)
        drawn = secrets.token_bytes(NONCE_BYTES)
        own.sendall(drawn)
        said = bytes(connection._receive_exactly(NONCE_BYTES + PROOF_BYTES))
        theirs, proof = said[:NONCE_BYTES], said[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"worker", drawn, theirs)):
            self.refused += 1
            return False
        own.sendall(_proof(self._secret, b"server", theirs, drawn))
        return True

    def _answer_one(self, connection: Connection) -> None:
        frame = connection.receive()
        try:
            answer, status = self._answer(frame), Status.MESSAGE
        except SoapError as error:
            answer, status = [str(error).encode()], Status.ERROR
        except Exception as error:  # a bug: shown by the side that asked
            answer, status = [f"the server failed: {type(error).__name__}: {first_line(error)}".encode()], Status.ERROR
        connection.send(answer, status)


def _proof(secret: bytes, role: bytes, other: bytes, own: bytes) -> bytes:
    return hmac.digest(secret, role + other + own, "sha256")


def _flat(part: Buffer) -> memoryview:
    """The bytes of a buffer, in a row."""
    view: Any = memoryview(part)  # type: ignore[arg-type]
    return view.cast("B") if view.nbytes else memoryview(b"")
