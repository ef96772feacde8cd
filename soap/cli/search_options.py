"""The options of ``soap-search`` about measuring, the search's length and what it may choose, and what they mean to ``soap.find``."""

from __future__ import annotations

import argparse
from dataclasses import replace

from soap import api
from soap.cli import first_measuring, verification
from soap.cli.command import Parser, UsageError
from soap.cli.compressing import training_of
from soap.cli.options import (
    add_compressed_training,
    add_memory_budget,
    builtin,
    constraint,
    finalists,
    lossy_method,
    not_negative,
    not_negative_number,
    positive,
    positive_number,
    share,
    sync_method,
)
from soap.cli.stopping import add_time_limit
from soap.cli.updating import Updating
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.plan.compression.training import PLAIN, PlannedTraining, for_scaling
from soap.search.deciding import DEFAULT_CONFIDENCE
from soap.search.metropolis import DEFAULT_BETA
from soap.search.options import DEFAULT_BUDGET, DEFAULT_DRAWS, DEFAULT_RISK, SearchOptions
from soap.search.starts import DYNAMIC, RANDOM
from soap.simulator.draws import Risk
from soap.strategy.classical import CLASSICAL
from soap.strategy.consistency import EXPECTED, parse
from soap.strategy.named import forms

PATIENCE = 0.5
NO_RISK = "none"
"""Word for: only the most likely costs count."""


def add_runs(parser: Parser) -> None:
    """Options for measuring before the search and running its best strategies afterwards, and how sure a plan must be if nothing is run."""
    parser.add_argument(
        "--profile",
        metavar="SECONDS",
        type=not_negative_number,
        help="before the search, measure what is not known yet about links and the model's computations, as soap-profile does, for at most "
        f"SECONDS (default {first_measuring.DEFAULT_S:g} with --cluster local:N or emulated:HxD@RATE, which are this machine; 0: do not)",
    )
    parser.add_argument(
        "--verify",
        metavar="K",
        type=finalists,
        nargs="?",
        const=verification.DEFAULT_FINALISTS,
        help="run the K best strategies (default %(const)s), the best start and data parallelism for real, and keep the fastest; if the "
        f"cluster is this machine, that is done by default, for at most {verification.DEFAULT_S:g} seconds, and for up to "
        f"{verification.ASKED_S:g} if asked for (0: do not)",
    )
    parser.add_argument(
        "--confidence",
        metavar="SHARE",
        type=share,
        help="which of two plans that were not run goes to --output, the other one into a file next to it: 0: the fastest on average over "
        "draws of the costs, which are known within errors; more: one that is safe, faster than data parallelism in at least this share of "
        f"them (default: 0, or {DEFAULT_CONFIDENCE:g} where the cluster is this machine, on which plans can be run)",
    )


def add_budget(parser: Parser) -> None:
    """Options for the length of the search and its random draws."""
    parser.add_argument("--budget", metavar="N", type=positive, default=DEFAULT_BUDGET, help="strategies to try (default %(default)s)")
    add_time_limit(parser, "measuring, searching, deciding and running; the best plan so far is written", "--seconds")
    parser.add_argument(
        "--patience",
        metavar="P",
        type=positive_number,
        default=PATIENCE,
        help="stop when this share of the budget has brought nothing better (default %(default)g; 1: never)",
    )
    parser.add_argument(
        "--risk",
        choices=[*Risk, NO_RISK],
        default=DEFAULT_RISK,
        help=f"what plans are compared by: their mean time under {DEFAULT_DRAWS} draws of the costs, halfway between that and the mean of "
        "the worst quarter (tail), the 80%% quantile, the worst, or their time under the most likely costs (none; default %(default)s)",
    )
    parser.add_argument("--seed", metavar="S", type=not_negative, default=0, help="equal seeds give equal results (default %(default)s)")
    parser.add_argument(
        "--beta",
        metavar="B",
        type=positive_number,
        default=DEFAULT_BETA,
        help="how strictly the search refuses slower strategies on its way (default %(default)g)",
    )


