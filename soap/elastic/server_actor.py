"""A server: the store of its partitions behind a listener. Killed and started anew by Ray, it recovers from its folder."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from soap.elastic.layout import Layout
from soap.elastic.leases import Steps
from soap.elastic.messages import Buffer, decode, encode
from soap.elastic.session import module
from soap.elastic.store import Store
from soap.elastic.transport import Listener
from soap.elastic.worker import Source
from soap.errors import SoapWarning
from soap.runtime.updates.optimizers import OptimizerFactory


@dataclass(frozen=True)
class Keeping:
    """How servers keep partitions, see ``Store``: each below ``folder`` on its own machine. ``temporary``: removed on close."""

    folder: str
    optimizer: OptimizerFactory
    lazy: bool = False
    fsync: bool = False
    snapshot_every_pushes: int | None = 1000
    snapshot_every_s: float | None = None
    temporary: bool = False

    def remove(self, server: int) -> None:
        """Remove what a closed server has on its machine, if it is temporary; the folder too, if nothing else is there."""
        if self.temporary:
            shutil.rmtree(self._own(server), ignore_errors=True)
            with suppress(OSError):
                Path(self.folder).rmdir()

    def _own(self, server: int) -> Path:
        return Path(self.folder) / f"server-{server}"

    def store(
        self, server: int, layout: Layout, source: Source, steps: Steps | None = None, initial: Sequence[Tensor] | None = None
    ) -> Store:
        """The server's store, as its folder has it, or as the model begins. ``steps``: if an update is that of a whole step. ``initial``:
        values of the server's partitions to begin with; None: the model's."""
        values = layout.initial(server, source.load().parameters) if initial is None else initial
        return Store(
            self._own(server),
            layout.of_server(server),
            values,
            self.optimizer,
            lazy=self.lazy,
            fsync=self.fsync,
            snapshot_every_pushes=self.snapshot_every_pushes,
            snapshot_every_s=self.snapshot_every_s,
            steps=steps,
        )


class Server:
    """In an actor. ``host``: the address to listen on; None: Ray's of this machine. ``steps``, ``initial``: see ``Keeping.store``."""

    def __init__(
        self,
        server: int,
        layout: Layout,
        source: Source,
        keeping: Keeping,
        secret: bytes,
        host: str | None = None,
        steps: Steps | None = None,
        initial: Sequence[Tensor] | None = None,
    ) -> None:
        self._warned: list[str] = []
        warnings.simplefilter("always", SoapWarning)
        warnings.showwarning = lambda message, *_, **__: self._warned.append(str(message))  # the launcher shows them
        self._remove = partial(keeping.remove, server)
        self._store = keeping.store(server, layout, source, steps, initial)
        self._listener = Listener(self._answer, secret, host or str(module().util.get_node_ip_address()))

    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self._listener.host, self._listener.port

    def warnings(self) -> list[str]:
        """What there was to warn of since this was last asked."""
        said, self._warned = self._warned, []
        return said

    def process(self) -> int:
        """This process's number."""
        return os.getpid()

    def close(self) -> list[str]:
        """Answer nobody any more, and let the store go; of a temporary one nothing is left. Returns what ``warnings`` does."""
        self._listener.close()
        self._store.close()
        self._remove()
        return self.warnings()

    def _answer(self, frame: memoryview) -> Sequence[Buffer]:
        return encode(self._store.answer(decode(frame)))
