"""Strategies by name, mixtures included: ``megatron+zero1`` is Megatron with its parameters synchronized as ``zero1`` does.

``classical`` makes the single ones; ``soap.search`` makes ``pipeline`` and ``ralp``, which have to be simulated. Here also stands which
mixtures save memory, for searches and for ``soap.fits``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any

from soap.cluster.topology import Topology
from soap.errors import ScheduleError, SoapWarning, StrategyError, did_you_mean
from soap.model.graph import OperatorGraph
from soap.schedules import named as schedules
from soap.strategy.classical import CLASSICAL, NAMED, RECOMPUTED, SYNCHRONIZED, hybrid
from soap.strategy.config import Strategy
from soap.strategy.consistency import ASYNC, BOUNDED, parse
from soap.strategy.grids import tensor_parallel_width
from soap.strategy.megatron import ExpertMapping, three_dimensional
from soap.strategy.offloading import away
from soap.strategy.ralp import RALP
from soap.strategy.recomputation import gathering_again, in_micro_batches, recomputed, selectively_recomputed
from soap.strategy.served import SERVED
from soap.strategy.sync import host_count, offloaded, shares_in_hosts
from soap.strategy.uneven import by_speed

JOIN, WIDTH, STAGES = "+", ":", "x"
DATA_PARALLEL, MEGATRON, SEQUENCE_PARALLEL, PIPELINE = "data_parallel", "megatron", "sequence_parallel", "pipeline"
"""``PIPELINE``: the best of the pipelines that rough costs find promising."""
GROUPED = (MEGATRON, SEQUENCE_PARALLEL)
"""In groups of a host's devices, or behind ``WIDTH`` of so many, and in stages of these."""
SIMULATED = (PIPELINE, RALP)
"""What is found by simulating."""
RECOMPUTE, SELECTIVE, OFFLOAD, OFFLOAD_KEPT = "recompute", "selective", "offload", "offload_kept"
GATHER_AGAIN = "gather_again"
"""Behind what recomputes, if anything does."""
UNEVEN = "uneven"
MICRO_BATCHES, CONTEXT = "microbatches", "context"
"""With ``WIDTH`` and a number behind each."""
FIRST_SCHEDULE = "1f1b"
"""Of stages behind which no other schedule of ``soap.schedules`` stands."""
OF_EXPERTS = "experts"
"""With ``WIDTH`` and in how many parts they are divided behind it, and perhaps ``STAGES`` and how many devices split each matrix."""

Added = Callable[[OperatorGraph, Topology, Strategy], Strategy]
"""Puts something on top of a strategy."""


def _synchronized_as(name: str) -> Added:
    def add(graph: OperatorGraph, topology: Topology, strategy: Strategy) -> Strategy:
        return strategy.with_changes(parameters=SYNCHRONIZED[name](graph, topology).parameters)

    return add


def _anywhere(change: Callable[[OperatorGraph, Strategy], Strategy]) -> Added:
    """A change that is the same on any cluster."""
    return lambda graph, topology, strategy: change(graph, strategy)


ADDED: Mapping[str, Added] = MappingProxyType(
    {
        **{name: _synchronized_as(name) for name in SYNCHRONIZED},
        RECOMPUTE: _anywhere(recomputed),
        SELECTIVE: _anywhere(selectively_recomputed),
        GATHER_AGAIN: _anywhere(gathering_again),
        OFFLOAD: _anywhere(offloaded),
        OFFLOAD_KEPT: _anywhere(away),
        UNEVEN: by_speed,
    }
)
"""What may be put on top of another strategy, by name; and micro-batches (``MICRO_BATCHES``)."""

HSDP = "hsdp"
SHARING = ("zero1", "fsdp", HSDP)
"""Ways to have all parameters owned in parts."""

SAVING: tuple[tuple[str, ...], ...] = (SHARING, (SELECTIVE, RECOMPUTE))
"""What may be put on top of a strategy to save memory: of each group at most one."""

MOST_SAVING = f"fsdp{JOIN}{RECOMPUTE}"
"""The mixture that needs least memory of those that leave operators where they are: with time for only one, try this."""

