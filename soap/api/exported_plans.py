"""Plans for other trainers: what they can be told of a strategy, what it means here, and what the difference costs by prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soap.api.models import Cluster, Model, graph_of, topology_of
from soap.api.predictions import simulator_for
from soap.cluster.topology import Topology
from soap.exported_plans.configuration import Configuration
from soap.exported_plans.contract import Target, Written
from soap.exported_plans.layers import Layers
from soap.exported_plans.named import target_named
from soap.exported_plans.nearest import nearest
from soap.model.batch import samples_of, tokens_of
from soap.model.graph import OperatorGraph
from soap.simulator.costs import CostSource
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy
from soap.strategy.diff import Comparison, compare
from soap.strategy.grids import tensor_parallel_width
from soap.strategy.json_file import dumps, load_contents


@dataclass(frozen=True)
class ExportedPlan:
    """``text``: of the file. ``configuration`` means ``strategy``. ``comparison``: of the plan and that strategy. ``planned``,
    ``exported``: the predictions of both. ``notes``: what the configuration could not be told, beside what ``comparison`` lists."""

    target: Target
    text: str
    configuration: Configuration
    strategy: Strategy
    comparison: Comparison
    planned: Simulation | FoldedSimulation
    exported: Simulation | FoldedSimulation
    notes: tuple[str, ...]


def export_plan(
    strategy: Strategy, model: Model, cluster: Cluster, to: str, *, autocast: str | None = None, costs: CostSource = "auto"
) -> ExportedPlan:
    """The configuration of another trainer that is nearest to a strategy (``soap.exported_plans.nearest``): ``to`` is torchtitan, fsdp2,
    megatron or deepspeed. ``autocast``: the type of mixed precision that the model was loaded with.

    StrategyError in one line if there is no such target, or the strategy is no exact step of all devices.
    """
    target, graph, topology = target_named(to), graph_of(model), topology_of(cluster)
    simulator = simulator_for(graph, topology, costs=costs)

    def fastest(strategies: Sequence[Strategy]) -> int:
        return min(range(len(strategies)), key=lambda i: simulator.predict(strategies[i]).makespan_ns)

    found = nearest(target, graph, topology, strategy, fastest)
    planned, exported = simulator.predict(strategy), simulator.predict(found.strategy)
    comparison = compare(*(load_contents(dumps(own, graph, topology)) for own in (strategy, found.strategy)))
    text = target.write(_written(target, found.configuration, simulator, autocast, (planned, exported)))
    return ExportedPlan(target, text, found.configuration, found.strategy, comparison, planned, exported, found.notes)


def _written(
    target: Target,
    configuration: Configuration,
    simulator: Simulator,
    autocast: str | None,
    predicted: tuple[Simulation | FoldedSimulation, Simulation | FoldedSimulation],
) -> Written:
    graph, topology = simulator.graph, simulator.topology
    planned, exported = (f"{own.makespan_ns / 1e6:.3f} ms" for own in predicted)
    samples, tokens = samples_of(graph), tokens_of(graph)
    facts = (
        f"{target.title} {target.version}: nearest to a plan of SOAP for {_one_line(graph.name)} on {_one_line(topology.name)}",
        f"{configuration.world} device{'s' * (configuration.world > 1)}; predicted per step: the plan {planned}, this {exported}",
    )
    return Written(
        configuration, graph, topology, Layers(graph), _dtype(graph), autocast, tokens // samples if tokens and samples else None,
        _devices_each(topology), facts,
    )


def _one_line(text: str) -> str:
    return " ".join(text.replace('"', "'").replace("\\", "/").split())[:80]


def _dtype(graph: OperatorGraph) -> str:
    """The type of most bytes of parameters."""
    sizes: dict[str, int] = {}
    for tensor in graph.parameters:
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default="float32")


def _devices_each(topology: Topology) -> int:
    """Devices of each host; a common divisor where hosts differ."""
    hosts = {topology.devices[device].host for device in topology.workers}
    return 1 if len(hosts) == len(topology.workers) else tensor_parallel_width(topology)
