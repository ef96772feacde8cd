"""What a plan's compressed parameters send, and what compressing them saves: a part of the commands' reports."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from soap.cli.plain_text import aligned, and_more, milliseconds
from soap.errors import SoapWarning
from soap.plan.compression.training import PLAIN
from soap.plan.delivery import box_bytes
from soap.plan.plan import ShardSync
from soap.plan.syncs.compressed import compressed_names, layouts_for
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.compression import Compression, said_settings, written_settings
from soap.strategy.config import Strategy
from soap.strategy.sync import ALL_REDUCE
from soap.units import format_bytes

if TYPE_CHECKING:
    from soap.runtime.compression.peer import CompressedTraining


MOST_ROWS = 16
"""Rows of the table; the strategy file has all."""


def document(simulator: Simulator, strategy: Strategy, simulation: Simulation | FoldedSimulation) -> dict[str, Any] | None:
    """Plain JSON values; None if nothing is compressed. ``sent_bytes``: what a device that compresses sends the others that do, in a step;
    ``dense_bytes``: what each would send if the gradient were all-reduced by a ring. ``saved_ns``: how much longer a step would take if
    this parameter alone, or with ``all`` every one, were all-reduced; below 0 if compressing costs time."""
    entries: dict[str, dict[str, Any]] = {}
    if not isinstance(simulation, Simulation):  # compressed plans are not folded
        return None
    for sync in simulation.plan.syncs:
        if sync.compression is None:
            continue
        readers, density = len(sync.readers), getattr(sync.compression, "density", None)
        for region, layout in zip(sync.regions, layouts_for(simulation.plan, sync), strict=True):
            fresh = {"method": _said(sync), "density": density, "sent_bytes": 0, "dense_bytes": 0}
            entry = entries.setdefault(region.parameter, fresh)
            entry["sent_bytes"] += layout.sent_bytes
            entry["dense_bytes"] += 2 * (readers - 1) * box_bytes(simulation.plan, region.parameter, region.box) // readers
    if not entries:
        return None
    for name, entry in entries.items():
        entry["saved_ns"] = _time_ns(simulator, strategy, [name]) - simulation.makespan_ns
    return {"parameters": entries, "all": {"saved_ns": _time_ns(simulator, strategy, list(entries)) - simulation.makespan_ns}}


def _said(sync: ShardSync) -> str:
    assert sync.compression is not None  # the caller has seen to it
    return said_settings(written_settings(sync.compression)) + ", one device of each host" * sync.aggregated


def training_of(momentum: float | None, warm_up: tuple[int, int], clip_norm: float | None = None) -> CompressedTraining:
    """What ``--correct-momentum``, ``--warm-up`` and ``--clip-norm`` ask for. RuntimeFailure in one line for impossible values."""
    from soap.runtime.compression.dgc import Momentum, WarmUp
    from soap.runtime.compression.peer import CompressedTraining

    return CompressedTraining(None if momentum is None else Momentum(momentum), WarmUp(*warm_up), clip_norm)


def warn_of_memory(simulation: Simulation) -> None:
    """SoapWarning in one line if the training of compressed parameters may need more memory than a device has, though the plan alone may
    fit: a warm-up sends and receives more than later steps, and corrected momentum is kept beside the residual."""
    if simulation.plan.training == PLAIN or not count(simulation) or simulation.fits:
        return
    owned = zip(simulation.peak_bytes, simulation.topology.memory_limits, simulation.topology.devices, strict=True)
    total, limit, device = max(owned, key=lambda own: own[0] - own[1])
    warnings.warn(
        f"{device.name} may need up to {format_bytes(total)} with --correct-momentum and --warm-up, and has "
        f"{format_bytes(limit)}: momentum is kept beside residuals, and a warm-up sends up to everything; leave them "
        "out, or compress fewer parameters",
        SoapWarning,
        stacklevel=2,
    )


def count(simulation: Simulation) -> int:
    """How many parameters are compressed."""
    return len(compressed_names(simulation.plan))


def _time_ns(simulator: Simulator, strategy: Strategy, names: Sequence[str]) -> int:
    return simulator.predict(strategy.with_changes(parameters=dict.fromkeys(names, ALL_REDUCE))).makespan_ns


def first_line(found: Mapping[str, Any] | None) -> str:
    """What a reader has to know first; empty if nothing is compressed."""
    if not found:
        return ""
    return lossy_line(len(found["parameters"]))


def lossy_line(count: int) -> str:
    """The line for so many compressed parameters."""
    what = "1 parameter is compressed" if count == 1 else f"{count} parameters are compressed"
    return f"lossy: {what}, so it does not train exactly like one process"


def does_not_pay(methods: Sequence[Compression]) -> str:
    """The line of a search that might compress by these methods, and chose a plan that compresses nothing."""
    return f"compression does not pay here: of the plans tried, none with {', '.join(one.word for one in methods)} was chosen"


def text(found: Mapping[str, Any]) -> str:
    """One line a parameter, those that save most first."""
    entries = sorted(found["parameters"].items(), key=lambda one: -one[1]["saved_ns"])
    rows = [("compressed", "by", "sends a step", "instead of", "saves alone")]
    rows += [
        (name, one["method"], format_bytes(one["sent_bytes"]), format_bytes(one["dense_bytes"]), _saved(one["saved_ns"]))
        for name, one in entries[:MOST_ROWS]
    ]
    more = and_more(len(entries), MOST_ROWS, "the strategy file has all")
    together = f"  all together save {_saved(found['all']['saved_ns'])} a step"
    return "\n".join([aligned(rows), *more, together])


def _saved(saved_ns: int) -> str:
    return milliseconds(saved_ns) if saved_ns >= 0 else f"-{milliseconds(-saved_ns)}"


def warm_up_document(simulator: Simulator, strategy: Strategy, warm_up: tuple[int, int], accumulate: int = 1) -> list[dict[str, Any]]:
    """The phases of a warm-up in their order, as plain JSON values; none if there is no warm-up, or nothing is compressed. ``steps``: how
    many. ``density``: the least that is sent; None: everything. ``predicted_ns``: of a step, simulated by the same plan with that density,
    or with all-reduces where everything is sent. ``warm_up``: dense steps, and steps at each density; ``accumulate``: batches of a step."""
    if not any(warm_up):
        return []
    from soap.runtime.compression.dgc import WarmUp

    found, dense = [], {name: ALL_REDUCE for name, sync in strategy.parameters.items() if sync.compression is not None}
    for steps, density in WarmUp(*warm_up).phases:
        own = strategy.with_changes(parameters=dense if density is None else _at(strategy, density))
        if own != strategy:
            found.append({"steps": steps, "density": density, "predicted_ns": simulator.run(own).step_ns(accumulate)})
    return found


def _at(strategy: Strategy, density: float) -> dict[str, Any]:
    """The synchronizations that compress, with at least this density."""
    pairs = ((name, sync, sync.compression) for name, sync in strategy.parameters.items())
    return {name: replace(sync, compression=how.at(max(how.share, density))) for name, sync, how in pairs if how is not None}


def warm_up_text(phases: Sequence[Mapping[str, Any]], predicted_ns: int) -> str:
    """In one line. ``predicted_ns``: of the steps behind it."""
    said = [f"{own['steps']} steps {_sends(own['density'])} {milliseconds(own['predicted_ns'])} each" for own in phases]
    return f"the first {', then '.join(said)}, and then {milliseconds(predicted_ns)}"


def _sends(density: float | None) -> str:
    return "that send everything take" if density is None else f"at a density of {density:.3g} take"