SAVING_MOST_FOR_LITTLE = f"fsdp{JOIN}{SELECTIVE}"
"""The mixture that saves most of those that compute nearly nothing twice."""

SPLITTING = (DATA_PARALLEL, MEGATRON, "one_weird_trick")
"""Strategies on which any of these may be put, those that keep all devices busy. Megatron also in narrower groups."""

OFFLOADED = ((OFFLOAD,), ("zero1", OFFLOAD), ("fsdp", OFFLOAD), ("fsdp", RECOMPUTE, OFFLOAD), ("fsdp", OFFLOAD_KEPT, OFFLOAD))
"""What may be put on data parallelism last, where all others may lack memory: hosts update slowly."""

APART = ("hybrid", "parameter_server", "model_parallel")
"""Further strategies that may fit where data parallelism does not, as they are."""


def check_name(name: str) -> None:
    """StrategyError in one line if no strategy has this name."""
    first, *rest = name.split(JOIN)
    base, found, width = first.partition(WIDTH)
    counts = width.split(STAGES) if base in GROUPED else [width]
    if found and (base not in (*GROUPED, RALP, *SERVED) or len(counts) > 2 or not all(map(_is_count, counts))):
        groups = f"{MEGATRON}{WIDTH}N, in groups of N devices, {MEGATRON}{WIDTH}N{STAGES}P, in P stages of these, as {SEQUENCE_PARALLEL}"
        wanted = f"{groups}, {RALP}{WIDTH}N, or {_counted()}"
        raise StrategyError(f"strategy {name[:80]!r}: {first[:80]!r}; expected {wanted}")
    if base not in (*NAMED, *SIMULATED, *SERVED):
        near = did_you_mean(base, (*NAMED, *SIMULATED, *SERVED))
        raise StrategyError(f"no strategy is named {name[:80]!r}; expected one of {forms()}{near}")
    for added in rest:
        if added.startswith((ASYNC, BOUNDED)):
            if base not in SERVED:
                raise StrategyError(f"strategy {name[:80]!r}: {added[:80]!r} is for servers and workers; expected it behind {_counted()}")
            parse(added)
        elif added.startswith((OF_EXPERTS, CONTEXT)):
            if base not in GROUPED or not _is_of_groups(added):
                wanted = f"{MEGATRON}{WIDTH}N{JOIN}{OF_EXPERTS}{WIDTH}E, {OF_EXPERTS}{WIDTH}E{STAGES}T, or {CONTEXT}{WIDTH}C"
                raise StrategyError(f"strategy {name[:80]!r}: {added[:80]!r} is for groups; expected it as in {wanted}")
        elif _schedule(added) is not None:
            if base not in GROUPED or len(counts) < 2:
                wanted = f"{MEGATRON}{WIDTH}N{STAGES}P{JOIN}{added[:40]}"
                raise StrategyError(f"strategy {name[:80]!r}: {added[:80]!r} is for stages; expected it as in {wanted}")
        elif _added(added) is None:
            known = f"{', '.join(ADDED)}, {MICRO_BATCHES}{WIDTH}N{did_you_mean(added, ADDED)}"
            raise StrategyError(f"strategy {name[:80]!r}: {added[:80]!r} cannot be put on top of another one; expected one of {known}")


def forms() -> str:
    """All that ``check_name`` accepts, in words."""
    stale = f"{_counted()}, stale with {JOIN}{ASYNC} or {JOIN}{BOUNDED}D behind it"
    return (
        f"{', '.join((*NAMED, *SIMULATED))}; {MEGATRON}{WIDTH}N (in groups of N devices); {MEGATRON}{WIDTH}N{STAGES}P (in P "
        f"stages of such groups, by 1F1B or a schedule such as {JOIN}interleaved:2 behind it; {SEQUENCE_PARALLEL} likewise); "
        f"{RALP}{WIDTH}N (on N devices of servers); {stale}; with {JOIN}{f' or {JOIN}'.join(ADDED)} or "
        f"{JOIN}{MICRO_BATCHES}{WIDTH}N (in N parts of the samples) behind it; {MEGATRON} also with {JOIN}{OF_EXPERTS}{WIDTH}E (in E "
        f"parts) or {JOIN}{CONTEXT}{WIDTH}C (C groups share positions of sequences)"
    )


