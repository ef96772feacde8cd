"""``soap-simulate --sensitivity``: by how much each figure of the cluster must be another one for data parallelism to be the better choice,
or the plan, if it is the slower one now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soap import api
from soap.cli.plain_text import aligned
from soap.errors import StrategyError
from soap.files import write_bytes_atomically
from soap.profiles.lookup import ProfiledCosts
from soap.search.plot import tornado
from soap.search.sensitivity import DOUBLE, HALF, MOST, Sensitivity
from soap.search.starts import BASELINE
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy


def find(simulator: Simulator, plan: Strategy, usual: Strategy) -> list[Sensitivity]:
    """How the choice depends on each figure. StrategyError if there is no choice."""
    if plan == usual:
        raise StrategyError(f"--sensitivity compares with {BASELINE}, and this strategy is {BASELINE}; expected another one")
    return api.sensitivity(simulator, plan, usual)


def document(found: list[Sensitivity], simulator: Simulator) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface."""
    return {
        "gain": round(found[0].usual, 4),
        "within": MOST,
        "scaled_measurements": isinstance(simulator.costs, ProfiledCosts),
        "figures": [
            {
                "figure": one.figure.value,
                "known": one.is_known,
                "turns_below": None if one.below is None else round(one.below, 4),
                "turns_above": None if one.above is None else round(one.above, 4),
                "gain_at_half": round(one.at_half, 4),
                "gain_at_double": round(one.at_double, 4),
            }
            for one in found
        ],
    }


def text(told: Mapping[str, Any]) -> str:
    """The document as a table."""
    rows = [("figure", f"gain at {HALF:g}x", f"at {DOUBLE:g}x", "turns over at")]
    for one in told["figures"]:
        if not one["known"]:
            rows.append((one["figure"], "-", "-", "this cluster has no such figure"))
            continue
        places = [one[side] for side in ("turns_below", "turns_above") if one[side] is not None]
        turns = " and ".join(f"{place:.2g}x" for place in places) or f"not within a factor of {told['within']:g}"
        rows.append((one["figure"], f"{one['gain_at_half']:.2f}x", f"{one['gain_at_double']:.2f}x", turns))
    better = "this plan" if told["gain"] > 1 else BASELINE
    head = f"predicted gain over {BASELINE}: {told['gain']:.2f}x, so {better} is the choice; with other figures of the cluster:"
    lines = [head, aligned(rows)]
    if told["scaled_measurements"]:
        lines.append("measured times do not follow from figures: each is scaled as the estimate of the same computation")
    return "\n".join(lines)


def draw(found: list[Sensitivity], path: str) -> None:
    """Write the tornado plot. SoapError if it cannot be drawn or written."""
    write_bytes_atomically(path, tornado(found, path))
