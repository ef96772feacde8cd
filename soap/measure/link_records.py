"""How timings of links are written as plain JSON values. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soap.measure.link_probes import MOST_TIMES, LinkTiming, Operation, Probe

MOST_SECONDS = 10**6


def probe_text(probe: Probe) -> str:
    """The probe as one word."""
    return f"{probe.operation}:{'-'.join(map(str, probe.devices))}:{probe.size_bytes}"


def encode_timing(timing: LinkTiming) -> dict[str, Any]:
    """The timing as plain JSON values, with times in whole nanoseconds, as TIMING_SCHEMA describes them; ``decode_timing`` reads them."""
    return {
        "operation": timing.probe.operation.value,
        "devices": list(timing.probe.devices),
        "size_bytes": timing.probe.size_bytes,
        "times_ns": [max(1, round(1e9 * one)) for one in timing.seconds],
        "cpu_ns": max(0, round(1e9 * timing.cpu_seconds)),
        "measured_at": timing.measured_at,
        "scale": timing.scale,
    }


def decode_timing(record: Mapping[str, Any]) -> LinkTiming:
    """Read a timing from values that TIMING_SCHEMA allows."""
    probe = Probe(Operation(record["operation"]), tuple(record["devices"]), record["size_bytes"])
    return LinkTiming(probe, tuple(one / 1e9 for one in record["times_ns"]), record["cpu_ns"] / 1e9, record["measured_at"], record["scale"])


_LONGEST_NS = MOST_SECONDS * 10**9
_NS: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": _LONGEST_NS}
_PROPERTIES: dict[str, Any] = {
    "operation": {"enum": [operation.value for operation in Operation]},
    "devices": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**20}, "minItems": 2, "uniqueItems": True},
    "size_bytes": {"type": "integer", "minimum": 1, "maximum": 2**62},
    "times_ns": {"type": "array", "items": _NS, "minItems": 1, "maxItems": MOST_TIMES},
    "cpu_ns": {"type": "integer", "minimum": 0, "maximum": _LONGEST_NS},
    "measured_at": {"type": "string", "maxLength": 40},
    "scale": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
}
TIMING_SCHEMA: dict[str, Any] = {
    "type": "object", "properties": _PROPERTIES, "required": list(_PROPERTIES), "additionalProperties": False,
}  # fmt: skip
"""JSON schema of an encoded timing."""
