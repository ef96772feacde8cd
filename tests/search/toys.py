"""Graphs and costs so small that their whole space can be enumerated."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import prod

from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search.alignment import Edge, aligned_with
from soap.search.compiled.runner import CompiledSpace
from soap.search.space import OperatorSpace, Space, make_config
from soap.simulator.costs import CostModel, nanoseconds
from soap.simulator.draws import Draws
from soap.simulator.engine import Engine
from soap.simulator.folding import Folding
from soap.simulator.incremental import IncrementalSimulator
from soap.simulator.shared import Shared
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import OpConfig, Strategy
from tests.graph_builder import SAMPLE, DimMap, Factor, GraphBuilder
from tests.simulator.examples import PointCosts

Key = tuple[tuple[str, OpConfig], ...]


def key_of(strategy: Strategy) -> Key:
    """A hashable form of a strategy."""
    return tuple(strategy.operators.items())


def aligned_configs(graph: OperatorGraph, strategy: Strategy, position: int, edges: tuple[Edge, ...]) -> list[OpConfig]:
    """Configurations of the operator that follow from its neighbours' configurations; equal ones may repeat."""
    names = [op.name for op in graph.operators]
    return [config for edge in edges for config in aligned_with(graph, strategy.operators[names[edge.neighbour]], position, edge)]


def drawn_from(own: OperatorSpace, rng: random.Random) -> OpConfig:
    """A configuration drawn in proportion to the reference measure."""
    if rng.random() * own.mass < own.structured_count:
        return own.draw_structured(rng)
    grid = rng.choices(own.grids, [own.shuffled_mass(grid) for grid in own.grids])[0]
    while True:
        devices = tuple(rng.sample(own.devices, prod(grid)))
        if not own.is_structured(grid, devices):
            return make_config(grid, devices)


def layers(count: int = 2, *, rows: int = 2, loss: bool = False) -> OperatorGraph:
    """``count`` equal pointwise layers ``layer.0``, ``layer.1``, … whose only factor is the batch; optionally a summed loss."""
    g = GraphBuilder("layers")
    x = g.input("x", rows)
    for i in range(count):
        x = g.elementwise(x, name=f"layer.{i}")
    if loss:
        x = g.operator("loss", [Factor("b", rows, SAMPLE, summed=True)], [(x, [DimMap(0)])], [], [((), ())], name="loss")[0]
    return g.build(x)


def simulated(graph: OperatorGraph, topology: Topology) -> IncrementalSimulator:
    """An evaluator for searches: a nanosecond for each point of a tile."""
    return IncrementalSimulator(Simulator(graph, topology, PointCosts(1)))


def compiled_space(space: Space, topology: Topology, costs: CostModel, draws: Draws | None = None) -> CompiledSpace:
    """A space as arrays, for chains that share nothing with others."""
    return CompiledSpace(space, Shared(space.graph, topology, costs), draws=draws)


class Lacking(IncrementalSimulator):
    """Memory is lacking as ``lacking`` says, where the cluster has so little that sums of all that is held do not tell."""

    def __init__(self, graph: OperatorGraph, topology: Topology, lacking: Callable[[Strategy], int]) -> None:
        super().__init__(Simulator(graph, replace(topology, limits=(1,) * topology.device_count), PointCosts(1)))
        self.lacking = lacking

    def overflow_bytes(self, strategy: Strategy) -> int:
        return self.lacking(strategy)

    def fits(self, strategy: Strategy, engine: Engine, folding: Folding | None = None) -> bool:
        return self.lacking(strategy) == 0

    def peak_share(self, strategy: Strategy) -> float:
        return 1.0 + self.lacking(strategy)

    def outcome(self, strategy: Strategy) -> Simulation | None:
        """None, as of large strategies."""
        return None


class Both:
    """Time and memory at once."""

    def cost(self, strategy: Strategy) -> tuple[int, int]:
        raise NotImplementedError

    def makespan_ns(self, strategy: Strategy) -> int:
        return self.cost(strategy)[0]

    def overflow_bytes(self, strategy: Strategy) -> int:
        return self.cost(strategy)[1]


class TableCosts(Both):
    """Costs drawn at random, but fixed by the strategy; ``overflow`` may say that bytes are lacking."""

    def __init__(self, seed: int, overflow: Callable[[Strategy], int] = lambda strategy: 0) -> None:
        self.seed = seed
        self.overflow = overflow
        self.table: dict[Key, int] = {}

    def cost(self, strategy: Strategy) -> tuple[int, int]:
        key = key_of(strategy)
        if key not in self.table:
            self.table[key] = random.Random(f"{self.seed} {key}").randint(900, 1100)
        return self.table[key], self.overflow(strategy)


class TileCosts(Both):
    """Every operator takes the time of its fullest device; an edge whose two ends are placed differently costs ``edge_ns``.

    Memory: every device that runs ``hungry`` needs ``tile_bytes`` per tile and has ``device_bytes``.
    """

    def __init__(self, graph: OperatorGraph, *, work_ns: int = 1200, edge_ns: int = 100, device_bytes: int | None = None) -> None:
        self.graph = graph
        self.work_ns = work_ns
        self.edge_ns = edge_ns
        self.device_bytes = device_bytes
        self.calls = 0

    def makespan_ns(self, strategy: Strategy) -> int:
        self.calls += 1
        return super().makespan_ns(strategy)

    def cost(self, strategy: Strategy) -> tuple[int, int]:
        time_ns = overflow_bytes = 0
        for op in self.graph.operators:
            config = strategy.operators[op.name]
            tiles = len(config.devices) // config.replicas
            fullest = max(config.devices.count(d) for d in config.devices)
            time_ns += fullest * self.work_ns // tiles
            sources = [self.graph.producers[o.tensor][0] for o in op.inputs if o.tensor in self.graph.producers]
            for source in sources:
                time_ns += self.edge_ns * (strategy.operators[self.graph.operators[source].name] != config)
            if self.device_bytes is not None:
                overflow_bytes = max(overflow_bytes, fullest * 1200 // tiles - self.device_bytes)
        return time_ns, overflow_bytes


class ManyCalls(RooflineCosts):
    """Updates of seven calls for each tensor, on whatever device: what is computed on several devices then gains where its parameters are
    apart."""

    def update_ns(self, parameter_bytes: int, device: DeviceType) -> int:
        """Traffic of Adam, and the calls."""
        return nanoseconds(7 * parameter_bytes / device.memory_bandwidth_bytes_per_second + 7 * device.kernel_seconds)
