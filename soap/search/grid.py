"""Starts where data parallelism lacks memory: matrices split inside hosts, stages of such groups and micro-batches through these, states
or values in parts on the rest of the devices, and recomputation, all together ("3D" parallelism: Narayanan et al. 2021). Without stages,
micro-batches add up gradients.

Names are those of ``strategy.named``. Rough times put them in an order, and leave out what hardly beats the best start that fits; the first
few are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, inf
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from soap.cluster.topology import Topology
from soap.model.batch import MAX_MICROBATCHES, samples_of
from soap.model.graph import Operator, OperatorGraph
from soap.plan.copies import LEFT
from soap.schedules.named import SCHEDULES, NamedSchedule
from soap.schedules.play import equal, in_flight, play
from soap.search.pipelines import CHUNKS
from soap.search.rough_costs import RoughCosts
from soap.simulator.memory.footprint import kept_share, product_share
from soap.strategy.config import Strategy
from soap.strategy.grids import device_order, tensor_parallel_width
from soap.strategy.megatron import ExpertMapping, hybrid
from soap.strategy.named import (
    DATA_PARALLEL,
    FIRST_SCHEDULE,
    MEGATRON,
    MICRO_BATCHES,
    OF_EXPERTS,
    RECOMPUTE,
    SELECTIVE,
    SEQUENCE_PARALLEL,
    STAGES,
    WIDTH,
    on_top,
)
from soap.strategy.recomputation import LEVELS, LIGHT, RECOMPUTED, STAYS, run_levels
from soap.strategy.tensor_parallel_chains import expert_factor, find_chains

EXTENTS = MappingProxyType({"": STAYS, SELECTIVE: LIGHT, RECOMPUTE: RECOMPUTED})
"""What is put on top of a strategy so that all runs are recomputed -> to which extent."""
MOST_STAGES = 64
MOST_EVALUATED = 24
MOST_TILES = 2**22
"""All that are simulated together, but for the first one, have at most so many tiles: 2^18 take 4 to 8 s of a core."""
MOST_SCHEDULES = 4
MOST_SCHEDULED = 16
"""The best pipeline is simulated by so many other schedules, if it has at most so many stages."""
FEW = 3
"""Of more micro-batches than stages, so many more than these are played at once (``simulator.steady``), three times."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """A name, the time of a step by rough costs if all stages end together, and the bytes that a device then lacks by a rough estimate.
    ``parts``: micro-batches.
    ``least_ns``: the same if as many chunks as any schedule has on each stage fill the pipeline sooner. ``again``: how all runs are
    recomputed, ``RECOMPUTE`` or but for their products (``SELECTIVE``); empty if none is. ``tiles``: so many are played to tell its time:
    of two copies, and of many micro-batches few (``simulator.steady``)."""

    name: str
    stages: int
    parts: int
    again: str
    expected_ns: int
    least_ns: int
    lacking_bytes: int
    tiles: int


def mixtures(graph: OperatorGraph, topology: Topology, rough: RoughCosts, optimizer_states: int, *, recompute: bool) -> list[Mixture]:
    """The grid of widths of tensor parallelism, up to ``MOST_STAGES`` stages, micro-batches and recomputation, the most promising first;
    without data parallelism of all samples at once. ``recompute``: whether operators may run again."""
    samples, count, found, order = samples_of(graph) or 1, len(topology.workers), list[Mixture](), device_order(topology)
    extents = EXTENTS.items() if recompute else [("", STAYS)]
    for tensor, mapping in product(_widths(graph, topology), _mappings(graph, topology)):
        own = _figures(graph, hybrid(graph, topology, tensor=tensor, scatters=True, experts=mapping), rough)
        for stages, (again, extent) in product((2**k for k in range(MOST_STAGES.bit_length())), extents):
            copies = count // (tensor * stages)
            if count % (tensor * stages) or stages > len(graph.operators) or (mapping and count // stages % mapping.parallel):
                continue
            for parts in _parts(min(samples // copies, MAX_MICROBATCHES), stages):
                if tensor * stages * parts == 1:
                    continue
                busy_ns = own.passes_ns + own.again_ns[extent]
                filled_ns, least_ns = (busy_ns + busy_ns * (stages - 1) // (parts * chunks) for chunks in (1, max(CHUNKS)))
                sum_ns = rough.communication.allreduce(own.trained_bytes, order[:: tensor * stages])[0] if copies > 1 else 0
                kept_bytes = own.kept_bytes[extent] * min(stages, parts) // parts
                states = optimizer_states / copies
                held_bytes, limit = round(own.trained_bytes * (2 + states)) // stages + kept_bytes, min(topology.memory_limits)
                sharing = ("fsdp" if parts == 1 or (stages == 1 and held_bytes > limit) else "zero1") if copies > 1 else ""
                if sharing == "fsdp":  # about: each micro-batch gathers values twice and scatters gradients, while others compute
                    filled_ns = least_ns = max(filled_ns, 3 * sum_ns * parts // 2)
                    held_bytes = round(own.trained_bytes * (2 + optimizer_states) / copies) + kept_bytes
                name = _name(tensor, stages, parts, mapping, sharing, again)
                lacking_bytes = max(0, held_bytes - limit)
                tiles = min(copies, LEFT) * len(graph.operators) * tensor * min(parts, 3 * (FEW + stages))
                found.append(Mixture(name, stages, parts, again, filled_ns, least_ns, lacking_bytes, tiles))
    return sorted(found, key=lambda one: (one.lacking_bytes, one.expected_ns))


def pipelines_may_pay(topology: Topology, found: Sequence[Mixture], at_most_ns: float) -> bool:
    """Whether a pipeline that recomputes nothing may fit and take at most so long, by the same rough costs. On devices of one kind those of
    equal stages are in the grid, and others keep as much; what it is where kinds differ is not known here."""
    if len({topology.devices[device].type for device in topology.workers}) > 1:
        return True
    return any(not own.again and own.stages > 1 and not own.lacking_bytes and own.least_ns <= at_most_ns for own in found)


def _widths(graph: OperatorGraph, topology: Topology) -> list[int]:
    """Widths of groups that split matrices: divisors of the devices of a host that find something to split, and 1."""
    several = len({topology.devices[device].host for device in topology.workers}) < len(topology.workers)
    host, chains = tensor_parallel_width(topology) if several else 1, find_chains(graph)
    return [1, *(n for n in range(2, host + 1) if host % n == 0 and any(chain.width(graph, n) > 1 for chain in chains))]


def _mappings(graph: OperatorGraph, topology: Topology) -> list[ExpertMapping | None]:
    """How experts lie: split like all else, or whole ones divided among a host's devices, or among all."""
    numbers = {op.factors[own].size for op in graph.operators if (own := expert_factor(graph, op)) is not None}
    wide = sorted({gcd(*numbers, width) for width in (tensor_parallel_width(topology), len(topology.workers))} - {1}) if numbers else []
    return [None, *map(ExpertMapping, wide)]


