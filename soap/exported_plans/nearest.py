"""The nearest configuration that a target can be told: of all that it knows, that in which least of the plan is otherwise.

Where operators are, how parameters are shared and what is recomputed are chosen one after the other, each by the share that differs: of the
work of operators, of the bytes of parameters, of the work again. Equally near placements are left to the caller, who can simulate them, and
so are the configurations near it (``near``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.exported_plans.configuration import (
    Base,
    Configuration,
    Pipeline,
    Recompute,
    Sharing,
    meaning,
    placement,
    recomputing,
    shared,
    widths,
)
from soap.exported_plans.contract import Target
from soap.exported_plans.layers import Layers
from soap.model.batch import samples_of
from soap.model.graph import OperatorGraph
from soap.schedules.named import parse
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.megatron import ExpertMapping, operator_work
from soap.strategy.recomputation import without_gathering
from soap.strategy.stages import chunks_of
from soap.strategy.sync import shares_in_hosts
from soap.strategy.tensor_parallel_chains import expert_factor


@dataclass(frozen=True)
class Nearest:
    """``configuration`` means ``strategy``. ``notes``: what it could not be told, beside what the two strategies differ in."""

    configuration: Configuration
    strategy: Strategy
    notes: tuple[str, ...]


Choose = Callable[[Sequence[Strategy]], int]
"""Which of several equally near strategies is best."""


def nearest(target: Target, graph: OperatorGraph, topology: Topology, strategy: Strategy, choose: Choose) -> Nearest:
    """The configuration, and what it means. StrategyError if the plan is none of one step of all, or its samples do not divide."""
    strategy.require_exact()
    if strategy.workers is not None:
        raise StrategyError(f"virtual workers cannot be told to {target.title}; expected a strategy of one step of all devices")
    samples, notes = samples_of(graph), list[str]()
    if samples is None:
        raise StrategyError(f"model {graph.name!r} has no dimension of samples, by which {target.title} counts batches; expected one")
    candidates = list(_candidates(target, graph, topology, strategy, samples, notes))
    if not candidates:
        raise StrategyError(
            f"{samples} samples on {len(topology.workers)} devices: {target.title} gives each device equally many, and splits no other way "
            "that fits; expected a multiple, or another target"
        )
    chosen = _nearest_placement(graph, topology, strategy, candidates, choose)
    chosen = _nearest_sharing(target, graph, topology, strategy, chosen)
    depths = _depths(target, Layers(graph), chosen)
    chosen = replace(chosen, prefetch=min(depths, key=lambda depth: (abs(depth - strategy.prefetch), depth)))
    chosen = _nearest_recompute(target, graph, topology, strategy, chosen)
    offload = target.offloads and _offloaded_share(graph, strategy) > 0.5
    chosen = replace(chosen, offload=offload)
    if chosen.microbatches != strategy.microbatches:
        notes.append(f"{strategy.microbatches} micro-batches become {chosen.microbatches}, which divide the samples of a device")
    return Nearest(chosen, meaning(graph, topology, chosen), tuple(dict.fromkeys(notes)))


def near(target: Target, topology: Topology, layers: Layers, nearest: Configuration) -> tuple[Configuration, ...]:
    """The nearest configuration, then those that only share parameters otherwise, or gather more or less ahead."""
    found = [nearest]
    for sharing in _sharing(target, topology, nearest):
        own = replace(nearest, sharing=sharing)
        found += [replace(own, prefetch=depth) for depth in _depths(target, layers, own)]
    return tuple(dict.fromkeys(found))


def _depths(target: Target, layers: Layers, own: Configuration) -> tuple[int, ...]:
    """How far ahead the target can be told to gather modules; where these are gathered once for all micro-batches they wait for nothing."""
    wrapped = target.wraps(own, layers)
    gathers = own.sharing in ("fsdp", "hsdp") or (own.sharing == "zero1" and wrapped.kept and wrapped.modules)
    once = own.microbatches > 1 and (own.pipeline is not None or wrapped.once)
    return target.depths if gathers and not once else target.depths[:1]


def _candidates(
    target: Target, graph: OperatorGraph, topology: Topology, strategy: Strategy, samples: int, notes: list[str]
) -> Iterator[Configuration]:
    world, pipeline = len(topology.workers), _pipeline(target, graph, topology, strategy, notes)
    mapping = expert_mapping(graph, strategy) if target.maps_experts else None

    def mappings(base: Base) -> list[ExpertMapping | None]:
        return [None] if mapping is None or base not in MAPPED else [None, mapping]

    for base in target.bases:
        if base == "single":
            homes = {device for config in strategy.operators.values() for device in config.devices}
            for device in homes if len(homes) == 1 else ():
                yield from _divided(target, Configuration("single", 1, 1, samples, device), strategy.microbatches)
            continue
        for width in widths(graph, topology, base, world):
            for own in mappings(base):
                yield from _divided(target, Configuration(base, width, world, samples, mapping=own), strategy.microbatches)
    if pipeline is not None:
        splits: list[Base] = [base for base in ("tensor", "sequence") if base in target.bases]
        shapes = [("data", 1), *((base, width) for base in splits for width in widths(graph, topology, base, world // pipeline.stages))]
        for base, width in shapes:
            for own in mappings(base):
                piped = Configuration(base, width, world, samples, pipeline=pipeline, mapping=own)
                yield from _divided(target, piped, strategy.microbatches)


MAPPED: tuple[Base, ...] = ("data", "sequence")
"""Bases beside which experts may lie in their own way: Megatron wants sequences split where layers of mixtures are."""


def expert_mapping(graph: OperatorGraph, strategy: Strategy) -> ExpertMapping | None:
    """How operators with experts have these; None if they are not divided. Where two matrices are one, it is split twice as often."""
    found = []
    for op in graph.operators:
        factor = expert_factor(graph, op)
        if factor is not None:
            degrees, own = strategy.operators[op.name].degrees, {dim.factor for operand in op.parameters for dim in operand.dims}
            found.append((degrees[factor], prod(degrees[other] for other in own if other is not None and other != factor)))
    mapping = ExpertMapping(*(min(own) for own in zip(*found, strict=True))) if found else ExpertMapping(1)
    return mapping if mapping.parallel > 1 else None


def _divided(target: Target, configuration: Configuration, microbatches: int) -> Iterator[Configuration]:
    """The configuration with as many micro-batches, or fewer, as divide the samples of each device; none if not even these divide."""
    if configuration.samples % configuration.data:
        return
    each = configuration.samples // configuration.data
    for count in range(min(microbatches, each), 0, -1):
        own = replace(configuration, microbatches=count)
        if each % count == 0 and not (own.pipeline is not None and target.allows(own)):
            yield own
            return


def _pipeline(target: Target, graph: OperatorGraph, topology: Topology, strategy: Strategy, notes: list[str]) -> Pipeline | None:
    """The strategy's pipeline as the target has it; None if it has none, or there is none."""
    if not strategy.stages:
        return None
    chunks, schedule = chunks_of(graph, strategy.stages), parse(strategy.schedule or "1f1b")
    if not target.schedules:
        notes.append(f"the pipeline of {max(chunks) + 1} chunks: {target.title} is not told of any in its configuration")
        return None
    if schedule.schedule.name not in target.schedules or schedule.placement != "loop":
        other = "interleaved" if schedule.chunks > 1 else "1f1b"
        notes.append(f"schedule {schedule} becomes {other}")
        schedule = parse(other if schedule.chunks == 1 else f"{other}:{schedule.chunks}")
    rounded, world = Layers(graph).rounded(chunks) if len(Layers(graph).names) else None, len(topology.workers)
    if rounded is None:
        notes.append(f"the pipeline: a chunk of its {max(chunks) + 1} has no whole layer, by names of modules with numbers")
        return None
    pipeline = Pipeline(rounded, str(schedule))
    if world % pipeline.stages:
        notes.append(f"the pipeline: {world} devices do not divide into {pipeline.stages} stages of as many devices each")
        return None
    moved = sum(a != b for a, b in zip(rounded, chunks, strict=True))
    if moved:
        notes.append(f"borders of stages: {moved} of {len(chunks)} operators move to the stage of their layer")
    return pipeline


