"""How sure a prediction is, and which plan it made a search keep, as the commands report it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soap.api import decision_record, range_record, timed
from soap.api.predictions import plays_compiled
from soap.cli.plain_text import milliseconds
from soap.search.deciding import DECIDING_DRAWS, Decision
from soap.search.starts import BASELINE
from soap.simulator.simulate import Simulator
from soap.strategy.config import Strategy


def document(simulator: Simulator, strategy: Strategy, usual: Strategy, tasks: int) -> dict[str, Any]:
    """The range in which a prediction lies, and the comparison with data parallelism (``usual``), as plain JSON values.
    ``tasks``: how many the plan has."""
    compiled = plays_compiled(tasks, DECIDING_DRAWS)
    plan, other = timed(simulator, {"plan": strategy, BASELINE: usual}, usual, compiled=compiled)
    return range_record(plan, other)


def text(found: Mapping[str, Any]) -> str:
    """``117.0 ms to 149.2 ms (80%); 1.1 to 1.3x data_parallel, …``, of a ``document``."""
    low, _, high = found["time_ns"]
    between = found["shares"][-1] - found["shares"][0]
    least, _, most = found["speedup"]
    time = f"{milliseconds(low)} to {milliseconds(high)} ({between:.0%})"
    if least == most:  # the plan is data parallelism
        return time
    return f"{time}; {least:.2f} to {most:.2f}x {BASELINE}, which it beats in {_share(found['wins'], found['draws'])} draws of the costs"


def decided(found: Decision) -> dict[str, Any]:
    """What was kept, and why, as plain JSON values. The keys are part of the command's interface."""
    return decision_record(found)


def decided_text(found: Mapping[str, Any], *, at_hand: bool) -> str:
    """Why data parallelism, or the best start, is kept, or how sure the plan is that replaces it. Empty if there was nothing to decide.
    ``at_hand``: whether the cluster is this machine."""
    reference, leader = found["reference"], found["leader"]
    if reference is None or leader == reference:
        return ""
    least, most = found["gain"]
    won = f"{_share(found['wins'], found['draws'])} draws of the costs ({least:.2f} to {most:.2f}x)"
    if found["kept"] == reference:
        remedy = "--profile and --verify decide" if at_hand else "measured costs (soap-profile, soap-profile links) decide"
        return (
            f"kept {reference}: the fastest plan found is predicted {milliseconds(found['leader_ns'])}, and beats it in {won},\n"
            f"fewer than {found['confidence']:.0%}; {remedy}, --confidence 0 takes the plan"
        )
    if found["kept"] != leader:
        return f"not run: {found['kept']} is the simplest of the plans that are as good as the one that beats {reference} in {won}"
    return f"not run: beats {reference} in {won}"


def _share(wins: float, draws: int) -> str:
    return f"{wins * draws:.0f} of {draws}"
