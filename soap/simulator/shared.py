"""What engines of one graph, cluster and cost model share: worked out once, and only read from then on.

A search has many engines: two that follow its descents, one for each chain, others that compare what was found. Each numbers variants,
geometries and sets of devices by itself, in arrays that compiled code reads. What fills these arrays does not depend on the engine. Threads
may ask at the same time: what two of them work out at once is equal, and one of both is kept.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.simulator.communication.prices import Communication
from soap.simulator.compiled.graph_arrays import ClusterTables, GraphTables, cluster_tables, graph_tables
from soap.simulator.compiled.syncs.codes import SyncCodes
from soap.simulator.costs import CostModel
from soap.simulator.cut_operators import CutOperators
from soap.simulator.draws import links_between_hosts
from soap.simulator.memory.variant_memory import VariantMemories
from soap.strategy.wrapped import USUAL


class Shared:
    """``communication``, ``between_hosts``: prices of the topology, and its ``draws.links_between_hosts``, if not the usual ones
    (``folding``). ``training``: what training adds to compressed parameters. ValueError if it has modules wrapped
    as another trainer does: engines know groups by size alone."""

    def __init__(
        self,
        graph: OperatorGraph,
        topology: Topology,
        costs: CostModel,
        training: PlannedTraining = PLAIN,
        communication: Communication | None = None,
        between_hosts: NDArray[np.bool_] | None = None,
    ) -> None:
        if training.wrapped != USUAL:
            raise ValueError("engines do not know modules that another trainer wraps; expected Simulator.predict")
        self.graph, self.topology, self.costs, self.training = graph, topology, costs, training
        self.communication = communication or Communication(topology)
        self.between_hosts = links_between_hosts(topology) if between_hosts is None else between_hosts
        self.cuts = CutOperators(graph, topology, costs)
        self.codes = SyncCodes()

    @cached_property
    def memories(self) -> VariantMemories:
        """What tiles keep."""
        return VariantMemories(self.graph, self.topology, self.cuts)

    @cached_property
    def graph_tables(self) -> GraphTables:
        """The graph's arrays."""
        return graph_tables(self.graph, self.topology)

    @cached_property
    def cluster_tables(self) -> ClusterTables:
        """The cluster's arrays."""
        return cluster_tables(self.communication)
