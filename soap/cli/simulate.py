"""``soap-simulate``: predict what one training iteration of a given strategy costs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from soap import api, outputs
from soap.api.fitting import MOST_WAYS
from soap.api.large_plans import large_prediction
from soap.cli import explanation, inputs, plan_summary, simulate_report, stale_plan
from soap.cli.command import Parser, UsageError, entry_point, refuse_given
from soap.cli.inputs import add_asked, check_inputs, read_file
from soap.cli.options import add_explain, add_kernels, add_outputs, cluster_of, reading, share
from soap.cli.stopping import add_time_limit
from soap.cli.timelines import predicted_text
from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.files import write_bytes_atomically, write_text_atomically
from soap.model.graph import OperatorGraph
from soap.model.json_text import short
from soap.plan.compression.training import PLAIN, PlannedTraining, for_scaling
from soap.search.layer_placement import LEAST_GAIN
from soap.search.plot import check_plot, tornado
from soap.search.starts import BASELINE
from soap.simulator.folded import FoldedSimulation
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy.config import Strategy
from soap.strategy.named import base_of, named
from soap.strategy.ralp import RALP

PROG = "soap-simulate"
FITTING_SHARE = 0.9
"""Part of a time limit after which no way to fit is begun."""


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Predict time, memory and traffic of one training iteration.",
        f"{PROG} zoo:gpt:tiny --cluster p100-4x4 --builtin megatron --timeline trace.json",
    )
    add_asked(parser, required=False)
    add_kernels(parser)
    least = f"{100 * LEAST_GAIN:.0f}%%"
    gain_help = f"with --builtin {RALP}: what layers on servers must save at least of a step (default {least}), or none are moved"
    parser.add_argument("--least-gain", metavar="SHARE", type=share, help=gain_help)
    fits_help = (
        f"say whether it fits into the devices' memory (default: {BASELINE}), and if not, the {MOST_WAYS} fastest ways that do, in seconds"
    )
    parser.add_argument("--fits", action="store_true", help=fits_help)
    simulate_report.add_beside(parser)
    parser.add_output("-o", "--output", kind=outputs.STRATEGY, help="write the strategy, as soap-search does (with --builtin)")
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="with --strategy: price it on this cluster even if it was made for another one of as many devices",
    )
    turning = "say by how much each figure of the cluster must be another one for the choice between this and data parallelism to turn over"
    parser.add_argument("--sensitivity", action="store_true", help=turning)
    parser.add_output("--plot", kind=outputs.PICTURE, help="with --sensitivity: draw it as a tornado (.png, .svg, .pdf); needs matplotlib")
    add_explain(parser)
    add_time_limit(parser, "with --fits the ways that were tried by then are shown, of which there may be more than without it")
    add_outputs(parser, timeline="write the iteration as a trace for Perfetto")
    return parser


def execute(args: argparse.Namespace) -> int:
    """Simulate and report."""
    _check(args)
    whole = cluster_of(args, args.cluster)
    topology = simulate_report.asked_part(args, whole)
    graph, training = inputs.load_graph(args, topology), for_scaling(PLAIN, args.autocast)
    if args.fits and not args.strategy:
        return _report_fit(args, _fits(args, graph, topology, args.builtin or BASELINE, training), graph, topology)
    strategy, graph = _read(args, graph, topology)
    if args.fits and strategy is not None:
        found = _fits(args, graph, topology, strategy, training)
        return _report_fit(args, replace(found, asked=replace(found.asked, name=Path(args.strategy).name)), graph, topology)
    made_for = _made_for(args, topology) if args.what_if else None
    simulator = api.simulator_for(graph, topology, costs=args.costs, training=training, kernels=args.kernels)
    least_gain = LEAST_GAIN if args.least_gain is None else args.least_gain
    placed = api.placed_layers(args.builtin, simulator, least_gain) if _is_layered(args) else None
    if placed is not None:
        strategy = named(args.builtin, graph, topology, placed.strategy)
    strategy = api.simulated_name(args.builtin, simulator) if strategy is None else strategy
    if strategy.workers is not None:
        return _report_workers(args, strategy, topology)
    if strategy.stale:
        return _report_stale(args, strategy, simulator)
    large = large_prediction(simulator, strategy, whole=not any(getattr(args, name) for name in simulate_report.OF_TASKS))
    if large is not None:
        told = simulate_report.large_report(args, simulator, strategy, large, args.builtin or Path(args.strategy).name)
        print(plan_summary.dump(told) if args.json else simulate_report.large_text(told))
        return 0
    simulation = simulator.predict(strategy)
    explained = _whole(simulation) if args.explain else None
    if args.timeline:
        write_text_atomically(args.timeline, predicted_text(graph, strategy, simulation, simulator.costs_hash, memory=True))
    sensitivities = simulate_report.find_sensitivity(simulator, strategy, simulator.data_parallel) if args.sensitivity else None
    summary = {**plan_summary.document(simulator, strategy, simulation), "iteration": simulate_report.iteration_document(simulation)}
    name = args.builtin or Path(args.strategy).name
    if args.beside:
        summary["beside"] = simulate_report.beside_document(args, whole, name, simulator.run(strategy))
    if placed is not None:
        summary["layers_on_servers"] = simulate_report.layers_document(placed, graph, topology)
    summary["what_if"] = None if made_for is None else {"made_for": made_for}
    if sensitivities is not None:
        summary["sensitivity"] = simulate_report.sensitivity_document(sensitivities, simulator)
        if args.plot:
            write_bytes_atomically(args.plot, tornado(sensitivities, args.plot))
    if explained is not None:
        why = (
            api.explain(simulator, strategy, explained),
            api.explain_synchronization(simulator, strategy),
            api.explain_unkept(simulator, strategy),
        )
        summary |= explanation.documents(graph, *why, simulation.makespan_ns)
    if args.output:
        api.save_strategy(args.output, strategy, graph, topology, plan_summary.recorded(simulation))
    if args.json:
        print(plan_summary.dump(summary))
    else:
        if made_for is not None:
            print(f"what if: this strategy was made for cluster {short(made_for)}; its devices are taken by number\n")
        print(plan_summary.text(summary, name) + "\n\n" + simulate_report.iteration_text(summary["iteration"]))
        if placed is not None:
            print("\n" + simulate_report.layers_text(summary["layers_on_servers"]))
        if args.beside:
            print("\n" + simulate_report.beside_text(summary["beside"]))
        if sensitivities is not None:
            print("\n" + simulate_report.sensitivity_text(summary["sensitivity"]))
        if explained is not None:
            print("".join(f"\n{section}\n" for section in explanation.texts(summary, simulation.makespan_ns, topology)), end="")
    return 0


def _check(args: argparse.Namespace) -> None:
    """UsageError in one line for options that do not go together; errors of files before anything is worked out."""
    if not (args.builtin or args.strategy or args.fits):
        raise UsageError("no strategy; expected --strategy FILE or --builtin NAME, or --fits to ask what fits")
    if args.output and not args.builtin:
        raise UsageError("--output without --builtin NAME, which is what it writes; expected both")
    simulate_report.check_fits(args)
    simulate_report.check_beside(args)
    if args.what_if and args.builtin:
        raise UsageError("--what-if with --builtin; expected --strategy FILE, since a classical strategy is made for the cluster at hand")
    if args.least_gain is not None and not _is_layered(args):
        raise UsageError(f"--least-gain without --builtin {RALP}, for which it counts; expected both")
    if args.plot and not args.sensitivity:
        raise UsageError("--plot without --sensitivity, which is what it draws; expected both")
    if args.plot:
        check_plot(args.plot)
    check_inputs(args)


def _is_layered(args: argparse.Namespace) -> bool:
    """Whether a cut of the model is to be found."""
    return bool(args.builtin) and base_of(args.builtin)[0] == RALP and not args.fits


def _fits(
    args: argparse.Namespace, graph: OperatorGraph, topology: Topology, asked: Strategy | str, training: PlannedTraining
) -> api.Fit:
    """Whether this fits, and what does; within the command's time limit, if it has one."""
    seconds = args.limit.seconds(FITTING_SHARE)
    limit = {} if seconds is None else {"seconds": seconds}
    return api.fits(graph, topology, asked, costs=args.costs, training=training, kernels=args.kernels, **limit)


