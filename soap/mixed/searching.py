"""The best virtual workers of a cluster: which devices make a worker, its stages, and how many minibatches are in flight.

All workers have the same number in flight, at most what the least of them has memory for (Maxm), chosen by throughput. Divisions of the
devices are put into an order by what the slowest stages allow; the first few are simulated, and so are HetPipe's policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from soap.cluster.topology import Topology
from soap.elastic.faults import ElasticError
from soap.elastic.simulation.steady import SETTLED
from soap.elastic.simulation.unroll import NO_DELAYS, Delays
from soap.mixed.partitioning import MOST_CONSIDERED, Allocation, Partitioner, WorkerPlan, allocations, placed, policies, require_room
from soap.mixed.steady import MixedSteady, simulate
from soap.model.batch import samples_of
from soap.model.graph import OperatorGraph
from soap.simulator.costs import CostModel

MOST_SIMULATED = 8
"""Divisions beside the policies."""
PATIENCE = 2
"""When so many more minibatches in flight, one by one, have not helped, no more are tried."""


@dataclass(frozen=True)
class Found:
    """``plans``: by worker. ``most_in_flight``: by worker, with how many minibatches in flight it fits (Maxm)."""

    allocation: Allocation
    plans: tuple[WorkerPlan, ...]
    most_in_flight: tuple[int, ...]
    steady: MixedSteady

    @property
    def in_flight(self) -> int:
        """Of each worker."""
        return self.plans[0].in_flight


def fitting(tries: Iterable[tuple[Finder, Allocation]]) -> list[Found]:
    """The allocations that fit, each with its best number of minibatches in flight. The first one's ElasticError if none does."""
    found, problems = list[Found](), list[ElasticError]()
    for finder, allocation in tries:
        try:
            found.append(finder.best_in_flight(allocation))
        except ElasticError as problem:
            problems.append(problem)
    if problems and not found:
        raise problems[0]
    return found


class Finder:
    """Looks for the best workers for one model on one cluster. ``graph``: of one minibatch. ``bound``: D, in waves; None for none."""

    def __init__(self, graph: OperatorGraph, topology: Topology, costs: CostModel, bound: int | None, delays: Delays = NO_DELAYS) -> None:
        if bound is not None and bound < 0:
            raise ElasticError(f"a bound of {bound} waves; expected 0 or more, or none")
        self._partitioner, self._topology = Partitioner(graph, topology, costs, bound), topology
        self._batch, self._bound, self._delays = samples_of(graph) or 1, bound, delays

    def best_in_flight(self, allocation: Allocation) -> Found:
        """The best number of minibatches in flight for these workers, the least of equal ones. More are tried as long as that helps.
        ElasticError if one of the workers fits nowhere, or a host lacks memory for servers."""
        for devices in allocation.workers:
            self._partitioner.require_fits(devices)
        most = self._most(allocation)
        best, worse = self._with(allocation, 1, most), 0
        for in_flight in range(2, min(most) + 1):
            found = self._with(allocation, in_flight, most)
            better = found.steady.samples_per_second > (1 + SETTLED) * best.steady.samples_per_second
            best, worse = (found, 0) if better else (best, worse + 1)
            if worse == PATIENCE:
                break
        return best

    def with_in_flight(self, allocation: Allocation, in_flight: int) -> Found:
        """These workers with so many minibatches in flight. ElasticError if that does not fit."""
        most = self._most(allocation)
        if not 1 <= in_flight <= min(most):
            raise ElasticError(f"{in_flight} minibatches in flight of allocation {allocation.name!r}; expected 1 to {min(most)}: memory")
        return self._with(allocation, in_flight, most)

    def _most(self, allocation: Allocation) -> tuple[int, ...]:
        return tuple(self._partitioner.most_in_flight(own, MOST_CONSIDERED) for own in allocation.workers)

    def _with(self, allocation: Allocation, in_flight: int, most: tuple[int, ...]) -> Found:
        plans = self._plans(allocation, in_flight)
        return Found(allocation, plans, most, self._simulated(allocation, plans))

    def best(self, more: Iterable[Allocation] = ()) -> Found:
        """The best of all: the policies that suit the cluster, the most promising divisions, and ``more``. ElasticError if nothing fits."""
        candidates = [*policies(self._topology), *more, *self.promising()]
        return max(fitting((self, own) for own in candidates), key=lambda own: own.steady.samples_per_second)

    def promising(self, most: int = MOST_SIMULATED) -> list[Allocation]:
        """Divisions into equal workers that fit, by ``allowed_rate``, the best first."""
        rated = [(-self.allowed_rate(own), number, own) for number, own in enumerate(allocations(self._topology))]
        return [own for rate, _, own in islice(sorted(rated, key=lambda one: one[:2]), most) if rate < 0]

    def allowed_rate(self, allocation: Allocation) -> float:
        """Minibatches per second of all workers if nothing but the slowest stage or message held them up; 0 if one does not fit."""
        slowest_ns = 0
        for devices in allocation.workers:
            own = [plan for plan in (self._partitioner.plan(devices, count) for count in (len(devices), 1)) if plan is not None]
            if not own:
                return 0.0
            slowest_ns = max(slowest_ns, own[0].slowest_ns)
        return 1e9 * len(allocation.workers) / slowest_ns

    def _plans(self, allocation: Allocation, in_flight: int) -> tuple[WorkerPlan, ...]:
        plans = [self._partitioner.plan(own, in_flight) for own in allocation.workers]
        assert all(plan is not None for plan in plans), "most_in_flight has said that they fit"
        return tuple(plan for plan in plans if plan is not None)

    def _simulated(self, allocation: Allocation, plans: Sequence[WorkerPlan]) -> MixedSteady:
        placement = placed(self._topology, allocation, plans)
        require_room(self._topology, plans, placement, self._bound)
        return simulate(self._topology, plans, placement, self._batch, self._bound, delays=self._delays)
