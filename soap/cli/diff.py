"""``soap-diff``: what two strategy files configure differently, and what that is predicted to cost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from soap import api
from soap.cli import plan_summary, reporting
from soap.cli.command import Parser, UsageError, entry_point
from soap.cli.options import MODEL_HELP, add_cluster, add_costs, add_json, add_reading, reading
from soap.cli.plain_text import aligned, and_more, attributes, devices, layers, listed, milliseconds, sync_document, sync_text
from soap.plan.compression.training import PLAIN, for_scaling
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation
from soap.strategy.diff import Comparison, compare, grouped, masked
from soap.strategy.fields import OPERATOR_FIELDS, STRATEGY_FIELDS, texts
from soap.strategy.json_file import OperatorEntry, StrategyContents
from soap.strategy.mismatch import one_line, short
from soap.units import format_bytes

PROG = "soap-diff"
DIFFERENT, FAILED = 1, 2
MOST_ROWS = 40
"""Lines of differences in the text; the JSON document has all."""
EXIT_CODES = """exit codes:
  0 the strategies are equal    1 they differ    2 any error, usage included    130 interrupted (Ctrl-C)
"""


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Compare two strategy files: operators and parameters that are configured differently, and predicted times.",
        f"{PROG} a.json b.json --model zoo:gpt:tiny --cluster p100-4x4",
        exit_codes=EXIT_CODES,
        failure_code=FAILED,
    )
    parser.add_argument("first", metavar="A", help="what soap-search wrote")
    parser.add_argument("second", metavar="B", help="what soap-search wrote")
    parser.add_argument("--model", metavar="MODEL", help=f"with --cluster, simulate both: {MODEL_HELP}")
    add_reading(parser)
    add_cluster(parser, note="with --model")
    add_costs(parser)
    reporting.add_report(parser, "with --model: both plans side by side")
    add_json(parser)
    return parser


def execute(args: argparse.Namespace) -> int:
    """Read, compare, report."""
    if (args.model is None) != (args.cluster is None):
        given, lacking = ("--model", "--cluster") if args.cluster is None else ("--cluster", "--model")
        raise UsageError(f"{given} without {lacking}; expected both, to simulate, or neither")
    if args.report and args.model is None:
        raise UsageError("--report without --model and --cluster; expected both: a report shows simulated plans")
    reporting.check(args.report)
    contents = [api.load_strategy_contents(path) for path in (args.first, args.second)]
    comparison = compare(*contents)
    simulated = None if args.model is None else _simulated(args)
    found = document((args.first, args.second), contents, comparison, simulated)
    print(plan_summary.dump(found) if args.json else text(found, comparison))
    return 0 if comparison.equal else DIFFERENT


def _simulated(args: argparse.Namespace) -> list[dict[str, Any]]:
    topology = api.load_cluster(args.cluster)
    graph = api.planned_graph(args.model, **reading(args, topology))
    strategies = {path: api.load_strategy(path, graph, topology) for path in (args.first, args.second)}
    simulator = api.simulator_for(graph, topology, costs=args.costs, training=for_scaling(PLAIN, args.autocast))
    simulations = {path: simulator.predict(strategy) for path, strategy in strategies.items()}
    if args.report:
        reporting.write_side_by_side(args.report, simulator, {path: (own, simulations[path]) for path, own in strategies.items()})
    return [_outcome(simulations[path]) for path in (args.first, args.second)]


def _outcome(simulation: Simulation | FoldedSimulation) -> dict[str, Any]:
    """Time, traffic, the fullest device, and the link that is held longest."""
    held = {name: simulation.busy_ns[name] for name, size in simulation.link_bytes.items() if size}
    busiest = max(held, key=lambda name: held[name], default=None)
    return {
        "time_ns": simulation.makespan_ns,
        "bytes_moved": simulation.bytes_moved,
        "peak_bytes": max(simulation.peak_bytes),
        "fits": simulation.fits,
        "busiest_link": None
        if busiest is None
        else {"name": busiest, "held_ns": held[busiest], "bytes": simulation.link_bytes[busiest]},
    }


def document(
    paths: Sequence[str], contents: Sequence[StrategyContents], comparison: Comparison, simulated: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    """All differences, as plain JSON values. The keys are part of the command's interface."""
    return {
        "equal": comparison.equal,
        "strategies": [_strategy(path, one) for path, one in zip(paths, contents, strict=True)],
        "same_model": comparison.same_model,
        "same_cluster": comparison.same_cluster,
        "operators": [
            {"operator": d.operator, "first": _entry(d.first), "second": _entry(d.second)} for d in comparison.differences
        ],
        "only_first": list(comparison.only_first),
        "only_second": list(comparison.only_second),
        "parameters": [
            {"parameter": name, "first": sync_document(one), "second": sync_document(other)} for name, one, other in comparison.parameters
        ],
        "options": [{"option": name, "first": one, "second": other} for name, one, other in comparison.options],
        "simulated": None if simulated is None else list(simulated),
    }


