"""Costs from measurements. The first of these sources that can answer does, and the answer names it:

- *measured*: this computation itself;
- *interpolated*: between two measured tiles of like operators, one with all lengths at most the tile's, the other with all at least the
  tile's; linear in the logarithms of time and of points. Never beyond what was measured;
- *calibrated*: the roofline, multiplied by the median of measured ÷ estimated of this kind of operator on this device. Kinds that were not
  measured get the median of all kinds, if there are ``LEAST_KINDS``;
- *estimated*: the roofline.

A tile's measurement does not include what the runtime adds to a tile. That is measured by itself, or else estimated. On GPUs it is a part
of the time to launch the tile, which is measured beside the tile; for tiles without a measurement it is the median of their kind, else of
all kinds.

If a kind and direction has a correction (``corrections``), the answer is multiplied by it, whatever its source, and is marked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import exp, log
from statistics import median
from types import MappingProxyType

from soap.cluster.kinds import known_gpu
from soap.cluster.presets import device_types
from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import OperatorGraph
from soap.model.regions import Box
from soap.plan.compression.seam import Layout, Work, layout_of
from soap.plan.row_counts import parameters_held
from soap.plan.tiling import Tile
from soap.profiles.corrections import CORRECTED, Correction
from soap.profiles.entries import COMPRESSION, LAUNCH, UPDATE, Entry, compression_key, encode, runtime_key, update_family, update_key
from soap.profiles.keys import Environment, TileKey, TileKeys, environments, tile_kind
from soap.profiles.roofline import RooflineCosts, runtime_seconds, work_seconds
from soap.profiles.store import Store
from soap.profiles.work import Kernel, backward_work, forward_work
from soap.simulator.costs import nanoseconds
from soap.strategy.compression import Compression
from soap.strategy.division import Half

LEAST_KINDS = 3
CACHE_ENTRIES = 2**18
MEASURED_KEYS = ("kind", "family", "lengths", "regions", "entire", "forward_ns", "backward_ns", "forward_work", "backward_work", LAUNCH)
"""The fields of an encoded entry on which an answer can depend."""


class Source(StrEnum):
    """Where an answer comes from, best first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    CALIBRATED = "calibrated"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class Answer:
    """A duration, and where it comes from. ``corrected``: a correction was applied to it."""

    ns: int
    source: Source
    corrected: bool = False


Point = tuple[tuple[int, ...], int, float]
"""A measured tile: lengths, points, nanoseconds."""


