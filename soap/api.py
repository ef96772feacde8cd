"""The composition root: the public verbs, and the one module that knows all the parts.

A model may be given as what ``load`` returns, as an ``OperatorGraph``, or as text for ``load``; a cluster as a ``Topology`` or as text for
``load_cluster``. Torch is imported by the verbs that need it, when they are called.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from soap.cluster import yaml_file
from soap.cluster.presets import family
from soap.cluster.topology import Topology
from soap.errors import ModelError, ProfileError, SoapWarning, StrategyError
from soap.files import read_text, write_bytes_atomically, write_text_atomically
from soap.measure.paired import Gain
from soap.model import sparse_shares
from soap.model.graph import OperatorGraph
from soap.profiles.roofline import RooflineCosts
from soap.search.chains import search as search_graph
from soap.search.constraints import Pairs, pairs_of, parse
from soap.search.explanation import Line, Synchronized
from soap.search.explanation import explain as explain_operators
from soap.search.explanation import explain_synchronization as explain_parameters
from soap.search.options import OPTIMIZER_STATES, SearchOptions, check_costs
from soap.search.plot import plot
from soap.search.record import SearchResult
from soap.search.starts import BASELINE, DYNAMIC
from soap.simulator.costs import CostModel, CostSource
from soap.simulator.simulate import Simulation, Simulator
from soap.strategy import json_file
from soap.strategy.classical import NAMED
from soap.strategy.config import Strategy
from soap.strategy.json_file import StrategyContents, StrategyHeader

if TYPE_CHECKING:
    import pandas as pd

    from soap.profiles.corrections import Correction
    from soap.profiles.entries import Entry
    from soap.profiles.store import Store
    from soap.search.oracles.bounds import LowerBound
    from soap.simulator.tasks import TaskGraph
    from soap.tracing.model import TracedModel

T = TypeVar("T")
Model: TypeAlias = "TracedModel | OperatorGraph | str | Path"
Cluster: TypeAlias = "Topology | str | Path"

DEFAULT_OPTIONS = SearchOptions()


def export(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    path: str | Path,
    loss: Callable[..., Any] | None = None,
    dynamic_batch: bool | Mapping[str, int] = False,
    verify: bool = True,
    imports: Sequence[str] = (),
) -> None:
    """Write a module in training mode, called with these arguments, to a ``.pt2`` whose only output is the scalar loss.

    ``loss`` makes the scalar from the module's output where that is something else, e.g. ``lambda output: output.loss``.
    ``dynamic_batch``: the file can be trained on batches of any size (a last one that is smaller), of dimension 0 of the inputs or, as a
    mapping, of other dimensions by input name.
    ``verify``: one step of the module in eager PyTorch and one of its program are compared first, in loss, gradients and buffers, and what
    differs is refused: a file holds no backward code of its own (``torch.autograd.Function``, hooks). The module stays as it was. This
    takes two training steps and the memory for one with all gradients.
    ``imports``: the modules that define the model's custom operators (``torch.library``), which commands then need by ``--import``.
    ModelError in one line for an operator outside of ATen if there are none.
    """
    from soap.runtime.eager import NO_VALUES, eager_judge
    from soap.tracing.example import Example
    from soap.tracing.export import export_model

    if isinstance(imports, str):
        raise ModelError(f"imports {imports!r}: expected a sequence of modules, such as ({imports!r},)")
    arguments = tuple(args), dict(kwargs or {})
    judge = eager_judge(Example(model, *arguments, loss)) if verify else None
    unjudged = NO_VALUES if verify else "exported with verify=False"
    options: dict[str, Any] = {"judge": judge, "unjudged": unjudged, "imports": imports}
    export_model(model, *arguments, path=path, loss=loss, dynamic_batch=dynamic_batch, **options)


def load(
    spec: str | Path,
    *,
    plan_only: bool = False,
    batch_dims: Mapping[str, int] | None = None,
    dtype: str | None = None,
    autocast: str | None = None,
    batch_norm: str = "global",
    imports: Sequence[str] = (),
) -> TracedModel:
    """The model of a ``.pt2`` file or of the zoo (``zoo:NAME[:SIZE][@BATCH]``), as a graph of operators that can be computed tile by tile.

    ``plan_only``: without memory for its weights. ``batch_dims``: input name -> dimension of the samples, where it is not 0. ``dtype``:
    replaces the floating-point type, for example ``float64`` for checks. ``autocast="bfloat16"``: with the casts of ``torch.autocast``.
    ``batch_norm``: ``global`` normalises by the whole batch, ``local`` each tile by its own part of it. Strategies hold for models that
    were loaded with the same ``batch_norm``. ``imports``: modules that define custom operators of the model, imported first.
    """
    from soap.tracing.load import load_model

    if str(spec) and Path(spec).is_dir():
        raise ModelError(f"model {str(spec)!r} is a folder; expected a .pt2 file or zoo:NAME: name the file in it")
    return load_model(
        str(spec), plan_only=plan_only, batch_dims=batch_dims, dtype=dtype, autocast=autocast, batch_norm=batch_norm, imports=imports
    )


def measure_rows(model: TracedModel | str | Path, batches: Iterable[Sequence[Any]]) -> OperatorGraph:
    """The model's graph, for ``soap.search`` and the like, with its sparse parameters' touched rows counted on batches of the user's data.

    ``batches``: each a sequence of tensors in the order of the model's inputs. Without this, they are counted on the example inputs, unless
    those always look up the same row. ModelError if no batch has the shapes of the model's inputs.
    """
    from soap.tracing import row_counting
    from soap.tracing.execute import ExecutableModel

    traced = load(model, plan_only=True) if isinstance(model, (str, Path)) else model
    if not isinstance(traced, ExecutableModel):
        raise ModelError(f"rows are counted by running a model's look-ups; expected what soap.load returns, not {type(traced).__name__}")
    return replace(traced.graph, sparse=row_counting.measure_rows(traced, batches))


def load_cluster(spec: str | Path) -> Topology:
    """The cluster of a YAML file or a preset; ``local:N`` and ``emulated:HxD@RATE`` are this machine, measured once and then remembered."""
    topology = yaml_file.load_cluster(spec)
    if isinstance(spec, str) and topology.name == spec and family(spec) is not None:
        from soap.measure.this_machine import measured_topology

        return measured_topology(topology)
    return topology


@dataclass(frozen=True)
class Run:
    """A strategy that was run for real. ``measured_ns``: median of its turns, per iteration. ``allowed``: whether it obeys the
    search's constraints. ``gain``: over data parallelism, in turns of their own, if it was the fastest in those before."""

    name: str
    strategy: Strategy
    predicted_ns: int
    measured_ns: int
    allowed: bool
    gain: Gain | None = None


