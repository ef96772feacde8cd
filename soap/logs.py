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
    named = [own for name, own in list(logging.root.manager.loggerDict.items()) if name.startswith(prefixes)]
    leveled = (own for own in named if isinstance(own, logging.Logger) and own.level)  # the others have the level of one above them
    loggers = [*{*map(logging.getLogger, prefixes), *leveled}]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
