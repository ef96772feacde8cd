"""Tests that need root and the kernel's help say what is missing; one of them runs at a time, as each sees all emulations of the box."""

from __future__ import annotations

import fcntl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from soap.emulation import emulate
from soap.emulation.names import INTERFACES, NAMESPACES, names_in, number_of
from soap.emulation.quota import CpuGroups
from soap.emulation.support import require_support
from soap.errors import RuntimeFailure


@pytest.fixture
def groups() -> Iterator[CpuGroups]:
    """The box's CPU control groups, where emulations can be made; else the test is skipped."""
    try:
        found = require_support()
    except RuntimeFailure as missing:
        pytest.skip(str(missing))
    if (done := subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)).returncode:
        pytest.skip(f"no network namespaces may be made here: {done.stderr.strip()}")
    with (Path(tempfile.gettempdir()) / "soap-emulation-tests").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield found


def traces(groups: CpuGroups, number: int | None = None) -> list[str]:
    """Everything on this box that bears an emulation's name: this one's, or any's."""
    folders = (NAMESPACES, INTERFACES, groups.root, emulate.LOCKS)
    return [f"{folder}/{name}" for folder in folders for name in names_in(folder, number)]


def abandoned(groups: CpuGroups) -> list[str]:
    """What belongs to no emulation that is alive. Others than the tests' may be, and come and go."""
    return [trace for trace in traces(groups) if not _is_alive(number_of(Path(trace).name))]


def _is_alive(number: int | None) -> bool:
    try:
        with (emulate.LOCKS / f"soap-emulation-{number}").open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
