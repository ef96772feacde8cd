"""``soap-profile``: measures what a model needs on this machine. Predictions then rest on measurements.

``soap-profile --what-decides``: what to measure before a plan is chosen instead of data parallelism, as commands to run. Where the
machines are elsewhere, they are commands to run there.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from soap import api, outputs
from soap.api import informing as deciding
from soap.api.informing import Matter, Thing, WhatDecides
from soap.api.predictions import plays_compiled
from soap.cli import links, plan_summary
from soap.cli.command import Parser, UsageError, note, run_command
from soap.cli.inputs import check_inputs
from soap.cli.options import add_cluster, add_json, add_model, lossy_method, positive_number, reading, reading_options
from soap.cli.plain_text import aligned, and_more, left_last, listed, milliseconds
from soap.cli.stopping import Stopping, add_time_limit
from soap.cli.wanted import Wanted, wanted
from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.kinds import types_of
from soap.cluster.presets import LOCAL, family
from soap.cluster.topology import Topology
from soap.errors import ProfileError, StoppedBySignal, StrategyError, one_of
from soap.model.graph import OperatorGraph
from soap.profiles.corrections import CORRECTED, Correction
from soap.profiles.entries import COMPRESSION, UPDATE
from soap.profiles.exchange import export_profiles, import_profiles, shipped_profiles
from soap.profiles.keys import only_environment
from soap.profiles.lookup import ProfiledCosts, Source, foreign, is_such_a_gpu, places_of, read_corrections, read_profiles
from soap.profiles.shares import corrected, shares
from soap.profiles.shares import text as shares_text
from soap.profiles.store import Store
from soap.search.deciding import DEFAULT_CONFIDENCE
from soap.search.starts import BASELINE
from soap.simulator.simulate import Simulator, tile_count
from soap.strategy.classical import CLASSICAL, NAMED
from soap.strategy.config import Strategy
from soap.strategy.mismatch import one_line

PLAN = "plan"
"""The name of the plan that is asked about."""
MOST_ROWS = 12
LEAST_SHARE = 0.005
"""Lines of the text have at least this share, or value."""
ONE = f"{LOCAL}:1"
"""Kernels are timed on one GPU by itself."""
FILE = "measured.json"
"""What is measured elsewhere travels in."""
HOST, PORT = "HOST", 29500
"""Where ranks on several hosts meet: a name that the user has to replace, and torchrun's usual port."""
WORDS = {
    deciding.RATE: "how fast {device} is at all its work",
    deciding.TILES: "{kind} on {device}",
    deciding.LAUNCHES: "launching kernels on {device}",
    deciding.UPDATES: "updates of parameters on {device}",
    deciding.COMPRESSING: "compressing gradients on {device}",
    deciding.SERVERS: "what parameter servers do",
    deciding.LINKS: "links, and what messages and sums cost devices",
    deciding.PLANS: "the plan itself, beside the costs of its parts",
}


class Subject(NamedTuple):
    """What the user has named. ``model``: MODEL with the options that say how it is read. ``strategy``: the plan's file. ``lossy``: the
    methods by which the plan compresses gradients."""

    model: tuple[str, ...]
    cluster: str
    strategy: str
    lossy: tuple[str, ...] = ()


def check_alone(args: argparse.Namespace) -> None:
    """UsageError if options are given that ``--what-decides`` has no use for."""
    given = {"--strategy": args.strategy, "--budget": args.budget, "--again": args.again, "--kind": args.kind, "--for": args.planned}
    for option, value in given.items():
        if value:
            raise UsageError(f"--what-decides with {option}; expected one of them: --what-decides measures nothing, and prints commands")


def find_deciding(simulator: Simulator, plan: Strategy, usual: Strategy) -> WhatDecides:
    """What decides between a plan and data parallelism (``usual``). StrategyError if they are the same."""
    if plan == usual:
        raise StrategyError(f"this strategy is {BASELINE}, to which --what-decides compares; expected a strategy that differs from it")
    tasks = max(len(simulator.predict(one).tasks.tasks) for one in (plan, usual))
    compiled = plays_compiled(tasks, deciding.INFORMING_DRAWS)
    return api.what_decides(simulator, {PLAN: plan, BASELINE: usual}, compiled=compiled)


