"""How sure a prediction is, and which plan it made a search keep, as the commands report it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soap.cli.plain_text import listed, milliseconds
from soap.search.deciding import FASTEST, SAFE, Answer
from soap.search.starts import BASELINE


def text(found: Mapping[str, Any]) -> str:
    """``117.0 ms to 149.2 ms (80%); 1.1 to 1.3x data_parallel, …``, of a ``range_record``; also if steps take longer than tasks."""
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


def decided_text(found: Mapping[str, Any], files: Mapping[str, str] | None = None, *, at_hand: bool) -> str:
    """How sure the fastest and the safe plan of a ``decision_record`` are; empty if nothing was compared. ``files``: where they are."""
    reference, fastest, safe = found["reference"], found["fastest"], found["safe"]
    if reference is None:
        return ""
    if fastest == safe:
        won = "" if fastest == reference else f": it {_beats(found, fastest)}"
        return f"not run: {fastest} is the fastest plan on average and the safe one{won}"
    head = ("not run", "predicted", f"80% of {found['draws']} draws", "their mean", f"beats {reference} in", "by", "file")
    rows = [head, *(_row(found, answer, files) for answer in (FASTEST, SAFE))]
    asked = f"--confidence {found['confidence']:g}" if found["answer"] == FASTEST else "--confidence 0"
    remedy = "--profile and --verify decide" if at_hand else "measured costs (soap-profile, soap-profile links) tell more"
    return (
        f"{listed(rows)}\n  fastest: on average over the draws of the costs; safe: in {found['confidence']:.0%} of them faster than "
        f"{reference}, or {reference} itself\n  the answer is the {found['answer']} plan; {asked} makes it the other one; {remedy}"
    )


def _row(found: Mapping[str, Any], answer: Answer, files: Mapping[str, str] | None) -> tuple[str, ...]:
    own, name = found["plans"][found[answer]], found[answer]
    low, high = map(milliseconds, own["time_ns"])
    gain = f"{own['gain'][0]:.2f} to {own['gain'][1]:.2f}x"
    won = ("-", "") if name == found["reference"] else (_share(own["wins"], found["draws"]), gain)
    times = milliseconds(own["predicted_ns"]), f"{low} to {high}", milliseconds(own["mean_ns"])
    return f"{answer}: {name}", *times, *won, "" if files is None else files[answer]


def _beats(found: Mapping[str, Any], name: str) -> str:
    own = found["plans"][name]
    least, most = own["gain"]
    return f"beats {found['reference']} in {_share(own['wins'], found['draws'])} draws of the costs ({least:.2f} to {most:.2f}x)"


def _share(wins: float, draws: int) -> str:
    return f"{wins * draws:.0f} of {draws}"
