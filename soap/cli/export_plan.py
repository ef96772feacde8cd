"""``soap-export-plan``: a plan as the configuration of another trainer, with what that cannot be told and what it costs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from soap import api, outputs
from soap.api.exported_plans import Candidate, ExportedPlan, export_plan
from soap.cli import inputs, plan_summary
from soap.cli.command import Parser, entry_point
from soap.cli.diff import listings
from soap.cli.inputs import add_asked, check_inputs, read_file
from soap.cli.options import add_json, cluster_of, reading
from soap.cli.plain_text import aligned, attributes, milliseconds
from soap.exported_plans.contract import Target
from soap.exported_plans.named import TARGETS
from soap.files import write_text_atomically
from soap.units import format_bytes

PROG = "soap-export-plan"


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Write the fastest configuration of another trainer near a plan; say what it cannot be told, and what that costs.",
        f"{PROG} zoo:gpt:tiny --cluster p100-4x4 --strategy strategy.json --to torchtitan -o plan.toml",
    )
    add_asked(parser)
    told = "; ".join(f"{target.name}: {target.title} {target.version} ({target.suffix})" for target in TARGETS)
    parser.add_argument("--to", choices=[target.name for target in TARGETS], required=True, help=told)
    parser.add_output("-o", "--output", kind=outputs.PLAN, required=True, help="where the configuration goes")
    parser.add_argument("--nearest", action="store_true", help="write what differs least from the plan, however fast others near it are")
    add_json(parser)
    return parser


def execute(args: argparse.Namespace) -> int:
    """Find the configuration, write it, report."""
    check_inputs(args)
    topology = cluster_of(args, args.cluster)
    graph = inputs.load_graph(args, topology)
    strategy, graph = read_file(args, graph, topology)
    if strategy is None:
        strategy = api.simulated_name(args.builtin, api.simulator_for(graph, topology, costs=args.costs))
    options: dict[str, Any] = {"autocast": reading(args, topology)["autocast"], "costs": args.costs, "nearest_only": args.nearest}
    found = export_plan(strategy, graph, topology, args.to, **options)
    write_text_atomically(args.output, found.text)
    name = args.builtin or Path(args.strategy).name
    print(plan_summary.dump(document(found, args.output)) if args.json else text(found, name, args.output, len(graph.operators)))
    return 0


def document(found: ExportedPlan, path: str) -> dict[str, Any]:
    """What was written, as plain JSON values. The keys are part of the command's interface."""
    own = found.configuration
    return {
        "target": found.target.name,
        "version": found.target.version,
        "path": path,
        "devices": own.world,
        **attributes(own, "data", "tensor", "context", "experts", "stages"),
        "schedule": None if own.pipeline is None else own.pipeline.schedule,
        **attributes(own, "microbatches", "micro_batch", "sharing", "offload", "recompute", "prefetch"),
        "planned_ns": found.planned.makespan_ns,
        "exported_ns": found.exported.makespan_ns,
        "fits": found.exported.fits,
        "compared": [_compared(one) for one in found.compared],
        "operators": [difference.operator for difference in found.comparison.differences],
        "parameters": [name for name, _, _ in found.comparison.parameters],
        "notes": list(found.notes),
    }


def _compared(one: Candidate) -> dict[str, Any]:
    own, there = attributes(one.configuration, "sharing", "prefetch"), one.predicted
    return {**own, "ns": there.makespan_ns, "fits": there.fits, "peak_bytes": there.peak_bytes}


def text(found: ExportedPlan, name: str, path: str, operators: int) -> str:
    """The same for people."""
    target, planned, exported = found.target, found.planned.makespan_ns, found.exported.makespan_ns
    lines = [f"wrote {path}: {target.title} {target.version}, {in_words(found)}"]
    change = f"{exported / max(1, planned) - 1:+z.1%}"
    lines.append(f"predicted: {milliseconds(planned)} by the plan ({name}), {milliseconds(exported)} by this configuration ({change})")
    if not found.exported.fits:
        lines.append("the configuration does not fit into the devices' memory" + ("; the plan does" if found.planned.fits else ""))
    lines += [f"given up: {one}" for one in found.notes] + [f"note: {one}" for one in target.notes]
    given_up = listings(found.comparison, operators, "the plan", target.name) or ["it says all of the plan"]
    return "\n\n".join(["\n".join(lines), _table(found), *given_up])


def _table(found: ExportedPlan) -> str:
    """The candidates, the nearest first."""
    rows_of = [("compared, the nearest first", "predicted", "memory per device", "")]
    for one in found.compared:
        own, words = one.predicted, "all parameters on each" if one.configuration.sharing == "none" else _shared(found.target, one)
        mark = "written" if one is found.chosen else "" if own.fits else "does not fit"
        rows_of.append((words, milliseconds(own.makespan_ns), format_bytes(own.peak_bytes), mark))
    return aligned(rows_of, "")


def _shared(target: Target, one: Candidate) -> str:
    sharing: str = one.configuration.sharing
    sharing += ", values gathered before the forward pass" * (sharing == "zero1" and one.gathers)
    return f"{sharing}, prefetch {one.configuration.prefetch}" if one.gathers and len(target.depths) > 1 else sharing


def in_words(found: ExportedPlan) -> str:
    """``16 devices: 4 data x 4 tensor (sequences split), …``."""
    own = found.configuration
    degrees = [("data", own.data), ("tensor", own.tensor), ("context", own.context), ("stages", own.stages)]
    parts = [" x ".join(f"{count} {word}" for word, count in degrees if count > 1 or word == "data")]
    parts += [f"experts divided by {own.experts}"] * (own.experts > 1)
    parts += ["sequences split between layers"] * (own.base == "sequence")
    parts += [f"schedule {own.pipeline.schedule}"] if own.pipeline is not None else []
    parts += [f"{own.microbatches} micro-batches of {own.micro_batch}"] * (own.microbatches > 1)
    parts += [_shared(found.target, found.chosen)] * (own.sharing != "none")
    parts += ["optimizer states on hosts"] * own.offload
    parts += [f"{own.recompute} recomputation"] * (own.recompute != "none")
    return f"{own.world} device{'s' * (own.world > 1)}: {', '.join(parts)}"


main = entry_point(make_parser, execute)

if __name__ == "__main__":
    sys.exit(main())