def add_choices(parser: Parser) -> None:
    """Options for the starts of the search and what it may choose."""
    parser.add_argument(
        "--start",
        metavar="NAME",
        action="append",
        type=start,
        help=f"begin with this strategy: {forms()}; {RANDOM} or {DYNAMIC} (repeatable; default: {', '.join(CLASSICAL)}, and those that "
        "other methods of synchronization allow, and dynamic if it takes seconds only, and mixtures that save memory if data_parallel does "
        "not fit); data_parallel is always among them",
    )
    add_memory_budget(parser)
    parser.add_repeatable(
        "--pin",
        metavar="GLOB=SPEC",
        type=constraint,
        help="fix operators and search the rest: 'layers.*=sample:4,channel:2', 'loss=replicas:2'; @0-3, alone or behind that, fixes the "
        "devices (repeatable; factors by name or kind)",
    )
    parser.add_repeatable(
        "--forbid",
        metavar="GLOB=SPEC",
        type=constraint,
        help="rule something out for operators: '*=reduction' splitting such factors, '*=replicas' copies, '*=@3' a device (repeatable)",
    )
    parser.add_repeatable(
        "--sync",
        metavar="METHOD",
        type=sync_method,
        help="allow this method of synchronizing parameters beside all-reduce: parameter_server:P (on servers in P partitions; +local "
        "behind it: each host adds up first), zero (each device keeps a part of the optimizer's state, and updates it), fsdp (it keeps a "
        "part of the values, too, and gathers the others' for each use), or allgather (of sparse parameters' rows); allreduce allows "
        "nothing else (repeatable; default: any method for sparse parameters, all-reduce for dense ones, and zero and fsdp for all if "
        "data_parallel does not fit into memory)",
    )
    parser.add_repeatable(
        "--lossy",
        metavar="METHOD",
        type=lossy_method,
        help="allow gradients to be compressed by this method: rgc[:DENSITY], rgc+asq[:DENSITY], chunked[:DENSITY], powersgd[:RANK], bf16, "
        "int8 (repeatable; default: none, as a plan that compresses trains no more exactly like one process)",
    )
    add_compressed_training(parser, "as soap-run will be told: ", lossy="with --lossy, ")
    parser.add_argument(
        "--recompute",
        choices=tuple(MAYBE),
        default="auto",
        help="whether operators may be computed again for the backward pass instead of keeping what they make: auto: where memory binds "
        "(default); one by one: --pin 'GLOB=recompute', --forbid 'GLOB=recompute'",
    )
    parser.add_argument(
        "--pipelines",
        choices=tuple(MAYBE),
        default="auto",
        help="whether plans may cut a step into micro-batches that go through stages, one device group after the other: auto: where rough "
        "costs expect that to be faster than all starts (default)",
    )


def add_servers(parser: Parser) -> None:
    """The option for plans of servers and workers."""
    parser.add_argument(
        "--consistency",
        metavar="HOW",
        type=consistency,
        help=f"search a plan of servers that own the tables and workers that hold no state, which may be so far apart: {EXPECTED}; how "
        "many machines are servers and how many workers, in how many partitions and along which axis tables are, for the most samples per "
        f"second in the steady state (--budget: plans to simulate, by default {api.MOST_SIMULATED})",
    )
    parser.add_argument(
        "--workers",
        metavar="POLICY",
        choices=(*api.WORKER_POLICIES, api.ANY),
        help="with --consistency: search virtual workers instead, pipelines with minibatches of their own in flight, which share the "
        "model's batch and wait for each other by the waves of these; who is a worker: "
        f"{', '.join(api.WORKER_POLICIES)}, or {api.ANY}: the best of these and of the most promising other divisions of the devices",
    )


MAYBE = {"auto": None, "yes": True, "no": False}
"""``--recompute``, ``--pipelines`` -> the options of ``SearchOptions``."""


def start(text: str) -> str:
    """The name of a start."""
    return text if text in (RANDOM, DYNAMIC) else builtin(text)


def consistency(text: str) -> str:
    """How far workers may be apart."""
    try:
        return str(parse(text))
    except StrategyError:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not allowed; expected {EXPECTED}") from None


def _training(args: argparse.Namespace, updating: Updating) -> PlannedTraining:
    """What training will have beside the optimizer. UsageError if that is for plans that compress, and none may."""
    given = {"--correct-momentum": args.correct_momentum, "--warm-up": any(args.warm_up) or None}
    named = [option for option, value in given.items() if value is not None]
    if named and not args.lossy:
        raise UsageError(f"{named[0]} without --lossy; expected --lossy METHOD too: the times of other plans do not depend on it")
    if args.autocast == "float16" and args.lossy:
        raise UsageError("--autocast float16 with --lossy; expected bfloat16: a scaled loss is not divided by its scale before it is sent")
    if not named and args.clip_norm is None:
        return for_scaling(PLAIN, args.autocast)
    planned = for_scaling(training_of(args.correct_momentum, args.warm_up, args.clip_norm).planned, args.autocast)
    return replace(planned, kept=planned.kept + (planned.kept > 0 and updating.decays))


def search_options(args: argparse.Namespace, updating: Updating, graph: OperatorGraph) -> SearchOptions:
    """The search options that the arguments ask for. Without ``--optimizer`` it is Adam, which is known; trying another needs torch."""
    options = SearchOptions(
        budget=args.budget,
        seed=args.seed,
        seconds=args.time_limit,
        patience=args.patience,
        beta=args.beta,
        starts=args.start,
        pins=args.pin,
        forbidden=args.forbid,
        syncs=args.sync,
        lossy=args.lossy,
        training=_training(args, updating),
        recompute=MAYBE[args.recompute],
        pipelines=MAYBE[args.pipelines],
        costs=args.costs,
        kernels=args.kernels,
        risk=None if args.risk == NO_RISK else Risk(args.risk),
        confidence=args.confidence,
    )
    if not args.optimizer:
        return options
    from soap.runtime.updates.trial import optimizer_states

    tried = updating.tried(graph)
    states = optimizer_states(tried, sparse=bool(graph.sparse))
    return replace(options, optimizer_states=states, measured_updates=tried.measured, uncut=tried.whole, together=tried.coupled)
