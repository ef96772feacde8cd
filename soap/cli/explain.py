"""``soap-search --explain-graph``: along what an imported model may be split, operator by operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from soap.cli import rows
from soap.cli.plain_text import listed
from soap.model import sparse_shares
from soap.model.graph import Operand, Operator, OperatorGraph
from soap.units import format_bytes, format_count

LEGEND = "factors: S sample, A attribute, P parameter, R reduction; +: parts give partial results, which are summed"
HEADER = ("operator", "kind", "factors", "parameters", "FLOP", "bytes", "not split (size: why)")
_NUMBERS = (3, 4, 5)
"""Number of columns that are aligned to the right."""


def document(graph: OperatorGraph) -> dict[str, Any]:
    """All operators, as plain JSON values. The keys are part of the command's interface."""
    operators = [_operator(graph, op) for op in graph.operators]
    return {
        "model": {
            "name": graph.name,
            "hash": graph.hash,
            "operators": len(operators),
            "parameters": sum(prod(t.shape) for t in graph.parameters),
            "flops": sum(op.flops for op in graph.operators),
        },
        "operators": operators,
        "sparse": sparse_shares.document(graph),
    }


def _operator(graph: OperatorGraph, op: Operator) -> dict[str, Any]:
    def size(operands: Sequence[Operand]) -> int:
        return sum(graph.tensors[name].bytes for name in {o.tensor for o in operands})

    return {
        "name": op.name,
        "kind": op.kind,
        "partitionable": op.partitionable,
        "factors": [{"name": f.name, "size": f.size, "kind": f.kind.value, "summed": f.summed} for f in op.factors],
        "parameters": list(dict.fromkeys(o.tensor for o in op.parameters)),
        "parameter_elements": sum(prod(graph.tensors[name].shape) for name in {o.tensor for o in op.parameters}),
        "flops": op.flops,
        "bytes": {"inputs": size(op.inputs), "parameters": size(op.parameters), "outputs": size(op.outputs), "saved": op.saved_bytes},
        "unsplit": [{"tensor": u.tensor, "dim": u.dim, "size": u.size, "reason": u.reason} for u in graph.unsplit.get(op.name, ())],
        "calls": list(op.calls),
    }


def text(report: Mapping[str, Any]) -> str:
    """The document as a table with one line per operator. Bytes are those read and written, without what is kept for the backward pass."""
    model, operators = report["model"], report["operators"]
    whole = sum(not op["partitionable"] for op in operators)
    head = (
        f"{model['name']}: {model['operators']} operators, {format_count(model['parameters'])} parameters, "
        f"{format_count(model['flops'], 'FLOP')} forward; "
        + (f"{whole} without a rule, kept whole" if whole else "every operator has a rule")
    )
    table = f"{head}\n{LEGEND}\n\n{listed(_rows(operators), indent='')}"
    return f"{table}\n\n{rows.text(report['sparse'])}" if report["sparse"] else table


def _rows(operators: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    table = [list(HEADER), *(_row(op) for op in operators)]
    for column in _NUMBERS:
        width = max(len(row[column]) for row in table)
        for row in table:
            row[column] = row[column].rjust(width)
    return table


def _row(op: Mapping[str, Any]) -> list[str]:
    factors = [f"{f['kind'][0].upper()}{'+' if f['summed'] else ''} {f['name']}={f['size']}" for f in op["factors"]]
    moved = sum(op["bytes"][key] for key in ("inputs", "parameters", "outputs"))
    elements = format_count(op["parameter_elements"]) if op["parameters"] else "-"
    numbers = [elements, format_count(op["flops"]), format_bytes(moved)]
    return [op["name"], op["kind"], ", ".join(factors) or "-", *numbers, _why(op["unsplit"])]


def _why(unsplit: Sequence[Mapping[str, Any]]) -> str:
    """Sizes of dimensions by reason: ``16, 8: softmax needs it whole``."""
    sizes: dict[str, list[str]] = {}
    for one in unsplit:
        sizes.setdefault(one["reason"], []).append(str(one["size"]))
    return "; ".join(f"{', '.join(found)}: {reason}" for reason, found in sizes.items())
