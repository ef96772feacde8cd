"""Linux's control groups with little memory, for tests under a hard limit. They need root; a test skips where they do not limit memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

FIRST, SECOND = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
VERSIONS = (1, 2)
"""Of control groups; both limit memory on no system."""


@dataclass(frozen=True)
class Group:
    """``peak``: the file that says the most it has held."""

    path: Path
    peak: Path

    def enter(self) -> None:
        """Put this process into the group. What it holds already stays with the group that it leaves."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))


def why_not(version: int) -> str:
    """Why control groups of a version cannot limit memory here; empty if they can."""
    if os.geteuid() != 0:
        return "needs root, for control groups"
    controllers = SECOND / "cgroup.controllers"
    able = (FIRST / "memory.limit_in_bytes").exists()
    if version == 2:
        able = controllers.exists() and "memory" in controllers.read_text().split()
    return "" if able else f"control groups of version {version} do not limit memory here"


@contextmanager
def limited(limit_bytes: int, version: int | None = None) -> Iterator[Group]:
    """A group with so much memory, and no more in swap; the test skips if there is none of this version, or of any."""
    known = VERSIONS if version is None else (version,)
    able = [own for own in known if not why_not(own)]
    if not able:
        pytest.skip(why_not(known[0]))
    name = f"soap-tests-{uuid4().hex[:8]}"
    if able[0] == 1:
        own, limit = Group(FIRST / name, FIRST / name / "memory.max_usage_in_bytes"), "memory.limit_in_bytes"
    else:
        (SECOND / "cgroup.subtree_control").write_text("+memory")
        own, limit = Group(SECOND / name, SECOND / name / "memory.peak"), "memory.max"
    own.path.mkdir()
    (own.path / limit).write_text(str(limit_bytes))
    if able[0] == 2:
        (own.path / "memory.swap.max").write_text("0")
    try:
        yield own
    finally:
        _remove(own.path)


def _remove(path: Path) -> None:
    """Its processes may be ending still."""
    for _ in range(100):
        try:
            path.rmdir()
            return
        except OSError:
            time.sleep(0.1)
