"""How sure a prediction is, and which plan it made a search keep, as the commands report it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soap.cli.plain_text import milliseconds
from soap.search.starts import BASELINE


def text(found: Mapping[str, Any]) -> str:
    """``117.0 ms to 149.2 ms (80%); 1.1 to 1.3x data_parallel, …``, of a ``range_record``. It says so where a step takes longer than its
    tasks, which simulated times do not have."""
    least, _, most = found["speedup"]
    longer = "" if found["step_factor"] == 1 else f", steps here take {found['step_factor']:.2f} times as long as their tasks"
    time = f"{between(found)} ({found['shares'][-1] - found['shares'][0]:.0%}{longer})"
    if least == most:  # the plan is data parallelism
        return time
    return f"{time}; {least:.2f} to {most:.2f}x {BASELINE}, which it beats in {_share(found['wins'], found['draws'])} draws of the costs"


def between(found: Mapping[str, Any]) -> str:
    """``117.0 ms to 149.2 ms``, of a ``range_record``."""
    low, _, high = found["time_ns"]
    return f"{milliseconds(low)} to {milliseconds(high)}"


def decided_text(found: Mapping[str, Any], *, at_hand: bool) -> str:
    """Why data parallelism, or the best start, is kept, or how sure the plan is that replaces it, of a ``decision_record``. Empty if there
    was nothing to decide. ``at_hand``: whether the cluster is this machine."""
    reference, leader, kept = found["reference"], found["leader"], found["kept"]
    if reference is None or leader == reference:
        return ""
    first, own = found["plans"][leader], found["plans"][kept]
    if kept == reference:
        remedy = "--profile and --verify decide" if at_hand else "measured costs (soap-profile, soap-profile links) decide"
        return (
            f"kept {reference}: the fastest plan found is predicted {milliseconds(first['predicted_ns'])}, and beats it in "
            f"{_won(first, found['draws'])},\nfewer than {found['confidence']:.0%}; {remedy}, --confidence 0 takes the plan"
        )
    won = f"beats {reference} in {_won(own, found['draws'])}"
    if kept == leader:
        return f"not run: {won}"
    if first["wins"] >= found["confidence"]:
        return f"not run: {kept} is the simplest of the plans that are as good as the fastest one; it {won}"
    return (
        f"not run: {kept} {won};\nthe plan that is fastest on average, predicted {milliseconds(first['predicted_ns'])}, does so in "
        f"{_share(first['wins'], found['draws'])} only"
    )


def _won(plan: Mapping[str, Any], draws: int) -> str:
    least, most = plan["gain"]
    return f"{_share(plan['wins'], draws)} draws of the costs ({least:.2f} to {most:.2f}x)"


def _share(wins: float, draws: int) -> str:
    return f"{wins * draws:.0f} of {draws}"
