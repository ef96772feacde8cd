"""Python's collector of cyclic garbage, out of the way for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Without it. It looks at all objects that there are whenever so many more have been made, which takes a third of the time in which
    plans of many ranks are made; and what it does while something is timed would be timed, too."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
