"""``soap-export-plan``: a plan as the configuration of another trainer, with what that cannot be told and what it costs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soap import api
from soap.api.exported_plans import ExportedPlan, export_plan
from soap.cli import plan_summary, rows
from soap.cli.asked_strategy import add_asked, read_file
from soap.cli.command import Parser, run_command
from soap.cli.diff import listings
from soap.cli.inputs import check_inputs
from soap.cli.options import add_json, cluster_of, reading, refuse_overwriting
from soap.cli.plain_text import milliseconds
from soap.exported_plans.named import TARGETS
from soap.files import check_writable, write_text_atomically

PROG = "soap-export-plan"


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Write the configuration of another trainer that is nearest to a plan; say what it cannot be told, and what that costs.",
        f"{PROG} zoo:gpt:tiny --cluster p100-4x4 --strategy strategy.json --to torchtitan -o plan.toml",
    )
    add_asked(parser)
    told = "; ".join(f"{target.name}: {target.title} {target.version} ({target.suffix})" for target in TARGETS)
    parser.add_argument("--to", choices=[target.name for target in TARGETS], required=True, help=told)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="where the configuration goes")
    add_json(parser)
    return parser


def execute(args: argparse.Namespace) -> int:
    """Find the nearest configuration, write it, report."""
    inputs = {"MODEL": args.model, "--cluster": args.cluster, "--strategy": args.strategy}
    refuse_overwriting(inputs, {"--output": args.output})
    check_writable(args.output)
    check_inputs(args)
    topology = cluster_of(args, args.cluster)
    graph = rows.load_graph(args, topology)
    strategy, graph = read_file(args, graph, topology)
    if strategy is None:
        strategy = api.simulated_name(args.builtin, api.simulator_for(graph, topology, costs=args.costs))
    found = export_plan(strategy, graph, topology, args.to, autocast=reading(args, topology)["autocast"], costs=args.costs)
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
        "data": own.data,
        "tensor": own.tensor,
        "context": own.context,
        "experts": own.experts,
        "stages": own.stages,
        "schedule": None if own.pipeline is None else own.pipeline.schedule,
        "microbatches": own.microbatches,
        "micro_batch": own.micro_batch,
        "sharing": own.sharing,
        "offload": own.offload,
        "recompute": own.recompute,
        "planned_ns": found.planned.makespan_ns,
        "exported_ns": found.exported.makespan_ns,
        "fits": found.exported.fits,
        "operators": [difference.operator for difference in found.comparison.differences],
        "parameters": [name for name, _, _ in found.comparison.parameters],
        "notes": list(found.notes),
    }


def text(found: ExportedPlan, name: str, path: str, operators: int) -> str:
    """The same for people."""
    target, planned, exported = found.target, found.planned.makespan_ns, found.exported.makespan_ns
    lines = [f"wrote {path}: {target.title} {target.version}, {in_words(found)}"]
    change = f"{exported / max(1, planned) - 1:+.1%}"
    lines.append(f"predicted: {milliseconds(planned)} by the plan ({name}), {milliseconds(exported)} by this configuration ({change})")
    if not found.exported.fits:
        lines.append("the configuration does not fit into the devices' memory" + ("; the plan does" if found.planned.fits else ""))
    lines += [f"given up: {one}" for one in found.notes] + [f"note: {one}" for one in target.notes]
    given_up = listings(found.comparison, operators, "the plan", target.name)
    return "\n\n".join(["\n".join(lines), *given_up] if given_up else ["\n".join(lines), "it says all of the plan"])


def in_words(found: ExportedPlan) -> str:
    """``16 devices: 4 data x 4 tensor (sequences split), …``."""
    own = found.configuration
    degrees = [("data", own.data), ("tensor", own.tensor), ("context", own.context), ("stages", own.stages)]
    parts = [" x ".join(f"{count} {word}" for word, count in degrees if count > 1 or word == "data")]
    parts += [f"experts divided by {own.experts}"] * (own.experts > 1)
    parts += ["sequences split between layers"] * (own.base == "sequence")
    parts += [f"schedule {own.pipeline.schedule}"] if own.pipeline is not None else []
    parts += [f"{own.microbatches} micro-batches of {own.micro_batch}"] * (own.microbatches > 1)
    parts += [own.sharing] * (own.sharing != "none")
    parts += ["optimizer states on hosts"] * own.offload
    parts += [f"{own.recompute} recomputation"] * (own.recompute != "none")
    return f"{own.world} device{'s' * (own.world > 1)}: {', '.join(parts)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    return run_command(make_parser(), execute, argv)


if __name__ == "__main__":
    sys.exit(main())