LEAST_MEASURED = 1.02
"""What a measured gain must exceed: a machine differs by as much from one hour to the next."""


def least_measured(run: Run, usual: Run) -> float:
    """What a run's gain over data parallelism must exceed with confidence before it replaces it. A plan that is predicted to be slower
    has to win by as much as it is predicted to lose: then what was measured may be due to what else the machine did."""
    return max(LEAST_MEASURED, run.predicted_ns / max(1, usual.predicted_ns))


@dataclass(frozen=True)
class Guard:
    """Whether what was found may replace data parallelism by its prediction alone. ``gain``: how many times as fast it is predicted to
    be. ``margin``: what it must exceed for that. ``shares``: parts of the predicted compute time by where they come from; ``links``: how
    links were measured, None if they were not."""

    gain: float
    margin: float
    found_ns: int
    shares: Mapping[str, float]
    links: str | None

    @property
    def keeps_data_parallelism(self) -> bool:
        """Because the gain is within the errors of predictions."""
        return self.gain <= self.margin


@dataclass(frozen=True)
class SearchOutcome:
    """What a search found, with what it was found for, so that it can be saved and looked at.

    ``strategy`` is the one that ``runs``, what of it was run for real, have shown to be the fastest; if nothing was run, the one predicted
    to be fastest (``result.strategy``), or data parallelism if that gains no more than ``margin`` over it (``guard``). ``margin``: 1 takes
    whatever is predicted to be faster, None what such predictions are known to err by (``soap.profiles.margins``).
    ``pins``, ``forbidden``: what the search had to obey.
    """

    simulator: Simulator
    result: SearchResult
    runs: tuple[Run, ...] = ()
    pins: Pairs = ()
    forbidden: Pairs = ()
    margin: float | None = 1.0

    def with_runs(self, runs: Sequence[Run]) -> SearchOutcome:
        """The same search, with what was measured."""
        return replace(self, runs=tuple(runs))

    @property
    def kept(self) -> Run | None:
        """The run that counts: what was the fastest, if it was confirmed to be faster than data parallelism in turns of their own
        (``least_measured``); else data parallelism, as users know what they have with it; the fastest of all if that was not run or is not
        allowed. None if nothing was run."""
        allowed = [run for run in self.runs if run.allowed]
        usual = next((run for run in allowed if run.name == BASELINE), None)
        if usual is None:
            return min(allowed, key=lambda run: run.measured_ns, default=None)
        compared = next((run for run in allowed if run.gain is not None), usual)
        return compared if compared.gain is not None and compared.gain.at_least > least_measured(compared, usual) else usual

    @cached_property
    def usual(self) -> Strategy | None:
        """Data parallelism, if it obeys the search's constraints and fits into memory."""
        strategy = classical(BASELINE, self.simulator.graph, self.simulator.topology)
        return next((start.strategy for start in self.result.starts if start.fits and start.strategy == strategy), None)

    @cached_property
    def guard(self) -> Guard | None:
        """Whether what was found may replace data parallelism; None if nothing was held against it: ``margin`` is 1, it is data
        parallelism, or that is not possible."""
        found = self.result.strategy
        if self.margin == 1 or self.usual is None or found == self.usual:
            return None
        margin = self.known_error if self.margin is None else self.margin
        record = costs_record(self.simulator, self.simulator.predict(found).tasks)
        gain = self.result.data_parallel_ns / max(1, self.result.cost_ns)
        return Guard(gain, margin, self.result.cost_ns, record["shares"], record["links"])

    @cached_property
    def known_error(self) -> float:
        """By what factor predictions of gains over data parallelism are known to err, with the costs of these predictions."""
        from soap.profiles.margins import least_gain

        strategies = [self.result.strategy] if self.usual in (None, self.result.strategy) else [self.result.strategy, self.usual]
        records = [costs_record(self.simulator, self.simulator.predict(own).tasks) for own in strategies if own is not None]
        return max(least_gain(record["shares"], links_measured=record["links"] is not None) for record in records)

    @property
    def strategy(self) -> Strategy:
        """The best strategy."""
        if self.kept is not None:
            return self.kept.strategy
        return self.usual if self.usual is not None and self._is_held_back else self.result.strategy

    @property
    def time_ns(self) -> int:
        """Its predicted time per training iteration."""
        if self.kept is not None:
            return self.kept.predicted_ns
        return self.result.data_parallel_ns if self._is_held_back else self.result.cost_ns

    @property
    def _is_held_back(self) -> bool:
        return self.guard is not None and self.guard.keeps_data_parallelism

    @property
    def speedup(self) -> float:
        """Data parallelism's predicted time over it."""
        return self.result.data_parallel_ns / self.time_ns

    @property
    def history(self) -> pd.DataFrame:
        """One row per proposal."""
        return self.result.history

    @cached_property
    def simulation(self) -> Simulation:
        """The best strategy's iteration, task by task."""
        return self.simulator.run(self.strategy)

    @cached_property
    def explanation(self) -> list[Line]:
        """Why each operator got its configuration; simulates one strategy per operator that is unlike data parallelism."""
        return explain(self.simulator, self.strategy, self.simulation)

    @cached_property
    def synchronization(self) -> list[Synchronized]:
        """What it would cost to all-reduce the parameters that are synchronized otherwise."""
        return explain_synchronization(self.simulator, self.strategy)

    @cached_property
    def bound(self) -> LowerBound | None:
        """What no strategy of the space, as far as it is allowed, can be below; None if working it out would take too long."""
        from soap.search.oracles.bounds import is_quickly_bounded, lower_bound  # imports numba
        from soap.search.space import build_space

        simulator = self.simulator
        count = simulator.topology.device_count
        space = build_space(simulator.graph, count, allowed=parse(simulator.graph, count, self.pins, self.forbidden))
        return lower_bound(space, simulator.topology, simulator.costs) if is_quickly_bounded(space) else None

    @property
    def record(self) -> dict[str, Any]:
        """What a strategy file remembers of the search. Nothing of when or where it ran: equal searches write equal files, unless the
        strategies were run for real."""
        result = self.result
        record: dict[str, Any] = {
            "predicted_ns": self.time_ns,
            "data_parallel_ns": result.data_parallel_ns,
            "starts": {start.name: {"predicted_ns": start.cost_ns, "fits": start.fits} for start in result.starts},
            "memory_bytes": [use.total for use in self.simulation.memory],
            "bytes_moved": self.simulation.bytes_moved,
            "costs": costs_record(self.simulator, self.simulation.tasks),
            "search": {
                "seed": result.seed,
                "budget": result.budget,
                "beta": result.beta,
                "evaluations": result.evaluations,
                "interrupted": result.interrupted,
                "locally_optimal": result.locally_optimal,
            },
        }
        if self.simulator.graph.sparse:
            record["sparse"] = sparse_shares.document(self.simulator.graph)
        for name, pairs in (("pins", self.pins), ("forbidden", self.forbidden)):
            if pairs:
                record["search"][name] = [f"{pattern}={spec}" for pattern, spec in pairs]
        if self.kept is not None:
            runs = {run.name: {"predicted_ns": run.predicted_ns, "measured_ns": run.measured_ns} for run in self.runs}
            record["measured"] = {"kept": self.kept.name, "runs": runs}
        elif self.guard is not None:
            record["guard"] = guard_record(self.guard)
        return record

    def plot(self, path: str | Path) -> None:
        """Draw the search to a ``.png``, ``.svg`` or ``.pdf``: best cost against proposals, starts, acceptance per move.

        SoapError without matplotlib (``soap-search[plots]``).
        """
        write_bytes_atomically(path, plot(self.result, path))

    def save(self, path: str | Path) -> None:
        """Write the strategy with its record to ``path``."""
        save_strategy(path, self.strategy, self.simulator.graph, self.simulator.topology, self.record)


