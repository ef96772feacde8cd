"""Files of plans beside the one that is asked for: the other one of the fastest and the safe plan of a search, which goes next to
``--output``; and plans for a cluster that has lost devices, prepared by ``soap-search --spare-plans``, or searched when ``soap-run
--restarts`` needs one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from soap import api
from soap.cli.command import UsageError
from soap.cli.options import reading
from soap.cli.updating import Updating
from soap.cluster.fewer import without
from soap.cluster.presets import LOCAL, family
from soap.cluster.topology import Topology
from soap.errors import SoapError, StrategyError, TopologyError
from soap.files import reason
from soap.search.deciding import FASTEST, SAFE, Answer
from soap.search.options import SearchOptions


def path_beside(output: str, answer: Answer) -> Path:
    """Where the plan goes that is not the answer: ``strategy.safe.json`` for ``strategy.json``."""
    path = Path(output)
    return path.with_name(f"{path.stem}.{answer}{path.suffix}")


def check_beside(output: str, others: Sequence[str]) -> None:
    """UsageError if what is where the other plan may go is not a search's into ``output``. ``others``: further files to be written."""
    taken = {os.path.realpath(path): path for path in others}
    for answer in (SAFE, FASTEST):
        path = path_beside(output, answer)
        if os.path.lexists(path) and not _is_beside(path, output):
            raise UsageError(
                f"{str(path)!r} is there, was not written next to {Path(output).name!r}, and is where the {answer} plan goes; move it, or "
                "choose another -o FILE"
            )
        if (other := taken.get(os.path.realpath(path))) is not None:
            raise UsageError(f"{other!r} is where the {answer} plan goes, next to {output!r}; choose another path")


def save_both(output: str, outcome: api.SearchOutcome) -> dict[Answer, str]:
    """Write the answer, and the other plan if it is another one. Returns both files, which are the same if the plans are, by plan."""
    drop_beside(output)
    outcome.save(output)
    answer = outcome.decision.answer
    if outcome.other is None:
        return {answer: output, outcome.decision.other_answer: output}
    path = path_beside(output, outcome.decision.other_answer)
    outcome.other.save(path, beside=Path(output).name)
    return {answer: output, outcome.decision.other_answer: str(path)}


def drop_beside(output: str) -> None:
    """Remove what an earlier search wrote next to ``output``: it is no plan of what ``output`` will be."""
    for path in (path_beside(output, answer) for answer in (SAFE, FASTEST)):
        if os.path.lexists(path) and _is_beside(path, output):
            try:
                os.unlink(path)
            except OSError as cause:
                raise SoapError(f"{str(path)!r} of an earlier search cannot be removed: {reason(cause)}; remove it") from None


def _is_beside(path: Path, output: str) -> bool:
    """Whether a search into ``output`` has written this file."""
    try:
        found: Mapping[str, Any] = api.load_strategy_contents(path).record
    except StrategyError:
        return False
    return found.get("beside") == Path(output).name


SEARCH_S = 30.0
"""Training waits meanwhile."""


def left(topology: Topology, gone: Collection[int]) -> Topology:
    """The cluster without the devices of these numbers; this machine's is as it is when it is loaded, with what was measured of it."""
    found = without(topology, gone)
    if family(found.name) == LOCAL:
        return replace(api.load_cluster(found.name), limits=found.limits, own_samples=found.own_samples)
    return found


def topologies(topology: Topology) -> list[Topology]:
    """The clusters that are left if one device is lost, each once."""
    found: dict[str, Topology] = {}
    for number in range(topology.device_count) if topology.device_count > 1 else ():
        try:
            own = left(topology, [number])
        except TopologyError:  # the others do not reach each other without it
            continue
        found.setdefault(own.hash, own)
    return list(found.values())


def write(folder: str, topology: Topology, find: Callable[[Topology], api.SearchOutcome], stopped: Callable[[], bool]) -> list[Path]:
    """Search a plan for each of ``topologies``, and write it into the folder. Returns the files. SoapError in one line if it cannot be."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise SoapError(f"--spare-plans {folder!r}: {reason(cause)}; expected a folder that can be written") from None
    written = []
    for number, own in enumerate(topologies(topology)):
        if stopped():
            break
        written.append(Path(folder) / f"spare-{own.device_count}-{number}.json")
        find(own).save(written[-1])
    return written


def search(args: argparse.Namespace, topology: Topology, path: Path) -> None:
    """Search a plan for what ``soap-run`` was told to train, on another cluster, and write it. Quick rather than thorough."""
    from soap.runtime.updates.trial import optimizer_states

    graph = api.with_recorded_rows(api.planned_graph(args.model, **reading(args, topology)), args.strategy)
    tried = Updating.of(args).tried(graph)
    options = SearchOptions(
        seconds=SEARCH_S,
        costs=args.costs,
        optimizer_states=optimizer_states(tried, sparse=bool(graph.sparse)),
        measured_updates=tried.measured,
        uncut=tried.whole,
        together=tried.coupled,
    )
    api.find(graph, topology, options, progress=True).save(path)