def _added(name: str) -> Added | None:
    """What is put on top of a strategy by this name; None if nothing is."""
    count = _count(name, MICRO_BATCHES)
    if count is None:
        return ADDED.get(name)
    return lambda graph, topology, strategy: in_micro_batches(graph, strategy, count)


def _count(added: str, name: str) -> int | None:
    """The number behind this name; None if it is another one, or has none."""
    first, _, count = added.partition(WIDTH)
    return int(count) if first == name and _is_count(count) else None


def _is_of_groups(added: str) -> bool:
    """Whether this says how groups are made, rather than what is put on top of them."""
    return _mapping(added) is not None or _count(added, CONTEXT) is not None or _schedule(added) is not None


def _schedule(added: str) -> str | None:
    """This name if it is that of a schedule."""
    try:
        return str(schedules.parse(added))
    except ScheduleError:
        return None


def _mapping(added: str) -> ExpertMapping | None:
    """How experts lie by this name; None if it says nothing of them."""
    first, _, counts = added.partition(WIDTH)
    parts, found, width = counts.partition(STAGES)
    if first != OF_EXPERTS or not _is_count(parts) or (found and not _is_count(width)):
        return None
    return ExpertMapping(int(parts), int(width) if found else 1)


def _counted() -> str:
    return " or ".join(f"{name}[{WIDTH}N]" for name in SERVED)


def named(name: str, graph: OperatorGraph, topology: Topology, found_one: Strategy | None = None) -> Strategy:
    """The strategy of this name. StrategyError in one line if there is none, or the cluster has no such groups. ``found_one``: what stands
    behind a name of ``SIMULATED``, if it is known."""
    check_name(name)
    first, *rest = name.split(JOIN)
    base, found, width = first.partition(WIDTH)
    if base in SIMULATED:
        if found_one is None:
            expected = f"soap-simulate --builtin {name}, or {first} as a start of a search"
            raise StrategyError(f"strategy {name!r} is found by simulating; expected {expected}")
        strategy = found_one
    elif base in SERVED:
        strategy = SERVED[base](graph, topology, int(width) if found else None)
    elif base in GROUPED:
        tensor, _, stages = (width or str(tensor_parallel_width(topology))).partition(STAGES)
        parts, context = (next((n for added in rest if (n := _count(added, own)) is not None), 1) for own in (MICRO_BATCHES, CONTEXT))
        own = next((lie for added in rest if (lie := _mapping(added)) is not None), None)
        lays: dict[str, Any] = {"tensor": int(tensor), "microbatches": parts, "context": context, "scatters": base == SEQUENCE_PARALLEL}
        if stages:
            schedule = next((one for added in rest if (one := _schedule(added)) is not None), FIRST_SCHEDULE)
            strategy = three_dimensional(graph, topology, **lays, pipeline=int(stages), experts=own, schedule=schedule)
        else:
            strategy = hybrid(graph, topology, **lays, experts=own)
    else:
        strategy = NAMED[base](graph, topology)
    for added in rest:
        if _is_of_groups(added):
            continue
        add = _added(added)
        strategy = replace(strategy, consistency=added) if add is None else add(graph, topology, strategy)
    return strategy


def usual_names(graph: OperatorGraph, topology: Topology) -> tuple[str, ...]:
    """Names of what people would use: the strategies next to which tables, reports and documents show every plan. On several devices also
    those that own parameters in parts, with sparse parameters the ways to synchronize these, and on several hosts a pipeline."""
    if len(topology.workers) < 2:
        return tuple(CLASSICAL)
    shared = [name for name in SHARING if name != HSDP or shares_in_hosts(topology)]
    sparse = [name for name in SYNCHRONIZED if name not in SHARING] if graph.sparse else []
    hosts = {topology.devices[device].host for device in topology.workers}
    return (*CLASSICAL, *shared, *sparse, *((PIPELINE,) if len(hosts) > 1 else ()))


