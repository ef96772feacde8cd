"""The alternatives: other plans here, those among them that people would use, and this plan on other clusters."""

from __future__ import annotations

from collections.abc import Sequence

from soap.report.figures import duration
from soap.report.section import Block, Contents, Section, Table, Text
from soap.units import format_bytes


def _lacks(contents: Contents) -> str:
    known = contents.alternatives or contents.elsewhere or contents.not_elsewhere
    return "" if known else "no other plans or clusters were tried"


def _blocks(contents: Contents) -> Sequence[Block]:
    found: list[Block] = []
    own_ns = contents.summary["predicted_ns"] if contents.summary is not None else None
    if contents.alternatives:
        rows = [
            (
                own.name,
                duration(own.time_ns),
                "" if own_ns is None else f"{own.time_ns / max(1, own_ns):.3f}",
                f"{format_bytes(own.overflow_bytes)} missing" if own.overflow_bytes else "fits",
                f"{own.unlike} of {own.of}",
            )
            for own in contents.alternatives
        ]
        head = ("plan", "predicted", "times this plan's", "memory", "operators and parameters configured otherwise")
        found.append(Table("Other plans for this cluster: the next best that were found, and what people would use", head, rows))
    if contents.elsewhere:
        rows = []
        for there in contents.elsewhere:
            if there.refused:
                rows.append((there.cluster, "", "", "", there.refused))
                continue
            memory = f"{format_bytes(there.overflow_bytes)} missing" if there.overflow_bytes else "fits"
            speed = f"{there.usual_ns / max(1, there.time_ns):.2f}x"
            rows.append((there.cluster, duration(there.time_ns), duration(there.usual_ns), speed, memory))
        head = ("cluster", "this plan", "data parallelism", "speed-up", "memory")
        found.append(Table("This plan on other clusters of as many devices, which are taken by number", head, rows))
    if contents.not_elsewhere:
        found.append(Text(contents.not_elsewhere))
    return found


SECTION = Section("what-if", "What if", _lacks, _blocks)
