"""What goes wrong in training with workers without state."""

from __future__ import annotations

from soap.errors import SoapError


class ElasticError(SoapError):
    """A session, a server or a worker cannot do what it is asked to."""
