"""Processes of ranks: copies of one process that has imported what they need, where the system copies processes. It runs no threads and
never touches a GPU, so it is safe to copy (docs/internals/runtime.md, *Processes*)."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import forkserver, util

from soap.runtime.comm.launched import inherited

READING = ("soap.tracing.load",)
"""What ranks import that read a model: with it the half of torch that knows exported programs."""

LONGEST_FOLDER = 107 - len("/listener-12345678")
"""Characters in the path of ``multiprocessing``'s own folder: Linux takes 107 in a socket's, which is in it."""
SHORT_ROOTS = ("/tmp", "/var/tmp", "/dev/shm")

_launched_with: set[str] = set()
"""Names of variables that any launch of this process has had: the process that is copied may have them."""


def start_method() -> str:
    """The start method of ``multiprocessing``: only Linux copies processes safely, and only if there is room for a socket's path."""
    return "forkserver" if sys.platform == "linux" and len(_short_folder()) <= LONGEST_FOLDER else "spawn"


def _short_folder() -> str:
    """``multiprocessing``'s own folder, for this user alone and removed when this process ends. If it is not there yet it is made where its
    path is short: temporary files may be deep, as those of Slurm's jobs are."""
    before, deep = tempfile.tempdir, len(tempfile.gettempdir()) + len("/pymp-12345678") > LONGEST_FOLDER
    if deep:
        tempfile.tempdir = next((root for root in SHORT_ROOTS if os.access(root, os.W_OK | os.X_OK)), before)
    try:
        return str(util.get_temp_dir())
    finally:
        tempfile.tempdir = before


def import_ahead(modules: Iterable[str]) -> None:
    """Start the process that is copied, and have it import those of the modules that are ours, and all that these import. Nothing if there
    is one already, or processes are not copied. A user's own modules are left to ranks: they may start threads, or use a GPU."""
    if start_method() == "spawn":
        return
    multiprocessing.set_forkserver_preload(["soap.runtime.comm.launch", *(name for name in modules if name.startswith("soap."))])
    forkserver.ensure_running()


@dataclass(frozen=True)
class Environment:
    """A launcher's variables, to be set in its ranks. ``gone``: names of those that it had in earlier launches alone."""

    variables: dict[str, str]
    gone: frozenset[str]

    @classmethod
    def of_launcher(cls) -> Environment:
        """Of this process, now."""
        variables = dict(os.environ)
        _launched_with.update(variables)
        return cls(variables, frozenset(_launched_with - variables.keys()))

    def enter(self) -> None:
        """Make it this rank's own, but for what torch's launcher gives to ranks."""
        for name in filter(inherited, self.gone):
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in self.variables.items() if inherited(name)})


def end_with_launcher() -> None:
    """From now on this rank ends when its launcher does, however that ends: it may be killed."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None  # it was started by ``multiprocessing``

    def wait() -> None:
        launcher.join()
        os._exit(1)

    threading.Thread(target=wait, name="launcher's end", daemon=True).start()
