"""Random mixtures of all that an exact plan may do: any owner of each parameter, states on hosts, operators that run again, splits of
samples, tensors and sequences, micro-batches, on one host and on several. A mixture is a function of the model's name and a number alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from soap.cluster.topology import Topology
from soap.model.batch import MicroBatches
from soap.model.graph import OperatorGraph
from soap.strategy.classical import NAMED, random_strategy
from soap.strategy.config import Strategy
from soap.strategy.recomputation import ALL_LEVELS, repeatable, with_levels
from tests.micro_batches import in_micro_batches
from tests.runtime.sparse_plans import hosts, with_random_syncs

TOPOLOGIES = (hosts(2), hosts(1, 1), hosts(3), hosts(2, 1), hosts(4), hosts(2, 2))
"""Two to four devices; with several hosts, states and values may be shared inside each (HSDP)."""
SPLITS = ("data_parallel", "megatron", "sequence_parallel", "context_parallel")
"""What splits operators where they are not split at random, as in half of all mixtures."""
REPEATED = (0.0, 0.3, 0.7)
"""Shares of the operators that run again."""
COUNTS = (1, 2, 4)
"""Micro-batches, as far as there are samples."""


@dataclass(frozen=True)
class Mixture:
    """``model``: any name of a model."""

    model: str
    number: int

    @property
    def topology(self) -> Topology:
        """Neighbours have different ones."""
        first = random.Random(self.model).randrange(len(TOPOLOGIES))
        return TOPOLOGIES[(first + self.number) % len(TOPOLOGIES)]

    def strategy(self, graph: OperatorGraph) -> Strategy:
        """The strategy for ``topology``."""
        rng = random.Random(f"{self.model}/mixture {self.number}")
        random_splits = rng.random() < 0.5
        base = random_strategy(graph, self.topology, rng) if random_splits else NAMED[rng.choice(SPLITS)](graph, self.topology)
        mixed = marked(graph, with_random_syncs(graph, base, rng), rng, rng.choice(REPEATED))
        count = min(rng.choice(COUNTS), MicroBatches(graph, 1).samples or 1)
        return mixed if count == 1 else in_micro_batches(graph, mixed, count, rng, self.topology.device_count)


def marked(graph: OperatorGraph, strategy: Strategy, draw: random.Random, share: float = 0.7) -> Strategy:
    """The strategy with such a share of what may be recomputed marked, in any way."""
    names = [name for name in sorted(repeatable(graph)) if draw.random() < share]
    return with_levels(strategy, {name: draw.choice(ALL_LEVELS[1:]) for name in names})