def deciding_document(found: WhatDecides, topology: Topology, subject: Subject) -> dict[str, Any]:
    """What decides, as plain JSON values. The keys are part of the command's interface."""
    plan, usual = found.rival, found.reference
    return {
        "cluster": topology.name,
        "at_hand": family(topology.name) is not None,
        "plans": {one.name: {"predicted_ns": one.usual_ns, "mean_ns": round(one.mean_ns)} for one in found.plans},
        "wins": round(plan.wins(usual), 4),
        "draws": len(plan.times_ns),
        "confidence": DEFAULT_CONFIDENCE,
        "sure": found.is_sure(DEFAULT_CONFIDENCE),
        "value_of_everything_ns": round(found.responses.value_of_all_ns),
        "value_to_measure_ns": round(found.value_to_measure_ns),
        "unexplained": round(found.unexplained, 4),
        "decides": [_deciding(one, topology, subject) for one in found.matters],
    }


def _deciding(one: Matter, topology: Topology, subject: Subject) -> dict[str, Any]:
    words = command(one, topology, subject)
    return {
        "what": WORDS[one.thing.what].format(device=one.thing.device, kind=one.thing.kind),
        "thing": one.thing.what,
        "device": one.thing.device or None,
        "kind": one.thing.kind or None,
        "share": round(one.share, 4),
        "value_ns": round(one.value_ns),
        "measured": one.measured,
        "command": None if words is None else shlex.join(words),
        "errors": [{"name": list(name), "share": round(share, 4)} for name, share in one.errors],
    }


def command(one: Matter, topology: Topology, subject: Subject) -> list[str] | None:
    """The command that makes a thing known; None if there is none. What is measured already only runs tell more about."""
    at_hand = family(topology.name)
    emulate = ["--emulate"] if at_hand == EMULATED else []
    if one.measured or one.thing.what == deciding.SERVERS:
        run = ["soap-run", subject.strategy, "--model", *subject.model, "--cluster", subject.cluster, "--compare-data-parallel", *emulate]
        return run if at_hand else [*_on_hosts(topology), *run]
    if one.thing.what == deciding.LINKS:
        links = ["soap-profile", "links", "--cluster", subject.cluster, *emulate]
        return links if at_hand else [*_on_hosts(topology), *links]
    if at_hand is None and not _is_gpu(one.thing, topology):
        return None  # what is measured of processors holds for this machine alone
    where = ["--cluster", subject.cluster] if at_hand else ["--cluster", ONE, "--for", subject.cluster]
    return ["soap-profile", *subject.model, *where, "--strategy", subject.strategy, *_kind(one.thing, subject)]


def _on_hosts(topology: Topology) -> list[str]:
    """What starts a command's ranks on all hosts of a cluster; nothing for one host, on which commands start them."""
    hosts = {device.host for device in topology.devices}
    each = str(topology.device_count // len(hosts))
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOST}:{PORT}"]
    return ["torchrun", "--nnodes", str(len(hosts)), "--nproc-per-node", each, *meet, "--no-python"] if len(hosts) > 1 else []


def _kind(thing: Thing, subject: Subject) -> list[str]:
    if thing.what == deciding.COMPRESSING:
        return [word for method in subject.lossy for word in ("--lossy", method)] + ["--kind", COMPRESSION]
    kind = {deciding.TILES: thing.kind, deciding.UPDATES: UPDATE}.get(thing.what)
    return ["--kind", kind] if kind else []


def _is_gpu(thing: Thing, topology: Topology) -> bool:
    return any(device.type.name == thing.device and device.type.kind == "cuda" for device in topology.devices)


