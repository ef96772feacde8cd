"""Which emulations are alive, and the removal of what others left behind.

A launcher holds a lock on its emulation's file for as long as it lives, however it ends. Whatever bears the number of an emulation that
nobody holds was left by a launcher that was killed.
"""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from soap.emulation import network, quota
from soap.emulation.names import INTERFACES, NAMESPACES, NUMBERS, names_in, number_of
from soap.emulation.quota import CpuGroups
from soap.errors import RuntimeFailure, SoapWarning

LOCKS = Path("/run/soap-emulation")


@contextmanager
def reserved(is_free: Callable[[int], bool]) -> Iterator[int]:
    """The lowest number that nobody uses and that ``is_free`` accepts; reserved within this context."""
    for number in NUMBERS:
        with _held(number) as held:
            if held and is_free(number):
                yield number
                return
    raise RuntimeFailure(f"--emulate: all {len(NUMBERS)} numbers of emulations are in use; wait until one of them has ended")


def remove_leftovers(groups: CpuGroups) -> list[int]:
    """Remove what emulations left whose launcher was killed; returns their numbers. Living emulations are not touched."""
    named = (*names_in(NAMESPACES), *names_in(INTERFACES), *quota.known_numbers(groups), *names_in(LOCKS))
    removed = []
    for number in sorted({number for name in named if (number := number_of(name)) is not None}):
        with _held(number) as held:
            if held:
                remove(groups, number)
                removed.append(number)
    return removed


def remove(groups: CpuGroups, number: int) -> None:
    """End the processes of an emulation, and remove everything that it has made. Warns of what cannot be removed."""
    left = quota.remove(groups, number) + network.remove(number)
    if left:
        text = f"--emulate: could not remove {', '.join(left)}; the next start tries again"
        warnings.warn(text, SoapWarning, stacklevel=2)


@contextmanager
def _held(number: int) -> Iterator[bool]:
    """Whether this process now holds the emulation's lock. At the end the lock is released and its file removed."""
    LOCKS.mkdir(mode=0o755, parents=True, exist_ok=True)
    path = LOCKS / f"soap-emulation-{number}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)  # children must not inherit it: they may live longer
    held = False
    try:
        held = _lock(descriptor, path)
        yield held
    finally:
        if held:
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:  # the last holder may have removed the file meanwhile: then others lock another one
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
