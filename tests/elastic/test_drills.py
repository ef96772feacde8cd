"""Training goes on, and counts each sample as often as there are epochs, whatever is killed at random moments; three of each kind."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from benchmarks.kill_drills import DRILLS, NEED_ROOT, drill

pytestmark = pytest.mark.long


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [*DRILLS])
def test_nothing_is_lost_counted_twice_or_left_behind(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra 'elastic'")
    if kind in NEED_ROOT and (os.geteuid() != 0 or shutil.which("ip") is None):
        pytest.skip("needs root and iproute2")
    found = drill(kind, random.randrange(10**6), 3, tmp_path / "run")
    assert not found.wrong, found
    assert len(found.events) == 3
