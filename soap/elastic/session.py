"""A Ray cluster for as long as a context lasts: one of our own on this machine, of which nothing is left, or somebody else's, joined.

Whoever reaches a Ray cluster's ports and knows its token runs code on it. So our own listens on one interface alone (checked), and its
token stands in a file that only this user can read. What ends it when this process is killed is its keeper (``soap.elastic.keeper``).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

from soap.elastic.faults import ElasticError
from soap.elastic.keeper import LOCK, PATIENCE_S
from soap.elastic.processes import Listener, descendants, listeners, of_ray_in, signal_all
from soap.errors import first_line

AUTO = "auto"
"""The address of the cluster that this machine belongs to."""
LOOPBACK = "127.0.0.1"
LEAST_VERSION = (2, 60)
"""The oldest Ray with which this has been tried: that its token keeps others out, and that it listens where it is told to."""
OBJECT_STORE_BYTES = 100 * 2**20
"""Tensors do not travel by Ray's object store (docs/elastic.md), so a small one does."""
REACH_S = 5.0
LEVEL, QUIET = "RAY_BACKEND_LOG_LEVEL", "fatal"
"""What Ray's native part writes to standard error, and the least that one can have."""
NATIVE_LINE = re.compile(rb"\[\d{4}-\d\d-\d\d [\d:,]+ [A-EG-Z] \d+ \d+\] ")
"""How lines of it begin, unless it ends the process (F)."""
PASSING_S = 1.0
WAIT, WAIT_S = "RAY_gcs_server_port_wait_time_s", 3
"""How often Ray tries to be let in, once a second. By itself it would try for twenty, with a line each time."""
END_S = PATIENCE_S + 10.0
PREFIX = "soap-ray-"
LONGEST_FOLDER = 40
"""Characters: the paths of Ray's sockets below it must not have more than 107."""
TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Session:
    """A cluster that this process belongs to. ``keeper``: of our own; None if joined. ``before``: where this process listened before."""

    address: str
    interface: str = LOOPBACK
    everywhere: bool = False
    keeper: int | None = None
    folder: Path | None = None
    before: frozenset[Listener] = frozenset()

    @property
    def processes(self) -> list[int]:
        """All processes of our own cluster on this machine; none of a joined one."""
        return [] if self.keeper is None else [self.keeper, *descendants(self.keeper)]

    def check_listeners(self) -> None:
        """ElasticError if a process of our own cluster, or Ray in this one, listens elsewhere. Actors listen as soon as they run."""
        found = {*listeners(self.processes), *listeners([os.getpid()])} - self.before
        wanted = ip_address(self.interface)
        others = {at for at in found if at.address != wanted and not (self.everywhere and at.address.is_unspecified)}
        if others:
            where = ", ".join(sorted(f"{'all interfaces' if at.address.is_unspecified else at.address} (port {at.port})" for at in others))
            raise ElasticError(
                f"Ray listens on {where}; expected {self.interface} alone. Ray 2.60 keeps to loopback only: name everywhere=True in a "
                "network that only friends reach"
            )


@contextmanager
def session(
    address: str | None = None,
    *,
    interface: str = LOOPBACK,
    everywhere: bool = False,
    cpus: int | None = None,
    object_store_bytes: int = OBJECT_STORE_BYTES,
) -> Iterator[Session]:
    """A cluster of our own on this machine that listens on ``interface`` (an address), or the one at ``address``, joined. ``everywhere``:
    it may listen on all interfaces, as Ray does unless the interface is loopback; the token is all that keeps others out then.

    At the end, however it comes, nothing of our own is left: no process, file or memory. ElasticError in one line if Ray is missing or too
    old, does not start, or does not let us in.
    """
    ray = module()
    if ray.is_initialized():
        raise ElasticError("this process is in a Ray cluster already; expected none: call ray.shutdown() before")
    if address is not None:
        with _own_handler():
            join(address)
            _leaves()
            try:
                yield Session(address)
            finally:
                ray.shutdown()
        return
    _remove_leftovers()
    folder = _folder()
    with _own_handler(), _environment(_authentication(folder)):
        keeper = _start_keeper(folder, interface, cpus or os.cpu_count() or 1, object_store_bytes)
        try:
            own = Session(_answer(keeper), interface, everywhere, keeper.pid, folder, frozenset(listeners([os.getpid()])))
            own.check_listeners()
            join(own.address, interface)
            _leaves()
            own.check_listeners()
            yield own
        finally:
            ray.shutdown()
            _end(keeper, folder)