def deciding_text(found: Mapping[str, Any]) -> str:
    """The document as a table."""
    plan, usual = found["plans"][PLAN], found["plans"][BASELINE]
    won = f"beats {BASELINE} in {found['wins'] * found['draws']:.0f} of {found['draws']} draws of the costs"
    head = (
        f"{PLAN}: {milliseconds(round(plan['mean_ns']))} on average over the draws, {BASELINE}: {milliseconds(round(usual['mean_ns']))}; "
        f"it {won}\n"
        f"to know all costs exactly is worth {milliseconds(found['value_of_everything_ns'])} of an iteration at most"
    )
    rows = [("what to know", "decides", "is worth", "command")]
    told = [one for one in found["decides"] if one["share"] >= LEAST_SHARE or one["value_ns"] >= LEAST_SHARE * plan["mean_ns"]]
    for one in told[:MOST_ROWS]:
        command = one["command"] or "(nothing measures it for such devices)"
        shown = f"{one['what']}{' (measured)' if one['measured'] and one['thing'] != deciding.PLANS else ''}"
        rows.append((shown, f"{one['share']:.0%}", milliseconds(one["value_ns"]), command))
    rows.append(("many small errors, each by itself too little to tell", f"{found['unexplained']:.0%}", "", ""))
    notes = ["decides: share of the variance of time / time of data_parallel; is worth: by how much the expected time of the plan that"]
    notes.append("is chosen drops if this alone is known exactly, so at most")
    if not found["at_hand"]:
        notes.append(f"run these commands on {found['cluster']}, or one such machine; then soap-profile export {FILE} there, and")
        notes.append(f"soap-profile import {FILE} here")
    if any(f"{HOST}:{PORT}" in (one["command"] or "") for one in told[:MOST_ROWS]):
        notes.append(f"start commands with torchrun on each of its hosts; {HOST} is the name or address of one of them, the same on all")
    if found["sure"]:
        notes.append(f"the choice is sure already: {won}")
    return "\n\n".join([head, listed(rows), "\n".join(notes)])


PROG = "soap-profile"
NAMED_GROUP = "classical strategies"
MEASURING_SHARE = 0.8
"""Part of a time limit after which nothing more is measured; the rest is for saying what is known."""
MOST_TILES = 2**18
"""A classical strategy with more tiles is not simulated to say what its time rests on."""
MOST_MISSING = 10
"""Lines of what is not measured; the JSON document has all."""


def make_parser() -> Parser:
    """The options for measuring."""
    parser = Parser(
        PROG,
        "Measure what a model's operators take on this machine, each distinct computation once. soap-search, soap-simulate and soap-run\n"
        "then predict from that. Ctrl-C keeps what was measured; the same command goes on from there.\n\n"
        f"  {PROG} show MODEL --cluster SPEC   say what is measured, and what predictions rest on\n"
        f"  {PROG} links --cluster SPEC        measure what the cluster's ranks can send each other\n"
        f"  {PROG} export FILE                 write all measurements and corrections as JSON\n"
        f"  {PROG} import FILE                 take them from such a file",
        f"{PROG} zoo:rnnlm:tiny --cluster local:2 --budget 60",
    )
    _add_subject(parser)
    budget = "of measuring; then the rest is left (default: all of it)"
    parser.add_argument("--budget", metavar="SECONDS", type=positive_number, help=budget)
    add_time_limit(parser, "what was measured by then is kept, and the same command goes on from there")
    parser.add_argument("--again", action="store_true", help="measure what is known already, too, and replace it; drops corrections")
    kind = "measure only computations of this kind, as show names them, such as linear, or update (repeatable)"
    parser.add_repeatable("--kind", metavar="KIND", help=kind)
    planned = "measure here what plans for this cluster need, which has such GPUs as this machine; --strategy is one of its plans"
    parser.add_argument("--for", dest="planned", metavar="SPEC", help=planned)
    decides = "measure nothing; say what to measure to be surer whether this strategy beats data parallelism, as commands to run"
    parser.add_argument("--what-decides", metavar="FILE", help=decides)
    return parser


def make_show_parser() -> Parser:
    """The options of ``show``."""
    parser = Parser(f"{PROG} show", "Say what is measured of a model.", f"{PROG} show zoo:rnnlm:tiny --cluster local:2")
    _add_subject(parser)
    return parser


