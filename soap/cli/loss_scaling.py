"""What ``soap-run`` says of a scaled loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What became of the scale, if there is one."""
    found = report["loss_scaling"]
    if found is None:
        return []
    left = "no update was" if not found["skipped"] else "1 update was" if found["skipped"] == 1 else f"{found['skipped']} updates were"
    return [("loss scaled by", f"{found['scale']:,g} at the end; {left} left out because of gradients that are not finite")]
