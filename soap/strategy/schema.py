"""The JSON schema of strategy files, version 1. What it cannot say (degrees against factor sizes, …) ``json_file`` checks."""

from __future__ import annotations

from typing import Any

from soap.strategy.config import MAX_PARTITIONS, SYNC_METHODS

FORMAT = "soap-strategy"
VERSION = 1

MAX_NUMBER = 2**31
"""Bound of degrees, replicas and sizes: beyond any real one, and small enough to compute with."""

_NAME: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 1000}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": MAX_NUMBER}
_COUNTS: dict[str, Any] = {"type": "object", "propertyNames": _NAME, "additionalProperties": _COUNT}


def _record(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """An object with exactly these keys, of which the optional ones may be missing."""
    required = [key for key in properties if key not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_DEVICE: dict[str, Any] = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_NUMBER}, _NAME]}
_OPERATOR = _record(
    {
        "kind": _NAME,
        "sizes": _COUNTS,
        "degrees": _COUNTS,
        "replicas": _COUNT,
        "devices": {"type": "array", "minItems": 1, "items": _DEVICE},
    },
    optional=("degrees", "replicas"),
)
_PARTITIONS: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": MAX_PARTITIONS}
_PARAMETER = _record(
    {"sync": {"enum": list(SYNC_METHODS)}, "partitions": _PARTITIONS, "local_aggregation": {"type": "boolean"}},
    optional=("partitions", "local_aggregation"),
)

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "SOAP parallelization strategy",
    **_record(
        {
            "format": {"const": FORMAT},
            "version": {"const": VERSION},
            "model": _record({"name": {"type": "string"}, "hash": _NAME, "operators": {"type": "integer", "minimum": 0}}),
            "cluster": _record({"name": {"type": "string"}, "hash": _NAME, "devices": {"type": "array", "minItems": 1, "items": _NAME}}),
            "operators": {"type": "object", "propertyNames": _NAME, "additionalProperties": _OPERATOR},
            "parameters": {"type": "object", "propertyNames": _NAME, "additionalProperties": _PARAMETER},
            "record": {"type": "object"},
        },
        optional=("parameters", "record"),
    ),
}