def make_file_parser(verb: str) -> Parser:
    """The options of ``export`` and ``import``."""
    taking = "Take them from a file that export wrote, or from those that come with this package."
    what = "Write all measurements and corrections to a file." if verb == "export" else taking
    parser = Parser(f"{PROG} {verb}", what, f"{PROG} {verb} profile.json")
    if verb == "export":
        parser.add_output("file", kind=outputs.PROFILE, help="JSON")
    else:
        parser.add_argument("file", metavar="FILE", help=f"JSON, or one of these names: {', '.join(shipped_profiles())}")
    return parser


def _add_subject(parser: Parser) -> None:
    add_model(parser, positional=True)
    add_cluster(parser)
    parser.add_argument("--strategy", metavar="FILE", help="its computations, too, before those that a search may propose")
    lossy = "what compressing gradients by this method takes, as one of the cluster's devices, too, as for soap-search (repeatable)"
    parser.add_repeatable("--lossy", metavar="METHOD", type=lossy_method, help=lossy)
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    """Measure and report."""
    if args.what_decides:
        check_alone(args)
    read = {"cluster": args.planned or args.cluster, "strategy": args.strategy or args.what_decides}
    check_inputs(argparse.Namespace(**{**vars(args), **read}))
    if args.what_decides:
        return _what_decides(args)
    if family(args.cluster) is None:
        remedy = "; --cluster local --for CLUSTER measures on this machine what plans for another cluster need"
        raise UsageError(f"--cluster {args.cluster!r}: this machine is what can be measured; expected local:N or emulated:HxD@RATE{remedy}")
    store = Store()
    topology, graph, strategies = _subject(args)
    here = api.load_cluster(args.cluster) if args.planned else topology
    place = only_environment(here)
    if args.planned:
        _check_same_devices(here, topology)
    everything = _of_kinds(wanted(graph, topology, _groups(strategies), args.lossy), args.kind)
    known = set() if args.again else {entry.key for entry in store.entries(place)}
    todo = [one for one in everything if one.key not in known]
    outdated = store.corrections(place)
    with Stopping(args.limit) as stopping:
        try:
            done = _measure(args, here, todo, store) if todo else 0
            found = document(graph, topology, strategies, everything, store)
        except (KeyboardInterrupt, StoppedBySignal) as error:
            stopping.heard(error)
            return kept_so_far(PROG, stopping)
    found["measured_now"], found["corrections_dropped"] = done, len(outdated) if done else 0
    if args.json:
        print(plan_summary.dump(found))
    else:
        left = len(todo) - done
        rest = f"{left} are left: the same command goes on" if left else "nothing is left"
        print(f"measured {done} computations now; {rest}")
        if found["corrections_dropped"]:
            print(f"dropped {len(outdated)} corrections of soap-compare --calibrate, because they were made without these measurements")
        print()
        print(text(found))
    return 0


def kept_so_far(prog: str, stopping: Stopping) -> int:
    """Say that what was measured is kept. Returns the exit code: 0 at the end of the time limit."""
    ended = "interrupted" if stopping.number else "the time is over"
    note(prog, f"{ended}: what was measured is kept, and the same command goes on from there")
    return stopping.exit_code if stopping.number else 0


def _of_kinds(everything: list[Wanted], kinds: Sequence[str]) -> list[Wanted]:
    """Those of these kinds; all if there are none. UsageError if nothing is of a kind."""
    there = sorted({one.kind for one in everything})
    for kind in kinds:
        if kind not in there:
            raise UsageError(f"--kind {kind!r}: the model has no such computations; expected {one_of(kind, there)}")
    return [one for one in everything if one.kind in kinds] if kinds else everything


def _check_same_devices(here: Topology, planned: Topology) -> None:
    """ProfileError unless what is measured here holds for some devices of the cluster that is planned for."""
    own, theirs = here.devices[0].type, types_of(planned)
    if own.kind != "cuda" or not any(is_such_a_gpu(own.name, kind) for kind in theirs):
        raise ProfileError(
            f"--for {planned.name!r}: its devices are {', '.join(kind.name for kind in theirs)}, and this machine's {own.name}; expected "
            "some GPUs of the same kind: run the command on a machine that has them, of each kind in turn"
        )


