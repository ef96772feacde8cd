"""How far costs may be off, by where they come from: the ``draws.Spreads`` of a cost model on a cluster.

The figures stand in ``soap/profiles/data/spreads.json``, each beside its source; ``python -m benchmarks.spreads`` fits them to stored
measurements, never to the run at hand. They are standard deviations of ln(true time / predicted time).

The error of a tile has three parts. ``rate`` is the device's: all its tiles share it. ``kind`` is shared by all operators of one kind in
one direction on such a device: what is wrong about embeddings is wrong about all of them. ``shape`` belongs to computations with the same
key (``TileKey``), whatever operator they are part of. A measured tile has all three, too: a process that trains is not one that measures.
How large the last two are depends on the class of the kind (``class_of``) and on how long the tile is said to take, where enough of such
tiles were measured. A corrected answer's ``rate`` and ``kind`` are at most those of corrections.

A plan has errors of its own, beside those of its costs: one for each operator or parameter that it configures unlike data parallelism.
Plans that configure one alike share its error. Each has the spread ``all / sqrt(number of operators and parameters)``, so that a plan that
is unlike in all of them has ``all``. A search's chains know nothing of these, which are the same for nearly equal plans; they count where
it is decided which plan is kept.

A step of processes on this machine's cores takes longer than its tasks say, whatever the plan: ranks wait for each other, and threads that
communicate take cores from those that compute. ``step`` has by how much, as the mean and the spread of one error that all plans share. It
moves what is predicted; which of two plans is faster it cannot change.

A communication has two: ``all``, shared by all communications of the cluster, and ``sort``, by whether it leaves its host and whether it is
a collective.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import exp, sqrt
from typing import Any

from soap.cluster.presets import LOCAL, family
from soap.cluster.topology import DeviceType, Topology
from soap.model.graph import PRODUCT_KINDS, RECURRENT_KINDS, OperatorGraph
from soap.plan.tiling import Tile
from soap.profiles.keys import SPARSE_LOOKUP, TileKeys
from soap.profiles.lookup import Answer, ProfiledCosts, Source
from soap.profiles.work import ATTENTION, LOOKUP_KINDS
from soap.simulator.costs import CostModel
from soap.simulator.draws import Communicated, Error

TILE_PARTS = ("rate", "kind", "shape")
CLASSES = ("product", "convolution", "attention", "recurrent", "embedding", "other")
"""Of kinds of operators; what is in no other class waits for memory on most devices."""
SIZES = ("short", "long")
HERE, ELSEWHERE = "this machine", "others"
"""Where a step is taken: by processes that share this machine, or on a cluster that has been described, or emulated."""
WAYS = {False: "forward", True: "backward"}


@cache
def known_spreads() -> Mapping[str, Any]:
    """The file as it is: by what they are about, then by kind of device, the figures and their ``source``."""
    found: dict[str, Any] = json.loads(files("soap.profiles").joinpath("data/spreads.json").read_text("utf-8"))
    return found


def class_of(kind: str) -> str:
    """The class of an operator's kind (``keys.tile_kind``), one of ``CLASSES``."""
    name = kind.removesuffix(f" {SPARSE_LOOKUP}")
    if name in PRODUCT_KINDS:
        return "product"
    if name in LOOKUP_KINDS:
        return "embedding"
    if name in RECURRENT_KINDS:
        return "recurrent"
    return "attention" if name == ATTENTION else "convolution" if name.startswith("conv") else "other"


def row_name(name: str, size: str) -> str:
    """The name of the figures of a class, a size, or both; empty: of all."""
    return ", ".join(part for part in (name, size) if part)


