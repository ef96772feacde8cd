"""Silences torch's own log where an error that is raised says enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.export._trace

from soap.logs import silenced


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Within this context no logger of torch's writes anything, and torch.export prints no graphs: it does both for errors that it
    raises as well."""
    printing: Any = torch.export._trace
    printing.print = lambda *_, **__: None  # our ``print`` hides the built-in one, in that module alone
    try:
        with silenced("torch"):
            yield
    finally:
        del printing.print