def _strategy(path: str, contents: StrategyContents) -> dict[str, Any]:
    predicted = contents.record.get("predicted_ns")
    whole = isinstance(predicted, int) and not isinstance(predicted, bool)
    own = {**attributes(contents.header, "model", "cluster"), "operators": len(contents.operators)}
    return {"path": path, **own, "predicted_ns": predicted if whole else None}


def _entry(entry: OperatorEntry) -> dict[str, Any]:
    options = {"replicas": 1, **entry.options}
    return {"kind": entry.kind, "degrees": dict(entry.degrees), **options, "devices": list(entry.devices)}


def text(found: Mapping[str, Any], comparison: Comparison) -> str:
    """The document as text."""
    first, second = found["strategies"]
    sections = ["\n".join(f"{letter}: {_title(one)}" for letter, one in (("A", first), ("B", second)))]
    if not comparison.same_model:
        sections.append("made for different models; operators of equal names are compared")
    if not comparison.same_cluster:
        sections.append("made for different clusters; devices are compared by number")
    if found["simulated"]:
        sections.append(_resources(found["simulated"]))
    sections += listings(comparison, first["operators"])
    if comparison.equal:
        sections.append("the strategies are equal")
    return "\n\n".join(sections)


def _title(one: Mapping[str, Any]) -> str:
    time = "no time recorded" if one["predicted_ns"] is None else f"predicted {milliseconds(one['predicted_ns'])}"
    return f"{one['path']}: {short(one['model'])} on {short(one['cluster'])}, {time}"


def _resources(simulated: Sequence[Mapping[str, Any]]) -> str:
    rows = [("simulated", "A", "B", "B / A")]
    for label, key, shown in (
        ("time per iteration", "time_ns", milliseconds),
        ("moved per iteration", "bytes_moved", format_bytes),
        ("memory of the fullest device", "peak_bytes", format_bytes),
    ):
        one, other = (outcome[key] for outcome in simulated)
        rows.append((label, shown(one), shown(other), f"{other / one:.2f}" if one else ""))
    lines = [aligned(rows)]
    for letter, outcome in zip("AB", simulated, strict=True):
        link = outcome["busiest_link"]
        if link is not None:
            held = f"held {milliseconds(link['held_ns'])}, carries {format_bytes(link['bytes'])}"
            lines.append(f"  busiest link of {letter}: {link['name']}, {held}")
        if not outcome["fits"]:
            lines.append(f"  {letter} does not fit into memory")
    return "\n".join(lines)


def listings(comparison: Comparison, operators: int, first: str = "A", second: str = "B") -> list[str]:
    """What is configured differently, as sections of text. ``first``, ``second``: what the two strategies are called."""
    sections = []
    groups = grouped(comparison.differences)
    if groups:
        rows: list[tuple[str, ...]] = [("operator", first, second)]
        for group in groups[:MOST_ROWS]:
            name = one_line(layers([difference.operator for difference in group]), 80)
            other_operator = (group[0].first.kind, group[0].first.sizes) != (group[0].second.kind, group[0].second.sizes)
            rows.append((name, *(_configured(entry, other_operator) for entry in (group[0].first, group[0].second))))
        head = f"{len(comparison.differences)} of {operators} operators are configured differently:"
        rest = sum(len(group) for group in groups[MOST_ROWS:])
        sections.append("\n".join([head, listed(rows), *and_more(rest, 0)]))
    if comparison.parameters:
        pairs = [(name, sync_text(sync_document(a)), sync_text(sync_document(b))) for name, a, b in comparison.parameters]
        alike: dict[tuple[str, str, str], list[str]] = {}
        for name, a, b in pairs:
            alike.setdefault((masked(name), a, b), []).append(name)
        rows = [("parameter", first, second)]
        rows += [(one_line(layers(names), 80), a, b) for (_, a, b), names in alike.items()]
        rest = sum(len(names) for names in list(alike.values())[MOST_ROWS:])
        sections.append("\n".join(["synchronized differently:", listed(rows[: MOST_ROWS + 1]), *and_more(rest, 0)]))
    if comparison.options:
        rows = [("of the whole strategy", first, second)]
        say = {field.name: field.say for field in STRATEGY_FIELDS}
        rows += [(name, *("default" if own is None else str(say[name](own)) for own in values)) for name, *values in comparison.options]
        sections.append("set differently:\n" + listed(rows))
    for letter, names in ((first, comparison.only_first), (second, comparison.only_second)):
        if names:
            shown = ", ".join(short(name) for name in names[:4])
            sections.append(f"only in {letter}: {shown}" + (f" and {len(names) - 4} more" if len(names) > 4 else ""))
    return sections


def _configured(entry: OperatorEntry, with_sizes: bool) -> str:
    """``b:4, replicas:2 on 0-7``, with the operator's kind if the files disagree about it."""
    parts = [*(f"{name}:{degree}" for name, degree in entry.degrees.items()), *texts(entry.options, OPERATOR_FIELDS)]
    sizes = " ".join([one_line(entry.kind, 40), *(f"{name}={size}" for name, size in entry.sizes.items())])
    return f"{', '.join(parts) or 'whole'} on {devices(entry.devices)}" + (f" ({sizes})" if with_sizes else "")


main = entry_point(make_parser, execute)

if __name__ == "__main__":
    sys.exit(main())