def saving_names(topology: Topology) -> Iterator[str]:
    """Names of the strategies to try where data parallelism does not fit: first those that leave its operators where they are, then those
    that change least. ``HSDP`` only where there are several hosts, some with several devices: elsewhere it is nothing of its own."""
    known = [[name for name in group if name != HSDP or shares_in_hosts(topology)] for group in SAVING]
    on_top = sorted((tuple(name for name in chosen if name) for chosen in product(*(("", *group) for group in known))), key=len)
    bases = [one for name in SPLITTING for one in _widths(name, topology)]
    yield from (_joined(DATA_PARALLEL, added) for added in on_top if added)
    yield from (_joined(base, added) for added in on_top for base in bases if base != DATA_PARALLEL)
    yield from APART
    yield from offloaded_names()


def saving_starts(topology: Topology) -> Iterator[str]:
    """Names of the mixtures with which searches also begin where data parallelism does not fit, those first that save most: parameters in
    parts and layers that run again, then Megatron's groups of any width, with what they share. Wide groups hold less and move more."""
    shared = [name for name in SHARING if name != HSDP or shares_in_hosts(topology)]
    yield from (_joined(name, (RECOMPUTE,)) for name in shared if name != SHARING[0])
    yield from (_joined(base, (name,)) for base in reversed(_widths(MEGATRON, topology)) for name in shared)


def offloaded_names() -> Iterator[str]:
    """Names of the strategies whose optimizer states, or what operators keep, are on hosts, those first that change least."""
    yield from (_joined(DATA_PARALLEL, added) for added in OFFLOADED)


def is_simulated(name: str) -> bool:
    """Whether the strategy of this name is found by simulating, with nothing put on top of it."""
    return JOIN not in name and base_of(name)[0] in SIMULATED


def base_of(name: str) -> tuple[str, int | None]:
    """What stands first in a legal name, and the number behind it."""
    base, found, count = name.split(JOIN)[0].partition(WIDTH)
    return base, int(count.partition(STAGES)[0]) if found else None


def on_top(name: str, added: str) -> str:
    """The name of a strategy with something put on top of it."""
    first, *rest = name.split(JOIN)
    return _joined(first, (*rest, added))


def _joined(base: str, added: tuple[str, ...]) -> str:
    if base == DATA_PARALLEL and added[0] in NAMED:  # such as zero1, which is data parallelism by itself
        return JOIN.join(added)
    return JOIN.join((base, *added))


def _widths(name: str, topology: Topology) -> list[str]:
    """A strategy's name; of Megatron also those with narrower groups, the narrowest first, as they move least."""
    if name != MEGATRON:
        return [name]
    widest = tensor_parallel_width(topology)
    return [*(f"{MEGATRON}{WIDTH}{n}" for n in range(2, widest) if widest % n == 0), MEGATRON]


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 7 and int(text) > 0


MEANT = ("single_device", DATA_PARALLEL, *RECOMPUTED, RALP, *SERVED)
"""What is asked for on one device as well: the first two are the same there. Without servers the last ones are refused."""
ON_TOP = (*SYNCHRONIZED, UNEVEN, GATHER_AGAIN)
"""Of what is put on top of others: all that needs several devices."""


def warn_without_effect(name: str, topology: Topology) -> None:
    """Warn in one line if a strategy of this legal name divides less on this cluster than the name says."""
    why = without_effect(name, topology)
    if why:
        warnings.warn(f"strategy {name!r} on cluster {topology.name!r}: {why}", SoapWarning, stacklevel=3)


def without_effect(name: str, topology: Topology) -> str:
    """What of a strategy has no effect on this cluster, in words; empty if all of it has."""
    parts = [base_of(name)[0], *name.split(JOIN)[1:]]
    if len(topology.workers) == 1:
        idle = [part for place, part in enumerate(parts) if (part in ON_TOP if place else part not in MEANT)]
        return f"one device has nothing to divide, which is what {' and '.join(map(repr, idle))} would do" if idle else ""
    if HSDP in parts and not shares_in_hosts(topology):
        if host_count(topology) == 1:
            return f"{HSDP!r} is 'fsdp' on one host"
        return f"{HSDP!r} shares nothing where each host has one device: gradients are summed as under {DATA_PARALLEL!r}"
    return ""
