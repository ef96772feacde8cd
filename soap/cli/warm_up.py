"""What the steps of a warm-up take, beside those behind it: a line of the commands' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from soap.cli.plain_text import milliseconds
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy
from soap.strategy.sync import ALL_REDUCE


def document(simulator: Simulator, strategy: Strategy, warm_up: tuple[int, int], accumulate: int = 1) -> list[dict[str, Any]]:
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


def text(phases: Sequence[Mapping[str, Any]], predicted_ns: int) -> str:
    """In one line. ``predicted_ns``: of the steps behind it."""
    said = [f"{own['steps']} steps {_sends(own['density'])} {milliseconds(own['predicted_ns'])} each" for own in phases]
    return f"the first {', then '.join(said)}, and then {milliseconds(predicted_ns)}"


def _sends(density: float | None) -> str:
    return "that send everything take" if density is None else f"at a density of {density:.3g} take"
