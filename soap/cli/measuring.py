"""Measures a model's computations on this machine into the store, some at a time, so that nothing measured is ever lost."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from math import inf

import torch

from soap import api
from soap.cli.options import Reading
from soap.cli.wanted import MAY_BE_NEEDED, Wanted
from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.emulated import device_cores
from soap.cluster.presets import family
from soap.cluster.topology import Topology
from soap.emulation.hosts import host_limits
from soap.errors import SoapWarning
from soap.measure.neighbours import Neighbours
from soap.measure.this_machine import core_reference_ns, cpu_cores, noticing_others
from soap.measure.tile_timing import TileTimer, TileTimes
from soap.measure.timing import Sample
from soap.measure.upkeep_timing import time_compression, time_copy, time_runtime, time_update
from soap.plan.tiling import Tile, tiles_of
from soap.profiles.entries import COPY, RUNTIME, Entry, Timing, apart, typical
from soap.profiles.keys import Environment, TileKey
from soap.profiles.store import Store
from soap.profiles.work import backward_work, forward_work
from soap.runtime.system.process import keep_freed_memory
from soap.strategy.classical import CLASSICAL

Progress = Callable[[Wanted], None]
APART = 0.05
"""If two times of one computation differ by more than this, a third is measured."""


@dataclass(frozen=True)
class Place:
    """Where to measure. ``share``: part of the cores' time that each process gets; less than 1 if there are more processes than cores."""

    environment: Environment
    device: torch.device
    share: float

    @property
    def clock(self) -> tuple[torch.device, int, float]:
        """Arguments of the timing functions."""
        return self.device, self.environment.threads, self.share


def place_of(topology: Topology, environment: Environment) -> Place:
    """This machine, as one device of ``local:N`` or of emulated hosts."""
    if environment.kind == "cuda":
        return Place(environment, torch.device("cuda", 0), 1.0)
    count = topology.device_count
    cores = device_cores(cpu_cores(), count) if family(topology.name) == EMULATED else cpu_cores() / count
    return Place(environment, torch.device("cpu"), min(1.0, cores / environment.threads))


def measure(
    spec: str, reading: Reading, topology: Topology, environment: Environment, todo: Sequence[Wanted], store: Store,
    budget_s: float | None, progress: Progress = lambda one: None, stop_at: float = inf,
) -> int:  # fmt: skip
    """Measure the computations in the given order, and keep each at once. Returns how many were measured.

    Measuring ends ``budget_s`` after everything is ready, or when ``time.monotonic()`` reaches ``stop_at``; a group of tiles that has
    begun is finished. An interrupt leaves what was kept and no process behind.

    What strategies need is measured again when all of it is known, before the search space, and a third time if the two differ by more
    than ``APART``: other users of the machine make it slower or quicker for seconds. The mean of two counts, or the median of three.
    """
    keep_freed_memory()  # as ranks do
    place = place_of(topology, environment)
    with warnings.catch_warnings(action="ignore", category=SoapWarning):  # the command has read the model before and shown its warnings
        model = api.load(spec, **reading)
    usual = CLASSICAL["data_parallel"](model.graph, topology)
    configs = [usual.operators[op.name] for op in model.graph.operators]
    neighbours = Neighbours(environment.neighbours, spec, reading, [config.degrees for config in configs], environment.threads)
    first = (tiles_of(model.graph, position, config)[0] for position, config in enumerate(configs))
    company = [tile for tile in first if tile.size]
    known: dict[TileKey, list[Entry]] = {}
    needed = [one for one in todo if one.group not in MAY_BE_NEEDED]
    with (
        warnings.catch_warnings(),
        _threads(environment.threads),
        neighbours,
        _in_its_share(topology, environment),
        noticing_others("the model was", "measure it again by soap-profile --again"),
    ):
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")  # by the backward thread
        timer = TileTimer(model, *place.clock)
        stop = min(stop_at, time.monotonic() + (inf if budget_s is None else budget_s))
        again = (one for one in needed if apart(known[one.key]) > APART)
        unsure = (one for one in todo if one.group in MAY_BE_NEEDED)
        for ones in chain.from_iterable(_together(some, timer) for some in (needed, needed, again, unsure)):
            if time.monotonic() >= stop:
                break
            found = measured(ones, timer, place, company)
            neighbours.check()
            for one, entry in zip(ones, found, strict=True):
                known.setdefault(one.key, []).append(entry)
            store.put(environment, [typical(known[one.key]) for one in ones])
            for one in ones:
                if len(known[one.key]) == 1:
                    progress(one)
    return len(known)


def _together(ones: Iterable[Wanted], timer: TileTimer) -> Iterator[list[Wanted]]:
    """First what is no tile, one by one; then the tiles in groups that are timed together."""
    listed = list(ones)
    tiled = [(one, one.tile) for one in listed if one.tile is not None]
    yield from ([one] for one in listed if one.tile is None)
    left = (one for one, _ in tiled)
    for group in timer.groups([tile for _, tile in tiled]):
        yield list(islice(left, len(group)))


def measured(ones: Sequence[Wanted], timer: TileTimer, place: Place, company: Sequence[Tile] = ()) -> list[Entry]:
    """Measure several tiles, or something else. If the tiles are few, other tiles of the model join them."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    tiles = [one.tile for one in ones if one.tile is not None]
    if not tiles:
        found = [(one, _upkeep(one, place)) for one in ones]
        return [Entry(one.kind, one.key, _timing(own), None, own.repetitions, measured_at=now) for one, own in found]
    with_others = timer.groups([*tiles, *(tile for tile in company if tile not in tiles)])[0]
    return [_entry(one, tile, times, timer, now) for one, tile, times in zip(ones, tiles, timer.time(with_others), strict=False)]


def _entry(one: Wanted, tile: Tile, times: TileTimes, timer: TileTimer, now: str) -> Entry:
    backward = None if times.backward is None else _timing(times.backward)
    left_out = backward is None and timer.operands.is_active(tile)
    forward_kernels = () if left_out else forward_work(timer.graph, tile)
    backward_kernels = () if backward is None else backward_work(timer.graph, tile)
    repetitions = times.forward.repetitions
    return Entry(one.kind, one.key, _timing(times.forward), backward, repetitions, forward_kernels, backward_kernels, now, times.launch_ns)


def _upkeep(one: Wanted, place: Place) -> Sample:
    if one.kind == RUNTIME:
        return time_runtime(*place.clock)
    if one.compressing is not None:
        own = one.compressing
        return time_compression(own.how, own.work, own.elements, own.peers, *place.clock)
    (size,) = one.key.lengths
    if one.kind == COPY:
        return time_copy(size, *place.clock)
    return time_update(one.optimizer_states, size, *place.clock)


def _timing(found: Sample) -> Timing:
    return Timing(found.ns, found.spread_ns)


@contextmanager
def _in_its_share(topology: Topology, environment: Environment) -> Iterator[None]:
    """On emulated hosts, measure processor time on a rank's core, where nothing else runs.

    There is no quota, because ranks with a virtual clock compute without one between two communications. What a wait costs them is measured
    with the links (``Topology.cold_penalty``). Several threads are timed by the wall clock instead: under a quota they would run and stop
    by turns.
    """
    if family(topology.name) != EMULATED or environment.threads > 1:
        yield
        return
    from soap.emulation.emulate import emulated  # imported here: it locks files in a way that only Unix has
    from soap.emulation.placement import working_as_rank

    hosts = host_limits(topology, 1.0, cpu_cores())
    with emulated(hosts, core_reference_ns()) as emulation, working_as_rank(emulation.place):
        yield


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Use this many threads within the context; 0: leave the number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
