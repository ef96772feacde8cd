"""What a process has started, where these processes listen, and how they end. Linux, from ``/proc``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

PROC = Path("/proc")
LISTENING = "0A"
"""State of a listening socket in ``/proc/net/tcp``."""
POLL_S = 0.02
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket, and a process that has it."""

    process: int
    address: IPv4Address | IPv6Address
    port: int


def adopt_orphans() -> None:
    """From now on what loses its parent below this process becomes its child, not init's."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(process: int) -> list[int]:
    """All processes below this one, children before theirs. What has lost its parent is found if this process is a subreaper."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                children.setdefault(int(_status(int(entry.name))[1]), []).append(int(entry.name))
    found, wanted = [], [process]
    while wanted:
        below = children.get(wanted.pop(), [])
        found += below
        wanted += below
    return found


def lives(process: int) -> bool:
    """Whether a process is there, and has not ended without its parent having noticed yet."""
    try:
        return _status(process)[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def name_of(process: int) -> str:
    """A process's command line; empty if it is gone."""
    try:
        return (PROC / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def listeners(processes: Collection[int]) -> list[Listener]:
    """Where these processes listen, each in its own network namespace."""
    found = []
    for process in processes:
        with suppress(OSError):
            sockets = _sockets(process)
            if sockets:
                found += [Listener(process, address, port) for address, port, inode in _listening(process) if inode in sockets]
    return found


def end_all(process: int, patience_s: float) -> None:
    """End all processes below the calling one, ``process``, a subreaper: by SIGTERM, and what is left after ``patience_s`` by SIGKILL."""
    deadline = time.monotonic() + patience_s
    signal_all(descendants(process), signal.SIGTERM)
    while _left(process) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    while left := _left(process):  # a killed process may have just made another one
        signal_all(left, signal.SIGKILL)
        time.sleep(POLL_S)


def of_ray_in(folder: Path) -> list[int]:
    """Ray's processes of this user that have files open below a folder."""
    found = []
    for entry in PROC.iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid() and b"ray" in (entry / "cmdline").read_bytes():
                opened = (os.readlink(descriptor) for descriptor in (entry / "fd").iterdir())
                if any(path.startswith(f"{folder}/") for path in opened):
                    found.append(int(entry.name))
    return found


def signal_all(processes: Collection[int], number: signal.Signals) -> None:
    """Send a signal to those of these processes that live yet."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _left(process: int) -> list[int]:
    """Processes below the calling one, without those that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return descendants(process)


def _status(process: int) -> list[str]:
    """The fields of ``/proc/N/stat`` behind the name: state, parent, ... OSError if there is no such process."""
    return (PROC / str(process) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _sockets(process: int) -> set[str]:
    """Inode numbers of a process's sockets."""
    found = set()
    for entry in (PROC / str(process) / "fd").iterdir():
        with suppress(OSError):
            kind, _, inode = os.readlink(entry).partition(":[")
            if kind == "socket":
                found.add(inode.rstrip("]"))
    return found


def _listening(process: int) -> list[tuple[IPv4Address | IPv6Address, int, str]]:
    """Address, port and inode of the sockets that listen in a process's network namespace."""
    found: list[tuple[IPv4Address | IPv6Address, int, str]] = []
    for table in ("tcp", "tcp6"):
        path = PROC / str(process) / "net" / table
        for line in path.read_text(encoding="ascii").splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == LISTENING:
                host, _, port = fields[1].partition(":")
                found.append((_address(host), int(port, 16), fields[9]))
    return found


def _address(digits: str) -> IPv4Address | IPv6Address:
    """The kernel writes addresses as 32-bit words in this machine's order of bytes."""
    words = [int(digits[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(digits), 8)]
    packed = b"".join(words)
    if len(packed) == 4:
        return IPv4Address(packed)
    long = IPv6Address(packed)
    return long.ipv4_mapped or long
