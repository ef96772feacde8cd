"""What preprocessing means, in plain Python: the whole input, one value at a time, in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from soap.preprocessing.spec import Column, Spec


def lines_of(data: bytes) -> list[bytes]:
    lines = re.split(rb"\r\n|\n|\r", data)
    return lines[:-1] if lines[-1] == b"" else lines


def value_of(column: Column, field: bytes) -> Any:
    """ValueError if the field is none."""
    if column.kind == "string":
        return field or str(column.missing).encode()
    pattern = rb"-?[0-9]+" if column.kind != "hex" else rb"[0-9a-fA-F]{1,16}"
    if field and not re.fullmatch(pattern, field):
        raise ValueError(field)
    value = int(field or str(column.missing), 16 if column.kind == "hex" else 10)
    if column.kind != "hex" and not -(2**31) < value < 2**31:
        raise ValueError(field)
    return value % column.modulus if column.modulus else value


def reference(spec: Spec, units: Sequence[bytes]) -> dict[str, Any]:
    rows = []
    for line in (line for data in units for line in lines_of(data)):
        fields = line.split(b"\t")
        try:
            if len(fields) == len(spec.columns):
                rows.append([value_of(column, field) for column, field in zip(spec.columns, fields, strict=True)])
        except ValueError:
            continue
    counts: dict[str, dict[Any, int]] = {name: {} for name in spec.dictionaries}
    for row in rows:
        for column, value in zip(spec.columns, row, strict=True):
            if column.is_category:
                own = counts[column.dictionary]
                own[value] = own.get(value, 0) + 1
    final = {}
    for name, own in counts.items():
        least = spec.dictionaries[name][0].min_count
        kept = {value: count for value, count in own.items() if count >= least}
        final[name] = (kept, [sum(own.values()) - sum(kept.values())] * (least > 1) + list(kept.values()), int(least > 1))
    place = {name: {value: i + first for i, value in enumerate(kept)} for name, (kept, _, first) in final.items()}
    table = {"labels": [], "numbers": [], "categories": []}
    for row in rows:
        pairs = list(zip(spec.columns, row, strict=True))
        table["labels"].append([value for column, value in pairs if column.kind == "label"])
        table["numbers"].append([max(0, value) for column, value in pairs if column.kind == "integer"])
        table["categories"].append([place[column.dictionary].get(value, 0) for column, value in pairs if column.is_category])
    widths = {"labels": len(spec.labels), "numbers": len(spec.numbers), "categories": len(spec.categories)}
    arrays = {name: np.array(table[name], np.int32).reshape(len(rows), widths[name]) for name in table}
    return {**arrays, "values": {n: list(kept) for n, (kept, _, _) in final.items()}, "counts": {n: c for n, (_, c, _) in final.items()}}
