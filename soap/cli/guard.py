"""What ``soap-search`` reports if a plan was taken, or not, by its prediction alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soap.api import Guard, guard_record
from soap.cli.plain_text import milliseconds
from soap.profiles import shares
from soap.search.starts import BASELINE


def document(guard: Guard) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the command's interface. ``found_ns``: the predicted time of the fastest plan found,
    ``gain``: how many times as fast as data parallelism that is, ``margin``: what the gain must exceed."""
    return {**guard_record(guard), "shares": dict(guard.shares), "links": guard.links}


def text(found: Mapping[str, Any], *, at_hand: bool) -> str:
    """Why data parallelism is kept, or how sure the plan is that replaces it. ``at_hand``: whether it could be measured here."""
    rests = f"compute time {shares.text(found['shares'], 0.0)}, links {'measured' if found['links'] else 'estimated'}"
    gain, margin = f"{found['gain']:.2f}x", f"{found['margin']:.2f}x"
    if found["kept"] != BASELINE:
        return f"not run: predicted {gain} {BASELINE}, above the {margin} by which such predictions may be wrong ({rests})"
    remedy = "--profile and --verify decide" if at_hand else "measured costs (soap-profile, soap-profile links) decide"
    found_ms = milliseconds(found["found_ns"])
    return (
        f"kept {BASELINE}: the fastest plan found is predicted {gain} ({found_ms}), not above the {margin} by which\n"
        f"such predictions may be wrong ({rests}); {remedy}, --margin 1 takes the plan"
    )
