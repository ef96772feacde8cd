"""The process below which a Ray session lives: ``python -m soap.elastic.keeper FOLDER INTERFACE CPUS OBJECT_STORE_BYTES``.

It starts a head (``soap.elastic.head``), passes on what that says, and waits. When its standard input ends (the session's holder has closed
it, or is gone, killed or not), it ends all processes below itself and removes the folder; whatever loses its parent down there becomes its
child. It does so as well if a process of Ray's head is gone: without one of them the others would wait for a minute, and then fail in
pages of text. A lock in the folder says that it lives. A folder whose lock nobody holds was left by a keeper that was killed, and the next
session removes it.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

from soap.elastic.processes import adopt_orphans, descendants, end_all, lives, name_of

PATIENCE_S = 3.0
"""How long Ray's processes may take to end by themselves."""
POLL_S = 1.0
PARTS = ("/gcs_server", "/raylet")
"""Programs without which a cluster is none."""
LOCK = "lock"
"""Name of the file in the folder of which a living keeper holds the lock."""


def keep(holder: int, arguments: list[str]) -> None:
    """Start a head and wait for the holder's end, or the head's."""
    words = [sys.executable, "-m", "soap.elastic.head", *arguments]
    head = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert head.stdout is not None
    answer = head.stdout.readline()
    parts = [head.pid, *(one for one in descendants(head.pid) if any(word in name_of(one).partition(" ")[0] for word in PARTS))]
    with suppress(BrokenPipeError):
        os.write(1, answer)
    os.close(1)
    while os.getppid() == holder and all(map(lives, parts)):  # somebody may have inherited the other end of standard input
        ready, _, _ = select.select([0], [], [], POLL_S)
        if ready and not os.read(0, 1):
            return


def lock(folder: Path) -> None:
    """Hold the folder's lock until this process ends. Nobody sees the file before it is locked."""
    new = folder / f"{LOCK}.new"
    fcntl.flock(os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_EX)
    new.rename(folder / LOCK)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit


def main() -> None:
    """Entry point."""
    holder, folder = os.getppid(), Path(sys.argv[1])
    adopt_orphans()
    lock(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the holder decides
    signal.signal(signal.SIGTERM, _end)
    try:
        keep(holder, sys.argv[1:])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all(os.getpid(), PATIENCE_S)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