def find(
    model: Model,
    cluster: Cluster,
    options: SearchOptions = DEFAULT_OPTIONS,
    *,
    progress: bool = False,
    improved: Callable[[int], None] = lambda cost_ns: None,
    stopped: Callable[[], bool] = lambda: False,
) -> SearchOutcome:
    """Search for the strategy with the shortest predicted iteration: ``soap.find(model, cluster, soap.SearchOptions(budget=500))``.

    ``progress``: a bar on stderr, if that is a terminal. ``improved``: is told each new best cost in ns, when it is found. ``stopped``:
    asked now and then; once it is true, the search ends as by Ctrl-C, with the best so far (``result.interrupted``).
    Nothing is measured or run. Equal arguments give equal results, on any number of cores, unless ``seconds`` end the search.
    """
    simulator = simulator_for(
        model, cluster, optimizer_states=options.optimizer_states, costs=options.costs, measured_updates=options.measured_updates
    )
    from soap.simulator.incremental import IncrementalSimulator  # numba takes a second to import: only for who searches

    evaluator = IncrementalSimulator(simulator)
    if progress and not evaluator.begins_at_once():
        _announce_compiling()
    pins, forbidden, starts = pairs_of(options.pins), pairs_of(options.forbidden), options.starts
    result = search_graph(
        simulator.graph,
        simulator.topology,
        evaluator,
        budget=options.budget,
        seed=options.seed,
        beta=options.beta,
        starts=None if starts is None else [name for name in starts if name != DYNAMIC],
        further_starts=_dynamic_start(simulator, starts),
        initial=options.initial,
        patience=options.patience,
        progress=progress,
        pins=pins,
        forbidden=forbidden,
        syncs=options.syncs,
        uncut=options.uncut,
        together=options.together,
        seconds=options.seconds,
        cores=options.cores,
        improved=improved,
        stopped=stopped,
    )
    return SearchOutcome(simulator, result, pins=pins, forbidden=forbidden, margin=options.margin)


