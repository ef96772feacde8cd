"""What a rank has sent for micro-batches and nothing answers, until it has left (``soap.plan.departures``)."""

from __future__ import annotations

from collections import deque

from soap.plan.departures import PASSES_UNDER_WAY, Route
from soap.runtime.comm.redistribute import Communicator, Pending


class Departures:
    """The messages of one step. Those of a pass are let go before a later one sends."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._passes: dict[Route, deque[tuple[int, list[Pending]]]] = {}

    def of(self, route: Route, sending: int) -> list[Pending]:
        """Where to note what this pass sends there. Waits until what too early ones have sent has left."""
        passes = self._passes.setdefault(route, deque())
        if not passes or passes[-1][0] != sending:
            passes.append((sending, []))
            if len(passes) > PASSES_UNDER_WAY:
                for pending in passes.popleft()[1]:
                    self._comm.release(pending)
        return passes[-1][1]