class KnownSpreads:
    """The spreads of a cost model's answers on a topology. ``spreads``: for tests and for fitting, others than the file's."""

    def __init__(self, costs: CostModel, topology: Topology, spreads: Mapping[str, Any] | None = None) -> None:
        self._costs = costs
        self._known = known_spreads() if spreads is None else spreads
        kinds = {device.type.kind for device in topology.devices}
        self._kind = "cpu" if "cpu" in kinds else "cuda"
        self._links = topology.links_known
        self._place = HERE if family(topology.name) == LOCAL else ELSEWHERE
        self._keys: dict[str, TileKeys] = {}

    def of_tile(self, graph: OperatorGraph, tile: Tile, device: DeviceType, *, backward: bool) -> tuple[Error, ...]:
        """Of the time of one pass over a tile."""
        answer = self._answer(graph, tile, device, backward)
        rate, kind, shape = self._of_answer(answer, class_of(graph.operators[tile.operator].kind), device)
        key = self._keys.setdefault(graph.hash, TileKeys(graph)).key(tile)
        way = WAYS[backward]
        return (
            Error(("rate", device.name), rate),
            Error(("kind", device.name, graph.operators[tile.operator].kind, way), kind),
            Error(("shape", device.name, key.text, way), shape),
        )

    def _answer(self, graph: OperatorGraph, tile: Tile, device: DeviceType, backward: bool) -> Answer:
        if isinstance(self._costs, ProfiledCosts):
            return self._costs.answer(graph, tile, device, backward=backward)
        ask = self._costs.backward_ns if backward else self._costs.forward_ns
        return Answer(ask(graph, tile, device), Source.ESTIMATED)

    def _of_answer(self, answer: Answer, name: str, device: DeviceType) -> tuple[float, float, float]:
        """``TILE_PARTS`` of an answer about a class of kinds: of its class and size, else of the class, else of the size, else of all."""
        known = self._known["tile"][answer.source.value][device.kind]
        size = SIZES[answer.ns >= self._known["short"][device.kind]["below_ns"]]
        rows = [known["classes"].get(row, {}) for row in (row_name(name, size), name, size)]
        rate, kind, shape = (next(row[part] for row in (*rows, known) if part in row) for part in TILE_PARTS)
        if answer.corrected:
            most = self._known["corrected"][device.kind]
            rate, kind = min(rate, most["rate"]), min(kind, most["kind"])
        return rate, kind, shape

    def of_launch(self, device: DeviceType) -> tuple[Error, ...]:
        """Of the time to launch a tile on such a device."""
        source = self._costs.launch_source(device) if isinstance(self._costs, ProfiledCosts) else Source.ESTIMATED
        return (Error(("launch", device.name), self._known["launch"][source.value][device.kind]["all"]),)

    def of_update(self, device: DeviceType) -> tuple[Error, ...]:
        """Of the time of a device's update: the device's rate, and what is wrong about updates."""
        source = self._costs.update_source(device) if isinstance(self._costs, ProfiledCosts) else Source.ESTIMATED
        known = self._known["update"][source.value][device.kind]
        return Error(("rate", device.name), known["rate"]), Error(("update", device.name), known["all"])

    def of_server(self) -> tuple[Error, ...]:
        """Of the time of a parameter server's work, on cores."""
        return (Error(("server",), self._known["server"][self._kind]["all"]),)

    def of_compression(self, device: DeviceType, *, selects: bool) -> tuple[Error, ...]:
        """Of the time of a device's work for compressed gradients: the device's rate, and what is wrong about selections, or about the
        rest."""
        source = self._costs.compression_source(device) if isinstance(self._costs, ProfiledCosts) else Source.ESTIMATED
        known, work = self._known["compression"][source.value][device.kind], "select" if selects else "restore"
        return Error(("rate", device.name), known["rate"]), Error(("compression", device.name, work), known[work])

    def of_communication(self, kind: Communicated) -> tuple[Error, ...]:
        """Of the time that a communication takes."""
        known = self._known["communication"][self._links][self._kind]
        return Error(("communication",), known["all"]), Error(("communication", *map(str, kind)), known["sort"])

    def of_overhead(self) -> tuple[Error, ...]:
        """Of the time for which a communication keeps devices busy."""
        return (Error(("overhead",), self._known["overhead"][self._links][self._kind]["all"]),)

    def of_plan(self, parts: Sequence[tuple[str, ...]], whole: int) -> tuple[Error, ...]:
        """Of the time of a whole plan beside data parallelism's: what no cost of its parts says, such as how its tiles fall into segments.
        ``parts``: what it configures unlike data parallelism, with how. ``whole``: number of operators and parameters of the model."""
        spread = self._known["plan"][self._links][self._kind]["all"] / sqrt(max(1, whole))
        return tuple(Error(("plan", *part), spread) for part in parts)

    def of_step(self) -> tuple[Error, ...]:
        """Of the time of a whole step beside that of its tasks: the same for all plans."""
        known = self._known["step"][self._place][self._kind]
        return (Error(("step",), known["all"], known["mean"]),)

    @property
    def step_factor(self) -> float:
        """How many times as long as its tasks say a step is expected to take; 1 where no such is known."""
        return exp(sum(error.mean for error in self.of_step()))

    @property
    def hash(self) -> str:
        """16 hex digits over all figures; the sources of costs are part of the cost model's own hash."""
        text = json.dumps([3, self._known, self._kind, self._links, self._place], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
