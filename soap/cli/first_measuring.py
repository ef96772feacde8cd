"""What ``soap-search`` measures before it searches, within some seconds: the cluster's links, and the model's computations. It measures
the same as ``soap-profile links`` and ``soap-profile MODEL`` and keeps it in the same store: what is known is not measured again, and
the next search goes on with what is left. No failure here ends a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from soap import api
from soap.cli import emulation, links, room
from soap.cli.command import one_line
from soap.cli.options import Reading
from soap.cli.profile import NAMED_GROUP
from soap.cli.wanted import Wanted, wanted
from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.presets import family
from soap.cluster.topology import Topology
from soap.errors import StoppedBySignal
from soap.measure.link_probes import NEEDED, Probe, probes_for
from soap.model.graph import OperatorGraph
from soap.profiles.keys import Environment, only_environment
from soap.profiles.link_places import link_place
from soap.profiles.measured_links import known_links
from soap.profiles.store import Store
from soap.strategy.classical import CLASSICAL, NAMED

DEFAULT_S = 60.0
LINKS_SHARE = 2 / 3
"""Share of the time that links may take while computations are left to measure. On one machine half a minute suffices."""
PROBE_S = 0.1
"""Seconds for each size and group: a third of what ``soap-profile links`` takes, which has no time limit."""


@dataclass(frozen=True)
class Measured:
    """What was measured now, and what is left. ``problem``: why some of it could not be measured, in one line; empty if all went well."""

    seconds: float
    probes: int
    probes_left: int
    computations: int
    computations_left: int
    problem: str = ""

    @property
    def document(self) -> dict[str, Any]:
        """Plain JSON values. The keys are part of the command's interface."""
        left = {"probes_left": self.probes_left, "computations_left": self.computations_left, "problem": self.problem or None}
        return {"seconds": round(self.seconds, 1), "probes": self.probes, "computations": self.computations, **left}

    @property
    def text(self) -> str:
        """The result as one line."""
        left = self.probes_left + self.computations_left
        rest = f"; {left} are left, with which the next search or soap-profile goes on" if left else ""
        if not self.probes and not self.computations:
            return f"measured nothing now{rest or ': everything was known'}"
        return f"measured first, in {self.seconds:.0f} s: {self.probes} probes of links, {self.computations} computations{rest}"


def measure_first(
    model: str, reading: Reading, graph: OperatorGraph, topology: Topology, seconds: float, clock: Callable[[], float] = time.monotonic
) -> Measured:
    """Measure for so many seconds what the store lacks. KeyboardInterrupt and StoppedBySignal are raised again; what was measured is
    kept."""
    began = clock()
    problems: list[str] = []
    probes, computations = 0, 0
    probes_todo: list[Probe] = []
    todo: list[Wanted] = []
    try:
        store = Store()
        place = only_environment(topology)
        probes_todo, todo = _unknown_probes(topology, store), _unknown(graph, topology, place, store)
    except Exception as error:  # any error: a search can do without measurements
        problems.append(_line(error))
    if probes_todo:
        try:
            probes = _links(topology, probes_todo, store, seconds * (LINKS_SHARE if todo else 1.0))
        except (KeyboardInterrupt, StoppedBySignal):
            raise
        except Exception as error:
            problems.append(f"links: {_line(error)}")
    if todo and (left := seconds - (clock() - began)) > 0:
        try:
            room.require_for_tiles(graph, topology)
            computations = _computations(model, reading, topology, place, todo, store, left)
        except (KeyboardInterrupt, StoppedBySignal):
            raise
        except Exception as error:
            problems.append(f"computations: {_line(error)}")
    return Measured(clock() - began, probes, len(probes_todo) - probes, computations, len(todo) - computations, "; ".join(problems))


def _unknown_probes(topology: Topology, store: Store) -> list[Probe]:
    """Probes without which links count as not measured come first."""
    place = link_place(topology, links.backend_of("auto", topology), emulated=family(topology.name) == EMULATED)
    known = {timing.probe for timing in known_links(topology, place, store)}
    return sorted((probe for probe in probes_for(topology) if probe not in known), key=lambda probe: probe.operation not in NEEDED)


def _unknown(graph: OperatorGraph, topology: Topology, place: Environment, store: Store) -> list[Wanted]:
    known = {entry.key for entry in store.entries(place)}
    classical = [api.classical(name, graph, topology) for name in (NAMED if graph.sparse else CLASSICAL)]
    return [one for one in wanted(graph, topology, {NAMED_GROUP: classical}) if one.key not in known]


def _links(topology: Topology, todo: Sequence[Probe], store: Store, seconds: float) -> int:
    emulated = family(topology.name) == EMULATED
    place = link_place(topology, links.backend_of("auto", topology), emulated=emulated)
    hosts = emulation.limits(topology, 1.0) if emulated else ()
    stop_at = time.time() + seconds
    return links.measure(topology, place, todo, store, hosts, seconds_per_probe=PROBE_S, stop_at=stop_at) or 0


def _computations(
    model: str, reading: Reading, topology: Topology, place: Environment, todo: Sequence[Wanted], store: Store, seconds: float
) -> int:
    from soap.cli.measuring import measure  # torch

    whole_ns, done_ns = max(1, sum(one.estimated_ns for one in todo)), 0
    with tqdm(total=len(todo), desc="measuring computations", unit="computation", disable=None, leave=False) as bar:

        def progress(one: Wanted) -> None:
            nonlocal done_ns
            done_ns += one.estimated_ns
            bar.set_postfix_str(f"{done_ns / whole_ns:.0%} of their time", refresh=False)
            bar.update()

        return measure(model, reading, topology, place, todo, store, None, progress, time.monotonic() + seconds)


def _line(error: Exception) -> str:
    return one_line(str(error)) or type(error).__name__
