"""Silencing the logs of libraries: we report each error ourselves, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

TRIALS = ("torch._subclasses.fake_tensor",)
"""Loggers of torch that print a traceback for every error in a trial on fake tensors, even if we catch it."""
NATIVE_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""Environment variable that torch's native code reads when it is loaded: the least severity that it prints to standard error."""


@contextmanager
def silenced(*prefixes: str) -> Iterator[None]:
    """Inside, loggers with these names, or below them, print nothing."""
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
