"""A worker: does one task after the other, and says how much memory each needed. ``python -m soap.preprocessing.worker FD``."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from soap.errors import SoapError
from soap.preprocessing.work import Task, Work
from soap.runtime.system.process import die_with_parent


def serve(connection: Connection) -> None:
    """Do what is asked until the other end is closed."""
    work: Work = connection.recv()
    from soap.preprocessing.steps import perform

    connection.send(("ready", None))
    while True:
        task: Task = connection.recv()
        begin_s, before = time.monotonic(), _reset_peak()
        try:
            done = perform(work, task)
        except SoapError as error:
            connection.send(("error", str(error)))
            continue
        except MemoryError:
            connection.send(("lost", None))
            continue
        except Exception as error:  # a bug: told by the process that shows errors
            connection.send(("bug", f"{type(error).__name__}: {error}"))
            continue
        peak = max(0, _peak() - before) if before else 0
        connection.send(("done", replace(done, peak_bytes=peak, seconds=time.monotonic() - begin_s)))


def _reset_peak() -> int:
    """Begin to measure peak memory anew. Returns what is used now, or 0 if this system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return 0
    return _status("VmRSS") - _status("RssFile")


def _peak() -> int:
    """Peak memory. What is mapped of files, which can be had anew at any time, is counted as it is now."""
    return _status("VmHWM") - _status("RssFile")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the one that started us decides
    die_with_parent()
    with suppress(OSError):  # if memory runs out after all, it is a worker that ends, and its task is done again
        Path("/proc/self/oom_score_adj").write_text("900", encoding="ascii")
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Connection(int(sys.argv[1])))
    os._exit(0)


if __name__ == "__main__":
    main()