def _report_fit(args: argparse.Namespace, fit: api.Fit, graph: OperatorGraph, topology: Topology) -> int:
    """Print what fits. InfeasibleError in one line if nothing does."""
    found = simulate_report.fit_document(fit, args, graph, topology)
    print(plan_summary.dump(found) if args.json else simulate_report.fit_text(found))
    simulate_report.require_way(found)
    return 0


def _report_stale(args: argparse.Namespace, strategy: Strategy, simulator: Simulator) -> int:
    """Say what a stale strategy plans and how it trains, and write it. It has no iteration of the whole batch."""
    from soap.elastic.planned import plan_of  # torch

    _refuse_of_steps(args, strategy)
    graph, topology = simulator.graph, simulator.topology
    found = api.steady(simulator, strategy)
    plan = {**stale_plan.describe(plan_of(strategy, graph), topology), "steady": stale_plan.steady(found, topology)}
    if args.output:
        api.save_strategy(args.output, strategy, graph, topology, {"samples_per_second": found.samples_per_second})
    print(plan_summary.dump({"model": graph.name, "cluster": topology.name, **plan}) if args.json else stale_plan.text(plan, topology))
    return 0


def _report_workers(args: argparse.Namespace, strategy: Strategy, topology: Topology) -> int:
    """Say how virtual workers train."""
    _refuse_of_steps(args, strategy)
    model = api.load(args.model, plan_only=True, **reading(args, topology))
    found = api.simulate_workers(model, topology, strategy, costs=args.costs)
    told = stale_plan.describe_workers(found)
    print(plan_summary.dump(told) if args.json else stale_plan.workers_text(told))
    return 0