def _dynamic_start(simulator: Simulator, starts: Sequence[str] | None) -> dict[str, Callable[[], Strategy]]:
    """The start that a dynamic programme finds, if it is asked for, or nothing is and it takes seconds."""
    from soap.search.dynamic import MAX_PAIRS, dynamic_strategy, pair_count
    from soap.search.space import build_space

    if starts is not None and DYNAMIC not in starts:
        return {}
    space = build_space(simulator.graph, simulator.topology.device_count)
    if starts is None and pair_count(space) > MAX_PAIRS:
        return {}
    return {DYNAMIC: lambda: dynamic_strategy(space, simulator.topology, simulator.costs)}


def simulate(
    model: Model,
    cluster: Cluster,
    strategy: Strategy | str,
    *,
    optimizer_states: int = OPTIMIZER_STATES,
    costs: CostSource = "auto",
) -> Simulation:
    """Predict one training iteration. ``strategy`` may be the name of a classical one, such as ``data_parallel``."""
    simulator = simulator_for(model, cluster, optimizer_states=optimizer_states, costs=costs)
    if isinstance(strategy, str):
        strategy = classical(strategy, simulator.graph, simulator.topology)
    return simulator.run(strategy)


def explain(simulator: Simulator, strategy: Strategy, simulation: Simulation | None = None) -> list[Line]:
    """What each operator of a strategy costs beside data parallelism, what setting it back would do, and what binds it.

    ``simulation``: the strategy's own, if it is there already.
    """
    from soap.simulator.incremental import IncrementalSimulator

    if not IncrementalSimulator.begins_at_once():
        _announce_compiling()
    baseline = classical("data_parallel", simulator.graph, simulator.topology)
    runs = simulation or simulator.run(strategy), simulator.run(baseline)
    return explain_operators(simulator.graph, *runs, (strategy, baseline), IncrementalSimulator(simulator))