class Profile:
    """The measurements of one environment, ready for questions. ``device``: the one whose roofline they are compared with."""

    def __init__(self, device: DeviceType, entries: Iterable[Entry], corrections: Iterable[Correction] = ()) -> None:
        self.device = device
        self.corrections = {one.of: one.factor for one in corrections}
        self.entries = sorted(entries, key=lambda entry: entry.key.text)
        self._exact = {entry.key: entry for entry in self.entries}
        self._families: dict[tuple[str, bool], list[Point]] = {}
        ratios: dict[tuple[str, bool], list[float]] = {}
        for entry in self.entries:
            passes = ((False, entry.forward, entry.forward_work), (True, entry.backward, entry.backward_work))
            for backward, timing, work in passes:
                if timing is None:
                    continue
                if work or entry.kind in (UPDATE, COMPRESSION):
                    self._families.setdefault((entry.key.family, backward), []).append((entry.key.lengths, entry.points, timing.ns))
                if work:
                    estimated_ns = 1e9 * work_seconds(work, device, entry.kind, backward=backward)
                    ratios.setdefault((entry.kind, backward), []).append(timing.ns / estimated_ns)
        self.factors = {known: median(found) for known, found in ratios.items()}
        self._usual = {backward: self._median_of_kinds(backward) for backward in (False, True)}
        launches: dict[tuple[str, bool], list[float]] = {}
        for entry in self.entries:
            for backward, ns in zip((False, True), entry.launch_ns or (), strict=False):
                if not backward or entry.backward is not None:
                    launches.setdefault((entry.kind, backward), []).append(ns)
        self._launches = {known: median(found) for known, found in launches.items()}

    def tile(self, key: TileKey, kind: str, work: Sequence[Kernel], backward: bool) -> tuple[float, Source]:
        """Nanoseconds of a pass over a tile, without what the runtime adds."""
        entry = self._exact.get(key)
        if entry is not None:
            timing = entry.backward if backward else entry.forward
            return (0.0 if timing is None else timing.ns), Source.MEASURED
        between = _between(self._families.get((key.family, backward), ()), key.lengths)
        if between is not None:
            return between, Source.INTERPOLATED
        estimated_ns = 1e9 * work_seconds(work, self.device, kind, backward=backward)
        factor = self.factors.get((kind, backward), self._usual[backward])
        return (estimated_ns, Source.ESTIMATED) if factor is None else (estimated_ns * factor, Source.CALIBRATED)

    def update(self, optimizer_states: int, size_bytes: int, estimated_ns: int) -> tuple[float, Source]:
        """Nanoseconds of the update of one tensor."""
        return self._of_size(update_key(optimizer_states, size_bytes), estimated_ns)

    def compression(self, how: Compression, work: Work, elements: int, peers: int, estimated_ns: int) -> tuple[float, Source]:
        """Nanoseconds of a work of compressing a gradient, or decompressing."""
        return self._of_size(compression_key(how, work, elements, peers), estimated_ns)

    def _of_size(self, key: TileKey, estimated_ns: int) -> tuple[float, Source]:
        """Nanoseconds of something that depends on a size alone."""
        (size,), points = key.lengths, self._families.get((key.family, False), [])
        entry = self._exact.get(key)
        if entry is not None:
            return entry.forward.ns, Source.MEASURED
        between = _between(points, key.lengths)
        if between is not None:
            return between, Source.INTERPOLATED
        if not points:
            return float(estimated_ns), Source.ESTIMATED
        _, nearest_size, nearest_ns = min(points, key=lambda point: abs(log(point[1] / max(1, size))))
        # below the smallest the calls decide, which are the same for all; above the largest the bytes
        return nearest_ns * max(1.0, size / nearest_size), Source.CALIBRATED

    @property
    def launches_kernels(self) -> bool:
        """Whether the device is a GPU, whose kernels a processor launches."""
        return bool(self._launches)

    def launch_ns(self, key: TileKey, kind: str, backward: bool) -> float:
        """Nanoseconds of launching a pass over a tile, with what the runtime adds."""
        entry = self._exact.get(key)
        if entry is not None and entry.launch_ns is not None:
            return entry.launch_ns[backward] + self._added_ns(backward)
        found = self._launches.get((kind, backward))
        if found is None:
            found = median([ns for (_, direction), ns in self._launches.items() if direction is backward] or [0.0])
        return found + self._added_ns(backward)

    def runtime_ns(self, backward: bool) -> float:
        """What the runtime adds to a tile in one direction, on the device itself."""
        return 0.0 if self.launches_kernels else self._added_ns(backward)

    def _added_ns(self, backward: bool) -> float:
        entry = self._exact.get(runtime_key())
        if entry is None:
            return 1e9 * runtime_seconds(self.device)
        timing = entry.backward if backward else entry.forward
        return 0.0 if timing is None else timing.ns

    def answer(self, ns: float, source: Source, kind: str, backward: bool) -> Answer:
        """Nanoseconds of this kind and direction as an answer, corrected if there is a correction."""
        factor = self.corrections.get((kind, backward))
        return Answer(nanoseconds(ns * (1.0 if factor is None else factor) / 1e9), source, factor is not None)

    def _median_of_kinds(self, backward: bool) -> float | None:
        found = [factor for (_, direction), factor in self.factors.items() if direction is backward]
        return median(found) if len(found) >= LEAST_KINDS else None


NOWHERE_ELSE: Mapping[str, str] = MappingProxyType({})


