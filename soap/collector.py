"""Python's collector of cyclic garbage, out of the way for a while. It looks at all objects that there are whenever so many more have been
made, which takes a third of the time in which large plans are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = (100_000, 20, 100)
"""Thresholds: see ``gc.set_threshold``."""


@contextmanager
def paused() -> Iterator[None]:
    """Without it: what it does while something is timed would be timed, too."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def seldom() -> Iterator[None]:
    """With fewer looks, where much is made: with no collection at all, one of the smaller compiled entries kept 180 MB of garbage."""
    usual = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