def explain_synchronization(simulator: Simulator, strategy: Strategy) -> list[Synchronized]:
    """What it would cost to all-reduce the parameters of a strategy that are synchronized otherwise."""
    from soap.simulator.incremental import IncrementalSimulator

    return explain_parameters(strategy, IncrementalSimulator(simulator))


def simulator_for(
    model: Model,
    cluster: Cluster,
    *,
    optimizer_states: int = OPTIMIZER_STATES,
    costs: CostSource = "auto",
    measured_updates: bool = True,
) -> Simulator:
    """A simulator of this model on this cluster, with the costs and the links that are known for it."""
    topology = with_links(_topology(cluster), costs)
    return Simulator(_graph(model), topology, costs_for(topology, optimizer_states, costs, measured_updates), optimizer_states)


def costs_for(
    topology: Topology, optimizer_states: int = OPTIMIZER_STATES, costs: CostSource = "auto", measured_updates: bool = True
) -> CostModel:
    """What was measured for the devices of this cluster by ``soap-profile``, with the corrections of ``soap-compare --calibrate``, if there
    is anything and ``costs`` lets it; else estimates. ``measured_updates``: whether the optimizer is one that ``soap-profile`` measures.

    A store that cannot be read is a warning, and counts as empty.
    """
    if _takes_measurements(costs):
        from soap.profiles.lookup import ProfiledCosts, read_corrections, read_profiles

        nothing: tuple[dict[str, list[Entry]], dict[str, list[Correction]]] = {}, {}
        profiles, corrections = _from_store(lambda store: (read_profiles(topology, store), read_corrections(topology, store)), nothing)
        if profiles or corrections:
            return ProfiledCosts(topology, profiles, optimizer_states, corrections, measured_updates)
    return RooflineCosts(topology, optimizer_states)


def with_links(topology: Topology, costs: CostSource = "auto") -> Topology:
    """The same cluster, with the figures that ``soap-profile links`` has measured of its links, if it has and ``costs`` lets it.

    A store that cannot be read is a warning, and counts as empty.
    """
    if not _takes_measurements(costs) or topology.device_count < 2:
        return topology
    from soap.profiles.measured_links import with_stored_links

    return _from_store(lambda store: with_stored_links(topology, store), topology)


def _takes_measurements(costs: CostSource) -> bool:
    check_costs(costs)
    return costs == "auto"


