"""SIGALRM for time limits: a test's own time limit, which uses it, pauses meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def alarm() -> Iterator[None]:
    """SIGALRM is free within the test, and afterwards as it was."""
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, 0.0)
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