def _what_decides(args: argparse.Namespace) -> int:
    """Say what to measure."""
    topology = api.load_cluster(args.cluster)
    graph = api.planned_graph(args.model, **reading(args, topology))
    plan = api.load_strategy(args.what_decides, graph, topology)
    graph = api.with_recorded_rows(graph, args.what_decides)
    found = find_deciding(api.simulator_for(graph, topology), plan, api.classical(BASELINE, graph, topology))
    lossy = tuple(dict.fromkeys(sync.compression.word for sync in plan.parameters.values() if sync.compression is not None))
    subject = Subject((args.model, *reading_options(args)), args.cluster, args.what_decides, lossy)
    told = deciding_document(found, topology, subject)
    print(plan_summary.dump(told) if args.json else deciding_text(told))
    return 0


def _measure(args: argparse.Namespace, topology: Topology, todo: Sequence[Wanted], store: Store) -> int:
    from soap.cli.measuring import measure  # torch

    place = only_environment(topology)
    with tqdm(total=len(todo), desc="measuring", unit="computation", disable=None, leave=False) as bar:

        def progress(one: Wanted) -> None:
            bar.set_postfix_str(one.name, refresh=False)
            bar.update()

        stop_at = time.monotonic() + MEASURING_SHARE * args.limit.left_s
        return measure(args.model, reading(args, topology), topology, place, todo, store, args.budget, progress, stop_at)


def execute_show(args: argparse.Namespace) -> int:
    """Report what is known."""
    topology, graph, strategies = _subject(args)
    found = document(graph, topology, strategies, wanted(graph, topology, _groups(strategies), args.lossy), Store())
    print(plan_summary.dump(found) if args.json else text(found))
    return 0


def execute_export(args: argparse.Namespace) -> int:
    """Write all measurements to a file."""
    store = Store()
    count = export_profiles(store, args.file)
    print(f"wrote {count} measurements and corrections to {args.file}")
    return 0


def execute_import(args: argparse.Namespace) -> int:
    """Take measurements from a file."""
    path = args.file if Path(args.file).exists() else shipped_profiles().get(args.file, args.file)
    count = import_profiles(Store(), path)
    print(f"took {count} measurements and corrections from {args.file}")
    return 0


def _subject(args: argparse.Namespace) -> tuple[Topology, OperatorGraph, dict[str, Strategy]]:
    """The cluster that is planned for, the model, and the strategies to report about."""
    topology = api.load_cluster(getattr(args, "planned", None) or args.cluster)
    graph = api.planned_graph(args.model, **reading(args, topology))
    strategies = {name: api.classical(name, graph, topology) for name in (NAMED if graph.sparse else CLASSICAL)}
    if args.strategy:
        strategies[args.strategy] = api.load_strategy(args.strategy, graph, topology)
    return topology, graph, strategies


def _groups(strategies: Mapping[str, Strategy]) -> dict[str, list[Strategy]]:
    """The groups to report by: strategies with names, then each other group."""
    groups = {NAMED_GROUP: [strategy for name, strategy in strategies.items() if name in NAMED]}
    return groups | {name: [strategy] for name, strategy in strategies.items() if name not in NAMED}


def document(
    graph: OperatorGraph, topology: Topology, strategies: Mapping[str, Strategy], everything: Sequence[Wanted], store: Store
) -> dict[str, Any]:
    """What is known of a model on a cluster, as plain JSON values. The keys are part of the command's interface."""
    places, profiles = places_of(topology, store), read_profiles(topology, store)
    corrections = read_corrections(topology, store)
    costs = ProfiledCosts(topology, profiles, corrections=corrections)
    simulator = Simulator(graph, api.with_links(topology), costs)
    measured = [{entry.key for entry in profiles.get(kind.name, ())} for kind in types_of(topology)]
    groups: dict[str, dict[str, int]] = {}
    missing = []
    for one in everything:
        source = Source.MEASURED if all(one.key in keys for keys in measured) else _source(costs, graph, topology, one)
        groups.setdefault(one.group, dict.fromkeys(map(str, Source), 0))[source.value] += 1
        if source is not Source.MEASURED:
            line = {"operator": one.name, "kind": one.kind, "group": one.group, "source": source.value}
            missing.append({**line, "estimated_ns": one.estimated_ns})
    return {
        "model": {"name": graph.name, "hash": graph.hash, "operators": len(graph.operators)},
        "cluster": topology.name,
        "store": str(store.path),
        "environments": {name: place.text for name, place in places.items()},
        "computations": groups,
        "strategies": {
            name: {
                "predicted_ns": simulation.makespan_ns,
                "shares": shares(costs, simulation.tasks),
                "corrected": corrected(costs, simulation.tasks),
            }
            for name, strategy in strategies.items()
            if tile_count(strategy) <= MOST_TILES
            for simulation in (simulator.predict(strategy),)
        },
        "corrections": {name: [_correction(one) for one in own] for name, own in corrections.items()},
        "missing": missing,
        "foreign": {place.text: count for place, count in foreign(topology, store).items()},
    }