def by_other_schedules(own: Mixture) -> list[str]:
    """Names of schedules by which the pipeline of a mixture would end sooner than by its own, if all passes took equally long and messages
    no time, the soonest first; of those that end together the one with the fewest passes in flight."""
    parts, found = min(own.parts, FEW * own.stages), dict[int, tuple[float, str]]()
    for schedule, chunks in product(SCHEDULES, CHUNKS) if own.stages <= MOST_SCHEDULED else ():
        if schedule.fewest_chunks <= chunks <= schedule.most_chunks:
            one = NamedSchedule(schedule, chunks, schedule.placements[0])
            table, each_ns = one.table(own.stages, parts), _PASS_NS // chunks
            durations = equal(own.stages * chunks, forward_ns=each_ns, input_ns=each_ns, weight_ns=each_ns)
            end_ns, flight = play(table, durations).makespan_ns, max(in_flight(table)) / chunks
            found[end_ns] = min(found.get(end_ns, (inf, "")), (flight, str(one)))
    usual_ns = next((end_ns for end_ns, (_, name) in found.items() if name == FIRST_SCHEDULE), 0)
    return [found[end_ns][1] for end_ns in sorted(found) if end_ns < usual_ns]


_PASS_NS = 10**6
"""A part of a pass through a stage, where all take equally long."""


