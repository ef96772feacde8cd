"""Why each operator is configured as it is: ``--explain`` of ``soap-search`` and ``soap-simulate``; and along what
an imported model may be split: ``soap-search --explain-graph``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from soap.cli import inputs
from soap.cli.plain_text import aligned, and_more, attributes, devices, layers, listed, milliseconds, split, sync_document, sync_text
from soap.cluster.topology import Topology
from soap.model import sparse_shares
from soap.model.graph import Operand, Operator, OperatorGraph
from soap.search.explanation import Line, Synchronized, Unkept
from soap.simulator.analysis.attribution import Activity
from soap.strategy.config import OpConfig
from soap.strategy.diff import pattern_of
from soap.strategy.kept import OFFLOADED
from soap.strategy.recomputation import LIGHT, RECOMPUTED
from soap.units import format_bytes, format_count

MOST_ROWS = 60
"""Lines of the text; the JSON document has all."""
LEGEND = (
    "now (data parallel), in ms: how long it holds its busiest device to compute, its busiest link to move activations, and a link or\n"
    "device to sum gradients and update; set back: the iteration's time if it alone were as in data parallelism"
)
_MS = 1e6
_SAID = {RECOMPUTED: "recomputed", LIGHT: "recomputed but for products", OFFLOADED: "offloaded"}


def documents(
    graph: OperatorGraph, lines: Sequence[Line], synchronized: Sequence[Synchronized], unkept: Sequence[Unkept], predicted_ns: int
) -> dict[str, Any]:
    """All of an explanation as plain JSON values by key of a report."""
    return {
        "explanation": document(graph, lines, predicted_ns),
        "synchronization": synchronization(synchronized),
        "unkept": unkept_document(unkept),
    }


def texts(found: Mapping[str, Any], predicted_ns: int, topology: Topology) -> list[str]:
    """What ``documents`` has put into a report, as sections of text."""
    sections = [text(found["explanation"], predicted_ns, topology)]
    sections.append(synchronization_text(found["synchronization"], predicted_ns))
    sections.append(unkept_text(found["unkept"], predicted_ns))
    return [section for section in sections if section]


def document(graph: OperatorGraph, lines: Sequence[Line], predicted_ns: int) -> list[dict[str, Any]]:
    """Plain JSON values, in the order of the graph. The keys are part of the commands' interface."""
    return [_line(graph, line, predicted_ns) for line in lines]


def synchronization(lines: Sequence[Synchronized]) -> list[dict[str, Any]]:
    """The parameters that are not all-reduced, as plain JSON values."""
    return [
        {
            "parameter": line.parameter,
            **sync_document(line.sync),
            "all_reduced_ns": line.reduced_ns,
            "all_reduced_overflow_bytes": line.reduced_overflow_bytes,
        }
        for line in lines
    ]


def synchronization_text(lines: Sequence[Mapping[str, Any]], predicted_ns: int) -> str:
    """The same as text; empty if there are none."""
    rows = [("parameter", "synchronization", "if it were all-reduced")]
    for line in lines[:MOST_ROWS]:
        cost = _otherwise(line["all_reduced_ns"], line["all_reduced_overflow_bytes"], predicted_ns)
        rows.append((line["parameter"], sync_text(line), cost))
    return _table("why parameters are synchronized as they are", rows, len(lines))


def unkept_document(lines: Sequence[Unkept]) -> list[dict[str, Any]]:
    """What is recomputed or offloaded, as plain JSON values."""
    return [
        {
            "operators": {name: _SAID[mark] for name, mark in line.marks.items()},
            "runs": line.runs,
            "kept_ns": line.kept_ns,
            "kept_overflow_bytes": line.kept_overflow_bytes,
        }
        for line in lines
    ]


def unkept_text(lines: Sequence[Mapping[str, Any]], predicted_ns: int) -> str:
    """The same as text; empty if all operators keep what their backward passes need."""
    rows = [("operators", "what they do instead", "if they kept all")]
    for line in lines[:MOST_ROWS]:
        said = ", ".join(f"{count} {way}" for way, count in Counter(line["operators"].values()).most_common())
        kept = _otherwise(line["kept_ns"], line["kept_overflow_bytes"], predicted_ns)
        rows.append((_runs([*line["operators"]], line["runs"]), said, kept))
    return _table("why operators are recomputed or offloaded", rows, len(lines))


def _runs(names: Sequence[str], count: int) -> str:
    """Operators, run by run, by the first and the last of one: ``blocks.*.norm to blocks.*.up (12 runs of 5)``."""
    length = len(names) // count
    first, last = pattern_of(names[::length]), pattern_of(names[length - 1 :: length])
    return f"{first}{f' to {last}' if length > 1 else ''}{f' ({count} runs of {length})' if count > 1 else ''}"


def _otherwise(otherwise_ns: int, lacking_bytes: int, predicted_ns: int) -> str:
    """What it would be otherwise: ``1.200 ms (-4.0%), lacks 3 GiB``."""
    change = (otherwise_ns - predicted_ns) / max(1, predicted_ns)
    return f"{milliseconds(otherwise_ns)} ({change:+z.1%}){', lacks ' + format_bytes(lacking_bytes) if lacking_bytes else ''}"


def _table(title: str, rows: Sequence[Sequence[str]], count: int) -> str:
    """Rows below their header; empty if there are none. ``count``: of all, of which the first ``MOST_ROWS`` are shown."""
    return "\n".join([title, listed(rows), *and_more(count, MOST_ROWS)]) if count else ""


