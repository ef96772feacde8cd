"""Compiling ahead: from the time when a command reads its model, a second process compiles what its search will call, the last of it first.

It matters once on a machine, and again after an update: compiling all of it takes most of a minute of one core. The functions are claimed
on disk (``simulator.compiled.claims``): whoever comes first compiles one, the other process waits for that one and loads it. Both need
most parts of what they compile, and work these out for themselves; to wait for one another would take longer.

Where all of it is on disk a thread loads it, the first of it first: most of that is LLVM's work, which leaves Python to the command.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread

from soap.measure.this_machine import cpu_cores

FEWEST_CORES = 2

_running: list[subprocess.Popen[bytes]] = []
_loading: list[Thread] = []


def begin() -> None:
    """Begin to compile, or to load if everything is on disk already, unless that is going on, or no core is free for it.

    The process ends with this one, however this one ends, or by ``end``. Ctrl-C does not reach it.
    """
    if _running or _loading or cpu_cores() < FEWEST_CORES:
        return
    if all_on_disk():
        _loading.append(Thread(target=_load, name="machine code"))
        _loading[0].start()
        return
    try:
        # its standard input ends with this process; in a session of its own it gets none of the terminal's signals
        child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return  # this process compiles all by itself
    _running.append(child)
    atexit.register(end)


def end() -> None:
    """End the process, if there is one, and wait for the thread, which takes a moment: from here on the cores may be needed, to measure on
    them."""
    while _loading:
        _loading.pop().join()
    while _running:
        child = _running.pop()
        child.kill()
        child.wait()
        atexit.unregister(end)


@contextmanager
def compiling() -> Iterator[None]:
    """``begin`` and ``end``."""
    begin()
    try:
        yield
    finally:
        end()


def all_on_disk() -> bool:
    """Whether nothing of what takes long need be compiled."""
    from soap.api.slow_functions import SLOW  # importing numba takes half a second
    from soap.simulator.compiled.jit import is_compiled

    return all(map(is_compiled, SLOW))


def _load() -> None:
    with suppress(Exception):  # whoever calls a function meets the same
        from soap.api.slow_functions import slow_functions
        from soap.simulator.compiled.jit import compile_unless_claimed

        for function, arguments in reversed([*slow_functions()]):
            compile_unless_claimed(function, arguments)


def main() -> None:
    """Compile what takes longest, in the order of ``SLOW``. What another process compiles is left out."""
    Thread(target=_end_with_parent, daemon=True).start()
    from soap.api.slow_functions import slow_functions
    from soap.simulator.compiled.jit import compile_unless_claimed

    for function, arguments in slow_functions():
        compile_unless_claimed(function, arguments)


def _end_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock a process cannot leave behind
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
