"""Plans for other trainers: what they can be told of a strategy, what it means here, and what the difference costs by prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from soap.api.large_plans import Estimate, estimate
from soap.api.models import Cluster, Model, graph_of, topology_of
from soap.api.predictions import simulator_for
from soap.cluster.topology import Topology
from soap.exported_plans.configuration import Configuration, meaning
from soap.exported_plans.contract import Target, Written
from soap.exported_plans.layers import Layers
from soap.exported_plans.named import target_named
from soap.exported_plans.nearest import near, nearest
from soap.model.batch import samples_of, tokens_of
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PlannedTraining
from soap.plan.syncs.bucketing import BUCKET_BYTES, gather_limit
from soap.simulator.costs import CostSource
from soap.simulator.simulate import MOST_PLANNED_TILES, Simulator, tile_count
from soap.strategy.config import Strategy
from soap.strategy.diff import Comparison, compare
from soap.strategy.grids import tensor_parallel_width
from soap.strategy.json_file import dumps, load_contents
from soap.strategy.wrapped import USUAL, Wrapped

AS_FAST = 1.005
"""Times that differ by less than this are not told apart: then a file that differs less from the plan is the better one."""


@dataclass(frozen=True)
class Candidate:
    """A configuration of the target. ``strategy``: what of plans comes nearest to its file, by which readers share values that they gather
    before each use. ``wrapped``: how the target brings these together. ``predicted``: the time and memory of both."""

    configuration: Configuration
    strategy: Strategy
    wrapped: Wrapped
    predicted: Estimate

    @property
    def gathers(self) -> bool:
        """Whether readers gather values before they use them."""
        return bool(self.wrapped.kept) or self.configuration.sharing in ("fsdp", "hsdp")


@dataclass(frozen=True)
class ExportedPlan:
    """``text``: of the file. ``chosen``: its configuration, of those that were ``compared``, the nearest first. ``strategy``: what that
    means in words of plans. ``comparison``: of the plan and that strategy. ``planned``: the plan's prediction. ``notes``: what the
    configuration could not be told, in addition to what ``comparison`` lists."""

    target: Target
    text: str
    chosen: Candidate
    compared: tuple[Candidate, ...]
    strategy: Strategy
    comparison: Comparison
    planned: Estimate
    notes: tuple[str, ...]

    @property
    def configuration(self) -> Configuration:
        """The file's text."""
        return self.chosen.configuration

    @property
    def exported(self) -> Estimate:
        """The file's prediction."""
        return self.chosen.predicted


def export_plan(
    strategy: Strategy,
    model: Model,
    cluster: Cluster,
    to: str,
    *,
    autocast: str | None = None,
    costs: CostSource = "auto",
    nearest_only: bool = False,
) -> ExportedPlan:
    """The fastest configuration of another trainer near a strategy that fits into memory: the nearest (``soap.exported_plans.nearest``),
    or one that shares parameters otherwise, or gathers more or less of them ahead. Of several that are as fast (``AS_FAST``) it is the
    first of these. ``to``: torchtitan, fsdp2, megatron or deepspeed. ``autocast``: the type of mixed precision that the model was loaded
    with. ``nearest_only``: the nearest, however fast others are.

    StrategyError in one line if there is no such target, or the strategy is no exact step of all devices.
    """
    target, topology = target_named(to), topology_of(cluster)
    graph = graph_of(model, topology)
    simulator = simulator_for(graph, topology, costs=costs)

    def fastest(strategies: Sequence[Strategy]) -> int:
        return min(range(len(strategies)), key=lambda i: estimate(simulator, strategies[i]).makespan_ns)

    found, layers = nearest(target, graph, topology, strategy, fastest), Layers(graph)
    others = () if nearest_only else near(target, topology, layers, found.configuration)[1:]
    wraps = {own: replace(target.wraps(own, layers), itemsize=2 * (autocast is not None)) for own in (found.configuration, *others)}
    simulators = {USUAL: simulator}
    candidates = tuple(_predicted(simulators, own, wrapped) for own, wrapped in wraps.items())
    least = min(own.predicted.overflow_bytes for own in candidates)
    able = [own for own in candidates if own.predicted.overflow_bytes == least]
    best_ns = min(own.predicted.makespan_ns for own in able)
    chosen = next(own for own in able if own.predicted.makespan_ns <= AS_FAST * best_ns)
    means = meaning(graph, topology, chosen.configuration)
    planned = estimate(simulator, strategy)
    comparison = compare(*(load_contents(dumps(own, graph, topology)) for own in (strategy, means)))
    text = target.write(_written(target, chosen.configuration, simulator, layers, autocast, (planned, chosen.predicted)))
    return ExportedPlan(target, text, chosen, candidates, means, comparison, planned, found.notes)


def _predicted(simulators: dict[Wrapped, Simulator], own: Configuration, wrapped: Wrapped) -> Candidate:
    """Where the target keeps values that others update, it gathers them before their first uses, not after the update. Plans of very many
    tiles are priced as if parameters came together as in SOAP: engines know no other way."""
    usual = simulators[USUAL]
    strategy = meaning(usual.graph, usual.topology, replace(own, sharing="fsdp") if own.sharing == "zero1" and wrapped.kept else own)
    if tile_count(strategy) > MOST_PLANNED_TILES:
        wrapped = USUAL
    if wrapped not in simulators:
        training = PlannedTraining(wrapped=wrapped)
        simulators[wrapped] = Simulator(usual.graph, usual.topology, usual.costs, usual.optimizer_states, training)
    return Candidate(own, strategy, wrapped, estimate(simulators[wrapped], strategy))


def _written(
    target: Target,
    configuration: Configuration,
    simulator: Simulator,
    layers: Layers,
    autocast: str | None,
    predicted: tuple[Estimate, Estimate],
) -> Written:
    graph, topology = simulator.graph, simulator.topology
    planned, exported = (f"{own.makespan_ns / 1e6:.3f} ms" for own in predicted)
    itemsize = max((tensor.itemsize for tensor in graph.parameters), default=4)
    samples, tokens = samples_of(graph), tokens_of(graph)
    facts = (
        f"{target.title} {target.version}: near a plan of SOAP for {_one_line(graph.name)} on {_one_line(topology.name)}",
        f"{configuration.world} device{'s' * (configuration.world > 1)}; predicted per step: the plan {planned}, this {exported}",
    )
    return Written(
        configuration, graph, topology, layers, _dtype(graph), autocast, tokens // samples if tokens and samples else None,
        _devices_each(topology), gather_limit(graph) // itemsize, BUCKET_BYTES // itemsize, facts,
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