def _nearest_placement(
    graph: OperatorGraph, topology: Topology, strategy: Strategy, candidates: Sequence[Configuration], choose: Choose
) -> Configuration:
    work = operator_work(graph)
    made: list[tuple[tuple[int, int], Configuration, Strategy]] = []
    for own in candidates:
        try:
            other = placement(graph, topology, own)
            other.validate(graph, topology.device_count)
        except StrategyError:  # such as micro-batches of fewer samples than a stage has devices
            continue
        pairs = [(strategy.operators[op.name], other.operators[op.name]) for op in graph.operators]
        otherwise = sum(amount for (a, b), amount in zip(pairs, work, strict=True) if not _split_alike(a, b))
        elsewhere = sum(amount for (a, b), amount in zip(pairs, work, strict=True) if a.devices != b.devices)
        piped = (own.pipeline is None) != (not strategy.stages)
        made.append(((otherwise + piped * sum(work), elsewhere), own, other))
    if not made:
        raise StrategyError(f"no configuration divides model {graph.name!r}; expected as many samples as devices, at least")
    least = min(distance for distance, _, _ in made)
    near = [(own, other) for distance, own, other in made if distance == least]
    return near[0 if len(near) == 1 else choose([other for _, other in near])][0]


def _split_alike(a: OpConfig, b: OpConfig) -> bool:
    return (a.degrees, a.replicas, a.shares) == (b.degrees, b.replicas, b.shares)


