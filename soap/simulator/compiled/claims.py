"""Claims: of several processes that need a function, one compiles it; the others wait, and load what it has kept on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

with suppress(ImportError):  # not on every system; there each process compiles for itself
    import fcntl


@contextmanager
def claimed(path: str, *, wait: bool = True) -> Iterator[bool]:
    """Hold the claim that the file ``path`` stands for; it ends with the process at the latest. Waits for who holds it, or without ``wait``
    yields False. Where no such file can be made, everybody has it."""
    try:
        file = open(path, "ab")  # noqa: SIM115 - closed below
    except OSError:
        yield True
        return
    with file:
        yield _locked(file.fileno(), wait)  # closing the file gives the claim back


def _locked(file: int, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (OSError, NameError):  # a file system, or a system, without locks
        return True
    return True