class ProfiledCosts:
    """A ``CostModel`` from measurements where there are any, by device type's name, and from the roofline otherwise."""

    def __init__(
        self,
        topology: Topology,
        profiles: Mapping[str, Iterable[Entry]],
        optimizer_states: int = 2,
        corrections: Mapping[str, Iterable[Correction]] | None = None,
        measured_updates: bool = True,
        origins: Mapping[str, str] = NOWHERE_ELSE,
    ) -> None:
        """``optimizer_states``: number of tensors of a parameter's size that the optimizer keeps for it. ``corrections``: by device
        type's name. ``measured_updates``: whether the optimizer is one of those that are measured; the updates of others are estimated.
        ``origins``: by device type's name, where measurements come from, if not from this machine's user."""
        known = corrections or {}
        self.optimizer_states = optimizer_states
        self.measured_updates = measured_updates
        self.origins = origins
        self.estimate = RooflineCosts(topology, optimizer_states)
        types = {device.type.name: device.type for device in topology.devices}
        asked = [name for name in sorted(types) if name in profiles or name in known]
        self.profiles = {name: Profile(types[name], profiles.get(name, ()), known.get(name, ())) for name in asked}
        self._keys: dict[str, TileKeys] = {}
        self._answers: dict[tuple[str, int, tuple[tuple[int, int], ...], str, bool, tuple[Box, ...]], Answer] = {}

    @property
    def description(self) -> str:
        """The source of costs as one line."""
        measured = [
            f"{self._operators(profile)} computations on {name} ({self.origins.get(name, 'soap-profile')})"
            for name, profile in self.profiles.items()
            if profile.entries
        ]
        rest = self.estimate.description
        said = f"profile of {' and '.join(measured)}, the rest: {rest}" if measured else rest
        return f"{said}; {CORRECTED}" if any(profile.corrections for profile in self.profiles.values()) else said

    @property
    def hash(self) -> str:
        """Hash of everything that enters an answer: all entries and corrections, and the roofline; 16 hex digits."""
        known = [
            [name, [_figures(entry) for entry in profile.entries], sorted(profile.corrections.items())]
            for name, profile in self.profiles.items()
        ]
        text = json.dumps(["profile", 3, LEAST_KINDS, self.estimate.hash, known, *([] if self.measured_updates else ["no updates"])])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def forward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Forward pass of a tile."""
        return self.answer(graph, tile, device, backward=False).ns

    def backward_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Backward pass of a tile."""
        return self.answer(graph, tile, device, backward=True).ns

    def light_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType) -> int:
        """Forward pass of a tile without its product: the roofline's share of the whole pass, as this part of it is measured by nobody."""
        whole_ns, light_ns = (ask(graph, tile, device) for ask in (self.estimate.forward_ns, self.estimate.light_ns))
        return min(self.forward_ns(graph, tile, device), max(1, -(-self.forward_ns(graph, tile, device) * light_ns // whole_ns)))

    def half_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, half: Half) -> int:
        """Input or weight gradients of a tile that has both: the roofline's share of the whole pass. Together they take longer than it."""
        whole_ns, half_ns = self.estimate.backward_ns(graph, tile, device), self.estimate.half_ns(graph, tile, device, half)
        return max(1, -(-self.backward_ns(graph, tile, device) * half_ns // whole_ns))

    @property
    def updates_rows_alone(self) -> bool:
        """As the roofline says."""
        return self.estimate.updates_rows_alone

    def update_ns(self, parameter_bytes: int, device: DeviceType) -> int:
        """Optimizer update of a shard."""
        return self.update_answer(parameter_bytes, device).ns

    def compression_ns(self, compression: Compression, layout: Layout, work: Work, device: DeviceType) -> int:
        """Compressing a gradient, or decompressing."""
        estimated_ns, profile = self.estimate.compression_ns(compression, layout, work, device), self.profiles.get(device.name)
        if profile is None:
            return estimated_ns
        usual = compression.padded
        if usual != compression:  # measured as padded; what is done for varying lengths is estimated
            plain = layout_of(usual, layout.shape, layout.value_bytes, layout.peers)
            if work == "combine" and len(plain.exchanges) == 1:
                return estimated_ns
            added_ns = estimated_ns - self.estimate.compression_ns(usual, plain, work, device)
            return self.compression_ns(usual, plain, work, device) + added_ns
        ns, _ = profile.compression(compression, work, layout.elements, layout.peers, estimated_ns)
        return nanoseconds(ns / 1e9)

    def launch_ns(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> int:
        """Launching one pass over a tile."""
        profile = self.profiles.get(device.name)
        if profile is None or not profile.launches_kernels or not tile.size:
            return 0
        key = self._keys.setdefault(graph.hash, TileKeys(graph)).key(tile)
        return round(profile.launch_ns(key, tile_kind(graph, tile), backward))

    def answer(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> Answer:
        """One pass over a tile, and where that number comes from."""
        held = parameters_held(graph, tile) if tile.sparse_lookup else ()  # the graph's hash does not tell
        asked = (graph.hash, tile.operator, tile.intervals, device.name, backward, held)
        found = self._answers.get(asked)
        if found is None:
            if len(self._answers) >= CACHE_ENTRIES:
                self._answers.clear()
            found = self._answers[asked] = self._ask(graph, tile, device, backward)
        return found

    def update_answer(self, parameter_bytes: int, device: DeviceType) -> Answer:
        """An update, and where that number comes from."""
        estimated_ns = self.estimate.update_ns(parameter_bytes, device)
        profile = self.profiles.get(device.name)
        if profile is None or not self.measured_updates:  # for example a host's core
            return Answer(estimated_ns, Source.ESTIMATED)
        ns, source = profile.update(self.optimizer_states, parameter_bytes, estimated_ns)
        return profile.answer(ns, source, update_family(self.optimizer_states), backward=False)

    def update_source(self, device: DeviceType) -> Source:
        """Where updates on such devices come from, as a whole: measured if any of this optimizer's are, or if they are corrected."""
        profile, family = self.profiles.get(device.name), update_family(self.optimizer_states)
        if profile is None or not self.measured_updates:
            return Source.ESTIMATED
        known = (family, False) in profile.corrections or any(entry.key.family == family for entry in profile.entries)
        return Source.MEASURED if known else Source.ESTIMATED

    def compression_source(self, device: DeviceType) -> Source:
        """Where the times of compressing gradients on such devices come from, as a whole: measured if any are."""
        profile = self.profiles.get(device.name)
        known = profile is not None and any(entry.kind == COMPRESSION for entry in profile.entries)
        return Source.MEASURED if known else Source.ESTIMATED

    def launch_source(self, device: DeviceType) -> Source:
        """Where the time to launch tiles on such devices comes from."""
        profile = self.profiles.get(device.name)
        return Source.MEASURED if profile is not None and profile.launches_kernels else Source.ESTIMATED

    def _ask(self, graph: OperatorGraph, tile: Tile, device: DeviceType, backward: bool) -> Answer:
        profile = self.profiles.get(device.name)
        if profile is None or not tile.size:
            ask = self.estimate.backward_ns if backward else self.estimate.forward_ns
            return Answer(ask(graph, tile, device), Source.ESTIMATED)
        keys = self._keys.setdefault(graph.hash, TileKeys(graph))
        work = backward_work(graph, tile) if backward else forward_work(graph, tile)
        kind = graph.operators[tile.operator].kind
        ns, source = profile.tile(keys.key(tile), tile_kind(graph, tile), work, backward)
        return profile.answer(ns + profile.runtime_ns(backward), source, kind, backward)

    @staticmethod
    def _operators(profile: Profile) -> int:
        return sum(not entry.key.family.startswith("<") for entry in profile.entries)


def _between(points: Sequence[Point], lengths: tuple[int, ...]) -> float | None:
    """The time of a tile of these lengths, from the largest measured tile inside it and the smallest one around it; None if there is no
    such pair. Of several tiles of equal lengths (with and without halos) the first one counts."""
    below: Point | None = None
    above: Point | None = None
    for point in points:
        pairs = list(zip(point[0], lengths, strict=True))
        if all(own <= asked for own, asked in pairs) and (below is None or point[1] > below[1]):
            below = point
        if all(own >= asked for own, asked in pairs) and (above is None or point[1] < above[1]):
            above = point
    if below is None or above is None:
        return None
    if below[1] == above[1]:
        return below[2]
    wanted = 1
    for length in lengths:
        wanted *= length
    share = log(wanted / below[1]) / log(above[1] / below[1])
    found = exp(log(below[2]) + share * (log(above[2]) - log(below[2])))
    return min(max(found, min(below[2], above[2])), max(below[2], above[2]))  # rounding must not lead outside


def _figures(entry: Entry) -> list[object]:
    encoded = encode(entry)
    return [encoded.get(name) for name in MEASURED_KEYS]


def is_such_a_gpu(name: str, kind: DeviceType) -> bool:
    """Whether what was measured on a GPU of this name, as its driver gives it, holds for a device type: that of its own name, or the data
    sheet of such GPUs (``kinds.known_gpu``)."""
    return kind.name == name or (device_types().get(kind.name) == kind and known_gpu(name, device_types()) == kind.name)


def places_of(topology: Topology, store: Store) -> dict[str, Environment]:
    """By device type's name, where what is known of it was measured: its own environment, or, if nothing was measured there and it is a
    data sheet, that of such a GPU with the same torch."""
    found, measured = environments(topology), store.environments()
    for device in topology.devices:
        kind, own = device.type, found[device.type.name]
        if kind.kind == "cuda" and not topology.measured and not measured.get(own):
            others = [place for place, count in measured.items() if count and replace(place, device=own.device) == own]
            found[kind.name] = next((place for place in others if is_such_a_gpu(place.device, kind)), own)
    return found


def read_profiles(topology: Topology, store: Store) -> dict[str, list[Entry]]:
    """The store's entries for the devices of a cluster, by device type's name; types without any are missing. Of a data sheet's GPU
    measured on another machine, launches are left out, which are work of the processor beside it."""
    here = environments(topology)
    found = {}
    for name, place in places_of(topology, store).items():
        entries = store.entries(place)
        found[name] = entries if place == here[name] else [replace(entry, launch_ns=None) for entry in entries]
    return {name: entries for name, entries in found.items() if entries}


def read_corrections(topology: Topology, store: Store) -> dict[str, list[Correction]]:
    """The corrections for the devices of a cluster, by device type's name; types without any are missing."""
    found = {name: store.corrections(place) for name, place in environments(topology).items()}
    return {name: corrections for name, corrections in found.items() if corrections}


def foreign(topology: Topology, store: Store) -> dict[Environment, int]:
    """Entries of the store that no device of the cluster can use: where they were measured, and how many."""
    ours = {*environments(topology).values(), *places_of(topology, store).values()}
    return {place: count for place, count in store.environments().items() if count and place not in ours}