def _nearest_sharing(target: Target, graph: OperatorGraph, topology: Topology, strategy: Strategy, chosen: Configuration) -> Configuration:
    usual = placement(graph, topology, chosen)
    found: list[tuple[int, int, Sharing]] = []
    for sharing in _sharing(target, topology, chosen):
        other = shared(graph, topology, usual, sharing)
        trained = [tensor for tensor in graph.parameters if tensor.requires_grad]
        differing = [t for t in trained if replace(strategy.sync(t.name), offload=False) != other.sync(t.name)]
        steps = [t.bytes * abs(_shared(strategy.sync(t.name).word) - _shared(other.sync(t.name).word)) for t in differing]
        found.append((sum(t.bytes for t in differing), sum(steps), sharing))
    if not found:
        raise StrategyError(f"{target.title} has no way to keep parameters of {chosen.base} parallelism here; expected another target")
    return replace(chosen, sharing=min(found, key=lambda own: own[:2])[2])


def _sharing(target: Target, topology: Topology, chosen: Configuration) -> list[Sharing]:
    """The kinds of sharing that the target has for a configuration."""
    kinds: tuple[Sharing, ...] = target.sharing if chosen.world > 1 else ("none",)
    able = [sharing for sharing in kinds if sharing != "hsdp" or shares_in_hosts(topology)]
    return [sharing for sharing in able if not target.allows(replace(chosen, sharing=sharing))]


def _shared(word: str) -> int:
    """How much of a parameter owners share: nothing, its states, or values, too, inside hosts or among all."""
    return ("zero", "hsdp", "fsdp").index(word) + 1 if word in ("zero", "hsdp", "fsdp") else 0


def _nearest_recompute(
    target: Target, graph: OperatorGraph, topology: Topology, strategy: Strategy, chosen: Configuration
) -> Configuration:
    usual, work = placement(graph, topology, chosen), operator_work(graph)
    found: list[tuple[int, Recompute]] = []
    for recompute in target.recompute:
        other = recomputing(graph, usual, recompute)
        levels = [[without_gathering(one.operators[op.name].recompute) for op in graph.operators] for one in (strategy, other)]
        pairs = zip(*levels, strict=True)
        found.append((sum(amount for (a, b), amount in zip(pairs, work, strict=True) if a != b), recompute))
    return replace(chosen, recompute=min(found, key=lambda own: own[0])[1])


def _offloaded_share(graph: OperatorGraph, strategy: Strategy) -> float:
    sizes = {tensor.name: tensor.bytes for tensor in graph.parameters if tensor.requires_grad}
    return sum(size for name, size in sizes.items() if strategy.sync(name).offload) / max(1, sum(sizes.values()))
