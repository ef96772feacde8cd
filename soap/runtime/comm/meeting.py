"""Where the ranks of one launch meet: a store at the launcher's address alone, which is loopback unless hosts are emulated.

torch's own ``c10d`` rendezvous listens on all interfaces, lets in whoever comes, and unpickles what it is sent.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

BACKEND = "soap"
BACKLOG = 1024
"""Ranks that knock at once."""


class Meeting(StaticTCPRendezvous):
    """The meeting place of one launcher, whose store it is."""

    def __init__(self, address: str, run: str, timeout_s: int) -> None:
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((address, 0), family=family, backlog=BACKLOG) as listening:
            port = int(listening.getsockname()[1])
            super().__init__(address, port, 0, 1, run, timeout_s)
            limit = timedelta(seconds=timeout_s)
            self._store = TCPStore(
                address, port, None, True, limit, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=True
            )

    def get_backend(self) -> str:
        """Its name."""
        return BACKEND


def _made(parameters: RendezvousParameters) -> RendezvousHandler:
    return Meeting(parameters.endpoint, parameters.run_id, int(parameters.config["timeout"]))


rendezvous_handler_registry.register(BACKEND, _made)
