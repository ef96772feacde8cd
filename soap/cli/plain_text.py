"""Text for people: aligned columns, and how the commands name things of a strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from soap.model.graph import Operator
from soap.strategy.config import OpConfig, SyncConfig
from soap.strategy.diff import pattern_of
from soap.strategy.fields import OPERATOR_FIELDS, PARAMETER_FIELDS, WORDED, texts, written
from soap.strategy.json_file import compact_devices


def aligned(rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Rows as lines with columns of equal width, the first to the left and the others (numbers) to the right."""
    return _columns([list(row) for row in rows], indent, right=True)


def listed(rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Rows as lines with columns of equal width, all to the left."""
    return _columns([list(row) for row in rows], indent, right=False)


def _columns(rows: list[list[str]], indent: str, *, right: bool) -> str:
    count = max(map(len, rows), default=0)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(count)]
    lines = []
    for row in rows:
        cells = [cell.rjust(widths[i]) if right and i else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def left_last(rows: Iterable[Sequence[str]]) -> str:
    """``aligned``, but the last column, of words, is to the left."""
    given = list(rows)
    numbers = aligned(row[:-1] for row in given).splitlines()
    return "\n".join(f"{line}  {row[-1]}".rstrip() for line, row in zip(numbers, given, strict=True))


def and_more(count: int, most: int, told: str = "--json has all", what: str = "more") -> list[str]:
    """The line below the first ``most`` of ``count`` rows; none if these are all."""
    return [f"  and {count - most} {what}; {told}"] if count > most else []


def attributes(found: object, *names: str) -> dict[str, Any]:
    """These attributes by name, as plain JSON values."""
    return {name: list(own) if isinstance(own := getattr(found, name), tuple) else own for name in names}


def milliseconds(time_ns: int) -> str:
    """A time per iteration, always in milliseconds, so that columns can be compared at a glance."""
    value = time_ns / 1e6
    return f"{value:.3f} ms" if value < 100 else f"{value:.1f} ms"


def speed_up(baseline_ns: int, time_ns: int) -> str:
    """How many times as fast as the baseline, such as ``1.50x``."""
    return f"{baseline_ns / max(1, time_ns):.2f}x"


def split(op: Operator, config: OpConfig) -> str:
    """A configuration's degrees by factor name, such as ``sample b:4, parameter n:2``; ``whole`` if nothing is split."""
    parts = [f"{f.kind.value} {f.name}:{degree}" for f, degree in zip(op.factors, config.degrees, strict=True) if degree > 1]
    parts += texts(written(config, OPERATOR_FIELDS, ("degrees", "devices")), OPERATOR_FIELDS)
    return ", ".join(parts) or "whole"


def sync_document(sync: SyncConfig) -> dict[str, Any]:
    """How a parameter is synchronized, as plain JSON values: in words, and further fields that are not the default."""
    local = sync.within == "host" and sync.word != sync.contract.host_word
    words = {"sync": sync.word, "partitions": sync.partitions, "local_aggregation": local}
    return {**words, **written(sync, PARAMETER_FIELDS, WORDED)}


def sync_text(document: Mapping[str, Any]) -> str:
    """``parameter_server in 4 partitions with local aggregation``, of a ``sync_document``."""
    partitions = f" in {document['partitions']} partitions" if document["partitions"] > 1 else ""
    local = " with local aggregation" if document["local_aggregation"] else ""
    further = [field for field in PARAMETER_FIELDS if field.name not in WORDED]
    return ", ".join([f"{document['sync']}{partitions}{local}", *texts(document, further)])


def layers(names: Sequence[str]) -> str:
    """An operator's name, or repeated layers as one: ``blocks.*.up (12 layers)``."""
    return names[0] if len(names) == 1 else f"{pattern_of(names)} ({len(names)} layers)"


def devices(numbers: Sequence[int]) -> str:
    """Device numbers in the order of tiles, as strategy files write them: ``0-3,8``, ``0-12:4``, ``2*4``."""
    return ",".join(map(str, compact_devices(numbers)))
