"""Whether the head of a Ray cluster is there. Without it Ray's calls wait for a minute, and then end the calling process with pages of
text; so whoever depends on it asks here first."""

from __future__ import annotations

import socket
import time

from soap.elastic.faults import ElasticError

REACH_S = 1.0
SILENT_S = 30.0
"""A head that refuses nobody, but does not answer for so long, is gone: Ray waits twice as long."""


class Pulse:
    """``address``: the head's, HOST:PORT. ``gone``: whether it was found to be."""

    def __init__(self, address: str) -> None:
        self.address, self.gone = address, False
        self._heard_s = time.monotonic()

    def check(self) -> None:
        """ElasticError in one line if nobody listens at the address, or nobody has answered there for ``SILENT_S``."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        except ConnectionRefusedError:
            self.gone = True
        except OSError:
            self.gone = time.monotonic() > self._heard_s + SILENT_S
        else:
            self._heard_s = time.monotonic()
        if self.gone:
            raise ElasticError(f"Ray's head at {self.address} is gone; start it again: the same call then goes on from what is done")
