"""Torch's own log, silenced where an error that is raised says enough."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.export._trace


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Inside, no logger of torch's writes anything, nor does torch.export print graphs: it does both for errors that it raises as well."""
    loggers = [one for name, one in logging.root.manager.loggerDict.items() if name.split(".")[0] == "torch"]
    found = [(one, one.disabled) for one in loggers if isinstance(one, logging.Logger)]
    for logger, _ in found:
        logger.disabled = True
    printing: Any = torch.export._trace
    printing.print = lambda *_, **__: None  # before the built-in one, in that module alone
    try:
        yield
    finally:
        del printing.print
        for logger, before in found:
            logger.disabled = before