def _correction(correction: Correction) -> dict[str, Any]:
    values = {"of": correction.name, "factor": correction.factor, "tasks": correction.tasks, "model": correction.model}
    return {**values, "strategy_hash": correction.strategy_hash, "calibrated_at": correction.calibrated_at}


def _source(costs: ProfiledCosts, graph: OperatorGraph, topology: Topology, one: Wanted) -> Source:
    """Where the answer for something that is not measured on all types of devices comes from, for the type of which least is known."""
    if one.tile is None:
        return Source.ESTIMATED
    answers = [costs.answer(graph, one.tile, kind, backward=False).source for kind in types_of(topology)]
    return max(answers, key=[*Source].index)


def text(found: Mapping[str, Any]) -> str:
    """The document as tables."""
    sources = [source.value for source in Source]
    head = f"{found['model']['name']} ({found['model']['operators']} operators) on {found['cluster']}\n"
    head += "\n".join(f"measured on: {place}" for place in found["environments"].values()) + f"\nkept in: {found['store']}"
    rows = [("distinct computations of", *sources)]
    rows += [(name, *(str(counts[source]) for source in sources)) for name, counts in found["computations"].items()]
    predicted = [("predicted", "time", "compute time")]
    for name, one in found["strategies"].items():
        predicted.append((name, milliseconds(one["predicted_ns"]), shares_text(one["shares"], one["corrected"])))
    sections = [head, aligned(rows), left_last(predicted)]
    for device, own in found["corrections"].items():
        factors = [("of", "factor", "tasks", "from")]
        factors += [(one_line(one["of"], 60), f"{one['factor']:.3f}", str(one["tasks"]), _origin(one)) for one in own]
        sections.append(f"{device}, {CORRECTED}:\n{left_last(factors)}")
    if found["missing"]:
        dear = sorted(found["missing"], key=lambda one: -one["estimated_ns"])[:MOST_MISSING]
        lines = [(f"{one['operator']} ({one['kind']})", milliseconds(one["estimated_ns"]), one["source"]) for one in dear]
        more = and_more(len(found["missing"]), len(dear))
        sections.append("\n".join(["not measured, the most expensive first:", left_last(lines), *more]))
    if found["foreign"]:
        elsewhere = [f"  {count} on {place}" for place, count in found["foreign"].items()]
        sections.append("measured elsewhere, and not used here:\n" + "\n".join(elsewhere))
    return "\n\n".join(sections)


def _origin(one: Mapping[str, Any]) -> str:
    """The run of which a correction is: model, strategy, time."""
    return one_line(f"{one['model']}, strategy {one['strategy_hash']}, {one['calibrated_at']}")


VERBS: dict[str, tuple[Callable[[], Parser], Callable[[argparse.Namespace], int]]] = {
    "show": (make_show_parser, execute_show),
    "links": (links.make_parser, links.execute),
    "export": (partial(make_file_parser, "export"), execute_export),
    "import": (partial(make_file_parser, "import"), execute_import),
}
"""First word of the command -> the parser of what follows it, and what is done then. Without one of these, models are measured."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Give a model that is named like a verb as ``./show``."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in VERBS:
        make, run = VERBS[words[0]]
        return run_command(make(), run, words[1:])
    return run_command(make_parser(), execute, words)


if __name__ == "__main__":
    sys.exit(main())