def module() -> Any:
    """Ray; ElasticError if it is missing or too old."""
    os.environ.setdefault(LEVEL, QUIET)  # what goes wrong is told by exceptions, which we tell in one line
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise ElasticError("Ray is missing; expected it here and on all nodes: pip install 'soap-search[elastic]'") from None
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise ElasticError(f"Ray {ray.__version__}; expected at least {least}: pip install 'soap-search[elastic]'")
    return ray


def join(address: str, interface: str | None = None) -> bool:
    """Join the cluster at ``address``: HOST:PORT, or ``auto``. Returns whether this process was in none before. ElasticError in one line
    if there is none, or it does not accept our token (``RAY_AUTH_MODE``, ``RAY_AUTH_TOKEN_PATH``)."""
    ray = module()
    if ray.is_initialized():
        return False
    own = {} if interface is None else {"_node_ip_address": interface}
    reached = False
    try:
        host = _reach(address)
        reached = host is not None
        wait = {} if WAIT in os.environ else {WAIT: str(WAIT_S)}
        _untold()
        with _environment(wait), as_told(interface or host), _silent():
            ray.init(address=address, logging_level="ERROR", log_to_driver=False, **own)
    except (ray.exceptions.AuthenticationError, ConnectionError, ValueError, RuntimeError, OSError) as cause:
        raise _refused(address, reached, cause) from None
    return True


@contextmanager
def as_told(interface: str | None) -> Iterator[None]:
    """Within the context Ray takes loopback for loopback. By itself it puts an address of the machine in its place, so that others can
    join, and then listens on all interfaces. That it no longer does is seen where listeners are checked."""
    if interface is None or not ip_address(interface).is_loopback:
        yield
        return
    import ray._private.services as services

    inner: Any = services
    before = inner.resolve_ip_for_localhost
    inner.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        inner.resolve_ip_for_localhost = before


def _untold() -> None:
    """Keep Ray from printing on standard output, in pages, that a worker was lost: it is started again, and what matters of it we tell."""
    import ray._private.worker as worker

    inner: Any = worker
    inner.print_to_stdstream = lambda data, ignore_prefix: None


@contextmanager
def _silent() -> Iterator[None]:
    """Within the context Ray's native part is not heard on standard error, where ``QUIET`` holds. Other threads are."""
    if os.environ.get(LEVEL) != QUIET:
        yield
        return
    sys.stderr.flush()
    before = os.dup(2)
    coming, going = os.pipe()
    os.dup2(going, 2)
    os.close(going)
    passing = threading.Thread(target=_pass, args=(coming, before), name="standard error", daemon=True)
    passing.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        passing.join(PASSING_S)  # unless a process that was started meanwhile still writes there


def _pass(coming: int, going: int) -> None:
    """Pass lines on until nobody writes any more, but for those of Ray's native part."""
    with os.fdopen(coming, "rb") as lines, os.fdopen(going, "wb", buffering=0) as onward:
        for line in lines:
            if not NATIVE_LINE.match(line):
                onward.write(line)


def _refused(address: str, reached: bool, cause: BaseException) -> ElasticError:
    if not reached:
        return ElasticError(
            f"no Ray cluster at {address!r}: {shown(cause)}; start one by 'ray start --head', and by "
            "'ray start --address=HOST:6379' on the other machines"
        )
    where = os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")
    token = f"the token in {where!r}" if os.environ.get("RAY_AUTH_MODE") == "token" else "us without a token"
    return ElasticError(  # Ray itself only says that it could not connect
        f"what answers at {address!r} does not accept {token} ({shown(cause)}); expected a Ray cluster, and its token: set "
        "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the file"
    )


