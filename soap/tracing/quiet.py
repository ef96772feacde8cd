"""Torch's own log, silenced where an error that is raised says enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.export._trace

from soap.logs import silenced


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Inside, no logger of torch's writes anything, nor does torch.export print graphs: it does both for errors that it raises as well."""
    printing: Any = torch.export._trace
    printing.print = lambda *_, **__: None  # before the built-in one, in that module alone
    try:
        with silenced("torch"):
            yield
    finally:
        del printing.print