def _refuse_of_steps(args: argparse.Namespace, strategy: Strategy) -> None:
    """UsageError in one line for options about one step of all."""
    said = f"with a stale strategy ({strategy.consistency}), which has no iteration of the whole batch; leave it out"
    refuse_given(args, ("timeline", "beside", "explain", "sensitivity"), said)


def _read(args: argparse.Namespace, graph: OperatorGraph, topology: Topology) -> tuple[Strategy | None, OperatorGraph]:
    """``read_file``. If ``--what-if`` would help, the refusal says so."""
    try:
        return read_file(args, graph, topology, any_cluster=args.what_if)
    except StrategyError as error:
        header = api.load_strategy_header(args.strategy)
        if args.what_if or header.model_hash != graph.hash or len(header.devices) != topology.device_count:
            raise
        api.load_strategy(args.strategy, graph, topology, any_cluster=True)  # what is wrong beside the cluster is said as it is
        raise StrategyError(f"{error}, or price it here all the same with --what-if") from None


def _whole(simulation: Simulation | FoldedSimulation) -> Simulation:
    """StrategyError if only two of many copies were simulated: an explanation would have to simulate all devices for each operator."""
    if isinstance(simulation, FoldedSimulation):
        raise StrategyError(
            f"--explain: {simulation.topology.device_count} devices in equal copies, of which two were simulated; expected a cluster small "
            "enough to simulate every device: explain the strategy of fewer copies"
        )
    return simulation


def _made_for(args: argparse.Namespace, topology: Topology) -> str | None:
    """The name of the cluster that the strategy was made for, if it is another one."""
    header = api.load_strategy_header(args.strategy)
    same = header.cluster_hash == topology.hash and list(header.devices) == [device.name for device in topology.devices]
    return None if same else header.cluster


main = entry_point(make_parser, execute)

if __name__ == "__main__":
    sys.exit(main())
