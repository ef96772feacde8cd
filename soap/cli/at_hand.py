"""If the machines of a cluster are at hand, ``soap-search`` measures before it searches and runs what it found, unless it is told not
to. What the user has asked for must be possible, and its failure ends the command. What is done by default is skipped with one line if
it fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from soap import api
from soap.cli import first_measuring, verification
from soap.cli.command import UsageError, note, one_line
from soap.cli.first_measuring import Measured
from soap.cli.options import Reading
from soap.cli.stopping import Stopping
from soap.cli.updating import Updating
from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.presets import family
from soap.cluster.topology import Topology
from soap.emulation.support import require_support
from soap.errors import RuntimeFailure, StoppedBySignal
from soap.model.graph import OperatorGraph
from soap.runtime.comm.launched import under_launcher
from soap.search.options import SearchOptions
from soap.simulator.costs import CostSource
from soap.time_limit import TimeIsUp

ESTIMATE: CostSource = "estimate"
MEASURING_SHARE, MOST_SHARE = 0.3, 0.4
"""Parts of the time that is left that measuring may take, and after which it is ended."""


@dataclass(frozen=True)
class Wish:
    """What to measure and run. ``profile_s``: seconds of measuring, 0 for none. ``finalists``: number of strategies to run, 0 for none.
    ``asked``: whether the user has asked for the runs. ``problem``: why nothing is done by default, or empty."""

    profile_s: float = 0.0
    finalists: int = 0
    asked: bool = False
    problem: str = ""


def check_asked(cluster: str, profile_s: float | None, finalists: int | None, costs: CostSource) -> None:
    """UsageError or RuntimeFailure if this machine cannot do what the user has asked for."""
    if profile_s and family(cluster) is None:
        raise UsageError(
            f"--profile measures this machine, and --cluster is {cluster!r}; expected --cluster local:N or emulated:HxD@RATE, or no "
            "--profile"
        )
    if profile_s and costs == ESTIMATE:
        raise UsageError("--profile with --costs estimate, which ignores measurements; leave one of them out")
    if profile_s and family(cluster) == EMULATED:
        require_support()
    if finalists:
        verification.check_possible(cluster)


def check_none_asked(profile_s: float | None, finalists: int | None) -> None:
    """UsageError if measuring or running is asked for with several clusters: plans that were run do not compare with predicted ones."""
    for option, value in (("--profile", profile_s), ("--verify", finalists)):
        if value:
            raise UsageError(f"{option} with several --cluster, which are compared by predictions; expected one --cluster, or no {option}")


def wish(topology: Topology, profile_s: float | None, finalists: int | None, costs: CostSource) -> Wish:
    """What to measure and run for this cluster. None stands for options that the user has not given."""
    usable = (profile_s, finalists) != (0, 0) and family(topology.name) is not None and topology.device_count > 1
    problem, at_hand = "", usable and not under_launcher(os.environ)
    if at_hand and family(topology.name) == EMULATED and (profile_s is None or finalists is None):
        try:
            require_support()
        except RuntimeFailure as error:
            at_hand, problem = False, f"nothing is measured or run: {error}"
    usual_s = first_measuring.DEFAULT_S if at_hand and costs != ESTIMATE else 0.0
    usual = verification.DEFAULT_FINALISTS if at_hand else 0
    wanted = usual_s if profile_s is None else profile_s, usual if finalists is None else finalists
    return Wish(*wanted, asked=bool(finalists), problem=problem)


def profile(
    prog: str,
    model: str,
    reading: Reading,
    graph: OperatorGraph,
    topology: Topology,
    wish: Wish,
    stopping: Stopping,
    options: SearchOptions | None = None,
) -> tuple[Measured | None, Wish]:
    """Measure, first what decides a search with these options. Returns what is still to be done. After Ctrl-C the search goes on, but
    nothing is run behind it; after SIGTERM it ends at once, with the best of its starts."""
    limit = stopping.limit
    try:
        with limit.part(MOST_SHARE):
            seconds = limit.seconds(MEASURING_SHARE, wish.profile_s) or wish.profile_s
            measured = first_measuring.measure_first(model, reading, graph, topology, seconds, options=options)
    except TimeIsUp:
        note(prog, "the time for measuring is over: the search goes on with what is known")
        return None, wish
    except (KeyboardInterrupt, StoppedBySignal) as error:
        if isinstance(error, StoppedBySignal):  # while ranks were measuring
            stopping.number = error.number
        if not stopping.is_terminated:
            stopping.go_on()
            note(prog, "measuring interrupted: the search goes on with what is known and will run nothing afterwards; Ctrl-C ends it")
        return None, replace(wish, finalists=0)
    if measured.problem:
        note(prog, f"not everything was measured; the search goes on with what is known: {measured.problem}")
    return measured, wish


def verify(
    prog: str,
    outcome: api.SearchOutcome,
    model: str,
    reading: Reading,
    seed: int,
    data: str | None,
    wish: Wish,
    optimizer: str | Updating = "adam",
    most_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[api.SearchOutcome, float | None]:
    """Run the strategies. Returns the outcome with what was measured, and the seconds that it took. If it fails: an error if the user
    has asked for it; otherwise one line, and None. ``most_s``: seconds for it; None: the usual ones."""
    began = clock()
    seconds = verification.ASKED_S if wish.asked else verification.DEFAULT_S
    if most_s is not None and most_s < 2 * verification.STARTING_S:
        note(prog, f"nothing was verified: {most_s:.0f} s are left for it; the search's choice by predictions stands")
        return outcome, None
    seconds = seconds if most_s is None else min(seconds, most_s)
    try:
        chances = not wish.asked  # plans that cannot win are not run by default
        outcome = verification.verify(outcome, wish.finalists, model, reading, seed, data, optimizer, seconds=seconds, only_chances=chances)
    except StoppedBySignal:
        raise
    except Exception as error:
        if wish.asked:
            raise
        why = one_line(str(error)) or type(error).__name__
        note(prog, f"nothing was verified; the search's choice by predictions stands: {why}")
        return outcome, None
    return outcome, clock() - began
