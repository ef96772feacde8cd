"""The JSON schemas of strategy files. ``json_file`` checks what a schema cannot express (degrees against factor sizes, …).

Version 2 describes a parameter's synchronization by owner, payload and residence; version 1 named a method.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from soap.strategy.fields import MAX_NUMBER, OPERATOR_FIELDS, PARAMETER_FIELDS, STRATEGY_FIELDS, properties
from soap.strategy.sync_contracts import MAX_PARTITIONS

FORMAT = "soap-strategy"
VERSION = 2
"""The version that is written; version 1 is read as well. Until a release, new fields do not change the version."""

WORDS_1 = ("allreduce", "allgather", "parameter_server")
"""The methods that files of version 1 may name."""

_NAME: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 1000}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": MAX_NUMBER}
_COUNTS: dict[str, Any] = {"type": "object", "propertyNames": _NAME, "additionalProperties": _COUNT}


def _record(known: dict[str, Any], optional: Iterable[str] = ()) -> dict[str, Any]:
    """An object with exactly these keys, of which the optional ones may be missing."""
    free = set(optional)
    return {"type": "object", "properties": known, "required": [key for key in known if key not in free], "additionalProperties": False}


_DEVICE: dict[str, Any] = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_NUMBER}, _NAME]}
_PARAMETER_1 = _record(
    {
        "sync": {"enum": list(WORDS_1)},
        "partitions": {"type": "integer", "minimum": 1, "maximum": MAX_PARTITIONS},
        "local_aggregation": {"type": "boolean"},
    },
    optional=("partitions", "local_aggregation"),
)


def schema(version: int = VERSION) -> dict[str, Any]:
    """The schema of one version of the format."""
    operator = {"kind": _NAME, "sizes": _COUNTS, "degrees": _COUNTS, "devices": {"type": "array", "minItems": 1, "items": _DEVICE}}
    optional = properties(OPERATOR_FIELDS)
    synchronized = properties(PARAMETER_FIELDS)
    parameter = _PARAMETER_1 if version == 1 else _record(synchronized, synchronized)
    more = {} if version == 1 else properties(STRATEGY_FIELDS)
    document = {
        "format": {"const": FORMAT},
        "version": {"const": version},
        "model": _record({"name": {"type": "string"}, "hash": _NAME, "operators": {"type": "integer", "minimum": 0}}),
        "cluster": _record({"name": {"type": "string"}, "hash": _NAME, "devices": {"type": "array", "minItems": 1, "items": _NAME}}),
        "operators": {
            "type": "object",
            "propertyNames": _NAME,
            "additionalProperties": _record(operator | optional, ("degrees", *optional)),
        },
        "parameters": {"type": "object", "propertyNames": _NAME, "additionalProperties": parameter},
        **more,
        "record": {"type": "object"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "SOAP parallelization strategy",
        **_record(document, ("parameters", *more, "record")),
    }