def _line(graph: OperatorGraph, line: Line, predicted_ns: int) -> dict[str, Any]:
    op = graph.operators[graph.index[line.operators[0]]]

    def configuration(config: OpConfig) -> dict[str, Any]:
        return {"split": split(op, config), "devices": list(config.devices)}

    path = [{"what": kind.value, "where": where, "ns": duration} for (kind, where), duration in line.binding.path_ns.items()]
    return {
        "operators": list(line.operators),
        "kind": line.kind,
        **configuration(line.config),
        "data_parallel": configuration(line.usual),
        "busiest_ns": {kind.value: duration for kind, duration in line.costs.items()},
        "data_parallel_busiest_ns": {kind.value: duration for kind, duration in line.usual_costs.items()},
        "set_back_ns": line.back_ns,
        "set_back_saves_ns": predicted_ns - line.back_ns,
        "set_back_overflow_bytes": line.back_overflow_bytes,
        "set_back_alone_ns": dict(line.back_alone_ns),
        "critical_path": path,
        "slack_ns": 0 if path else line.binding.slack_ns,
    }


def text(lines: Sequence[Mapping[str, Any]], predicted_ns: int, topology: Topology) -> str:
    """The document as two tables: what each operator costs, and what binds it."""
    shown = lines[:MOST_ROWS]
    usual = all(map(_is_usual, lines))  # then nothing can be set back
    costs = [("operator", *(f"{kind.value}" for kind in Activity), *(() if usual else ("set back", "")))]
    costs += [
        (layers(line["operators"]), *(_pair(line, kind) for kind in Activity), *(() if usual else _back(line, predicted_ns)))
        for line in shown
    ]
    why = [("operator", "configuration", "bound by")]
    why += [(layers(line["operators"]), _configured(line), _bound(line, topology)) for line in shown]
    more = and_more(len(lines), MOST_ROWS)
    told = ["every operator is configured as in data parallelism: there is nothing to set back"] if usual else []
    return "\n".join(["why each operator is configured as it is", LEGEND, *told, "", aligned(costs), "", listed(why), *more])


def _is_usual(line: Mapping[str, Any]) -> bool:
    return all(line[key] == line["data_parallel"][key] for key in ("split", "devices"))


def _pair(line: Mapping[str, Any], kind: Activity) -> str:
    now, usual = line["busiest_ns"][kind.value], line["data_parallel_busiest_ns"][kind.value]
    return f"{now / _MS:.3f} ({usual / _MS:.3f})" if now or usual else "-"


def _back(line: Mapping[str, Any], predicted_ns: int) -> tuple[str, str]:
    if _is_usual(line):
        return "as it is", ""
    change = (line["set_back_ns"] - predicted_ns) / max(1, predicted_ns)
    lacking = line["set_back_overflow_bytes"]
    return f"{milliseconds(line['set_back_ns'])}{', lacks ' + format_bytes(lacking) if lacking else ''}", f"{change:+z.1%}"


def _configured(line: Mapping[str, Any]) -> str:
    return f"{line['split']} on {devices(line['devices'])}"


def _bound(line: Mapping[str, Any], topology: Topology) -> str:
    """``computation on box/gpu0, 0.120 ms of the iteration, and 0.010 ms elsewhere``; or that the operator has slack."""
    if not line["critical_path"]:
        return f"nothing: {line['slack_ns'] / _MS:.3f} ms of slack"
    first, *rest = line["critical_path"]
    on_link = first["where"] in {own.name for own in topology.links}
    if first["what"] == Activity.SYNCHRONIZATION and not on_link:
        what = f"updates on {first['where']}"
    else:
        what = f"{first['what']} on {'link ' if on_link else ''}{first['where']}"
    others = sum(part["ns"] for part in rest)
    tail = f", and {others / _MS:.3f} ms elsewhere" if others else ""
    return f"{what}, {first['ns'] / _MS:.3f} ms of the iteration{tail}"


FACTORS_LEGEND = "factors: S sample, A attribute, P parameter, R reduction; +: parts give partial results, which are summed"
HEADER = ("operator", "kind", "factors", "parameters", "FLOP", "bytes", "not split (size: why)")
_NUMBERS = (3, 4, 5)
"""Number of columns that are aligned to the right."""


def graph_document(graph: OperatorGraph) -> dict[str, Any]:
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
        "unsplit": [attributes(u, "tensor", "dim", "size", "reason") for u in graph.unsplit.get(op.name, ())],
        "calls": list(op.calls),
    }


def graph_text(report: Mapping[str, Any]) -> str:
    """The document as a table with one line per operator. Bytes are those read and written, without what is kept for the backward pass."""
    model, operators = report["model"], report["operators"]
    whole = sum(not op["partitionable"] for op in operators)
    head = (
        f"{model['name']}: {model['operators']} operators, {format_count(model['parameters'])} parameters, "
        f"{format_count(model['flops'], 'FLOP')} forward; "
        + (f"{whole} without a rule, kept whole" if whole else "every operator has a rule")
    )
    table = f"{head}\n{FACTORS_LEGEND}\n\n{listed(_rows(operators), indent='')}"
    return f"{table}\n\n{inputs.rows_text(report['sparse'])}" if report["sparse"] else table


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