def _from_store(read: Callable[[Store], T], otherwise: T) -> T:
    """What is read from the user's store; ``otherwise``, with a warning, if that is not possible."""
    from soap.profiles.store import Store

    try:
        return read(Store())
    except ProfileError as cause:
        warnings.warn(f"{cause}; going on with estimates", SoapWarning, stacklevel=1)  # from one place, so that it is said once
        return otherwise


def costs_record(simulator: Simulator, tasks: TaskGraph) -> dict[str, Any]:
    """Where the numbers of a simulation come from. ``shares``: parts of the compute time by source, from measured to estimated.
    ``corrected``: the part of it that ``soap-compare --calibrate`` has corrected, whatever its source. ``links``: how they were measured,
    in one line; None if their figures are those of the cluster's description."""
    from soap.profiles.shares import corrected, shares

    return {
        "description": simulator.costs.description,
        "hash": simulator.costs_hash,
        "shares": shares(simulator.costs, tasks),
        "corrected": corrected(simulator.costs, tasks),
        "links": simulator.topology.links_source or None,
    }


def guard_record(guard: Guard) -> dict[str, Any]:
    """What was kept, and why, as plain values. ``found_ns``: the predicted time of the fastest plan found."""
    kept = BASELINE if guard.keeps_data_parallelism else "found"
    return {"kept": kept, "found_ns": guard.found_ns, "gain": round(guard.gain, 4), "margin": round(guard.margin, 4)}


def classical(name: str, model: Model, cluster: Cluster) -> Strategy:
    """The classical strategy of this name, such as ``data_parallel`` or ``megatron``; StrategyError if there is none."""
    if name not in NAMED:
        raise StrategyError(f"no strategy is named {name!r}; expected one of {', '.join(NAMED)}")
    return NAMED[name](_graph(model), _topology(cluster))


def load_strategy(path: str | Path, model: Model, cluster: Cluster, *, any_cluster: bool = False) -> Strategy:
    """The strategy of a file; StrategyError in one line, with the differences, if it was made for another model or cluster.

    ``any_cluster``: it may have been made for another cluster of as many devices.
    """
    graph, topology = _graph(model), _topology(cluster)
    return _read_strategy(path, lambda text: json_file.loads(text, graph, topology, any_cluster=any_cluster)[0])


def load_strategy_header(path: str | Path) -> StrategyHeader:
    """What a strategy file says about itself, without its model and cluster."""
    return _read_strategy(path, json_file.load_header)


def with_recorded_rows(graph: OperatorGraph, path: str | Path) -> OperatorGraph:
    """The graph with the touched rows of sparse parameters that a strategy file remembers its search by."""
    found = load_strategy_contents(path).record.get("sparse", {})
    if not isinstance(found, Mapping):
        raise StrategyError(f"{path}: the record of sparse parameters is no object; search again")
    try:
        return sparse_shares.with_document(graph, found)
    except StrategyError as error:
        raise StrategyError(f"{path}: {error}") from None


def load_strategy_contents(path: str | Path) -> StrategyContents:
    """All that a strategy file says, without its model and cluster."""
    return _read_strategy(path, json_file.load_contents)


def save_strategy(
    path: str | Path, strategy: Strategy, model: Model, cluster: Cluster, record: Mapping[str, Any] | None = None
) -> None:
    """Write a strategy for ``load_strategy``; ``record``: plain values to remember with it."""
    write_text_atomically(path, json_file.dumps(strategy, _graph(model), _topology(cluster), record))


def _announce_compiling() -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print("compiling the simulator for this machine, once: less than a minute", file=sys.stderr)


def _read_strategy(path: str | Path, read: Callable[[str], T]) -> T:
    text = read_text(path, what="strategy file", error=StrategyError)
    try:
        return read(text)
    except StrategyError as error:
        raise StrategyError(f"{path}: {error}") from None


def _graph(model: Model) -> OperatorGraph:
    if isinstance(model, OperatorGraph):
        return model
    if isinstance(model, (str, Path)):
        return load(model, plan_only=True).graph
    return model.graph


def _topology(cluster: Cluster) -> Topology:
    return cluster if isinstance(cluster, Topology) else load_cluster(cluster)
