"""Keeping the logs of libraries from people: what goes wrong is told once, by us."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

TRIALS = ("torch._subclasses.fake_tensor",)
"""Loggers of torch that print a traceback of what is tried without values and raises, caught or not."""
NATIVE_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""What torch's native code reads when it is loaded: how bad must be what it prints to standard error."""


@contextmanager
def silenced(*prefixes: str) -> Iterator[None]:
    """Loggers with these names or below say nothing meanwhile."""
    names = {*prefixes, *(name for name in list(logging.root.manager.loggerDict) if name.startswith(prefixes))}  # each has its own level
    loggers = [logging.getLogger(name) for name in sorted(names)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