def _parts(most: int, stages: int) -> list[int]:
    """Numbers of micro-batches: all that leave each copy one, two, four or more samples at a time; with stages, no fewer than these."""
    return sorted({most >> k for k in range(most.bit_length()) if most % 2**k == 0 and (stages == 1 or most >> k >= stages)})


def _name(tensor: int, stages: int, parts: int, mapping: ExpertMapping | None, sharing: str, again: str) -> str:
    """Name of a mixture. ``sharing``: what of parameters is owned in parts, by the name of the strategy that does so."""
    split = f"{SEQUENCE_PARALLEL if tensor > 1 else MEGATRON}{WIDTH}{tensor}" + f"{STAGES}{stages}" * (stages > 1)
    name = split if tensor * stages > 1 or mapping else DATA_PARALLEL
    experts = f"{OF_EXPERTS}{WIDTH}{mapping.parallel}" if mapping else ""
    for added in experts, sharing, again, f"{MICRO_BATCHES}{WIDTH}{parts}" * (parts > 1):
        name = on_top(name, added) if added else name
    return name


@dataclass(frozen=True, slots=True)
class _Figures:
    """Figures of one device under tensor parallelism, with all samples of its group: the time of passes with sums of partial results, and
    bytes of trained parameters; for each of ``LEVELS`` to which all runs are recomputed, the time of second runs, and bytes that operators
    keep."""

    passes_ns: int
    trained_bytes: int
    again_ns: Sequence[int]
    kept_bytes: Sequence[int]


def _figures(graph: OperatorGraph, strategy: Strategy, rough: RoughCosts) -> _Figures:
    levels = [{name: level for own in run_levels(graph, extent) for name, level in own.items()} for extent in LEVELS]
    known, total = dict[tuple[object, ...], NDArray[np.int64]](), np.zeros(2 + 2 * len(LEVELS), np.int64)
    for position, op in enumerate(graph.operators):
        config, own = strategy.operators[op.name], [level.get(op.name, STAYS) for level in levels]
        key = rough.cuts.class_of(position), config.degrees, config.replicas, *own
        if key not in known:
            laid, table = rough.lay(position, config), rough.cuts.durations(position, config.degrees, config.shares)
            cells = len(config.devices) // config.replicas
            forward_ns, backward_ns = (int(table[:, way].sum(axis=-1).max()) * config.replicas // len({*config.devices}) for way in (0, 1))
            trained = sum(graph.tensors[own.tensor].bytes for own in op.parameters if graph.tensors[own.tensor].requires_grad)
            parted = max([1, *(config.degrees[dim.factor] for own in op.parameters for dim in own.dims if dim.factor is not None)])
            again = [forward_ns * (level == RECOMPUTED) for level in own]
            kept = [_kept_bytes(graph, op, level) // cells for level in own]
            known[key] = np.array([forward_ns + backward_ns + rough.sums_ns(laid.sums), trained // parted, *again, *kept], np.int64)
        total += known[key]
    passes_ns, trained_bytes, *rest = total.tolist()
    return _Figures(passes_ns, trained_bytes, rest[: len(LEVELS)], rest[len(LEVELS) :])


def _kept_bytes(graph: OperatorGraph, op: Operator, level: int) -> int:
    """Bytes that a whole operator keeps, with what it makes, if it is recomputed to this level."""
    whole, made = [(0, factor.size) for factor in op.factors], sum(graph.tensors[out.tensor].bytes for out in op.outputs)
    if level == RECOMPUTED:
        return 0
    return made + (product_share(graph, op, whole) if level == LIGHT else kept_share(graph, op, whole))