def shown(cause: BaseException) -> str:
    """An error of Ray in one short line."""
    return first_line(cause).rstrip(".")[:200]


def _reach(address: str) -> str | None:
    """The IP address of HOST:PORT. OSError if nobody answers there: Ray itself would try for a minute, and say much meanwhile."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return None
    with socket.create_connection((host.strip("[]"), int(port)), REACH_S) as reached:
        return str(reached.getpeername()[0])


def _folder() -> Path:
    """A new folder that only this user can enter, with a token in it that only this user can read."""
    root = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root if len(root) <= LONGEST_FOLDER - len(PREFIX) - 8 else "/tmp"))
    token = os.open(folder / TOKEN, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(token, "w", encoding="ascii") as stream:
        stream.write(secrets.token_hex(32))
    return folder


def _authentication(folder: Path) -> dict[str, str | None]:
    """What makes Ray take the token in the folder, whatever it would take otherwise."""
    hidden = dict.fromkeys(("RAY_ADDRESS", "RAY_AUTH_TOKEN"))
    return {**hidden, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / TOKEN), "RAY_USAGE_STATS_ENABLED": "0"}


@contextmanager
def _own_handler() -> Iterator[None]:
    """Within the context SIGTERM raises SystemExit once ``_leaves`` was called, so that all is removed. Afterwards it does what it did."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _leaves() -> None:
    """Have SIGTERM raise SystemExit. Ray has it do so, too, but behind a handler in C++ that prints a stack and aborts the process three
    seconds later, whether or not it has removed by then what is its own. That one is there when Ray has been joined."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(number)


@contextmanager
def _environment(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """These variables within the context, None: not there. Ray reads mode and token again, before and after."""
    before = {name: os.environ.get(name) for name in wanted}
    for name, value in wanted.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _forget_token()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _forget_token()


def _forget_token() -> None:
    """Make Ray read mode and token anew, as it does itself when it makes a token (``ray._private.authentication``): it keeps the first."""
    import ray._raylet as raylet

    inner: Any = raylet
    inner.Config.initialize("")
    inner.AuthenticationTokenLoader.instance().reset_cache()


def _start_keeper(folder: Path, interface: str, cpus: int, object_store_bytes: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "soap.elastic.keeper", str(folder), interface, str(cpus), str(object_store_bytes)]
    with (folder / "keeper.log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)


def _answer(keeper: subprocess.Popen[str]) -> str:
    """The address that the keeper says; ElasticError if it says something else, or nothing."""
    assert keeper.stdout is not None
    line = keeper.stdout.readline()
    answer = json.loads(line) if line else {"error": "its process has ended"}
    if "address" not in answer:
        raise ElasticError(
            f"Ray does not start: {answer['error']}; expected a free interface, and room in /dev/shm and {tempfile.gettempdir()}"
        )
    return str(answer["address"])


def _end(keeper: subprocess.Popen[str], folder: Path) -> None:
    """Let the keeper end everything. If it cannot, its death ends Ray's processes, as the kernel has been told."""
    for stream in (keeper.stdin, keeper.stdout):
        assert stream is not None
        stream.close()
    try:
        keeper.wait(END_S)
    except subprocess.TimeoutExpired:
        keeper.kill()
        keeper.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers() -> None:
    """Remove this user's folders whose keepers were killed, and end what still writes there: two of Ray's agents go on alone."""
    for root in {tempfile.gettempdir(), "/tmp"}:
        for lock in Path(root).glob(f"{PREFIX}*/{LOCK}"):
            with suppress(OSError):
                descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    signal_all(of_ray_in(lock.parent), signal.SIGKILL)
                    shutil.rmtree(lock.parent, ignore_errors=True)
                finally:
                    os.close(descriptor)
