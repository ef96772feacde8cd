"""The options of a search as one value, shared by ``soap.find`` and ``soap-search``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from math import inf
from typing import ParamSpec, TypeAlias, TypeVar

from soap.cluster.memory_budget import read_budget
from soap.errors import ProfileError, StrategyError, asked
from soap.plan.compression.training import PLAIN, PlannedTraining
from soap.search.constraints import pairs_of
from soap.search.deciding import DEFAULT_CONFIDENCE
from soap.search.metropolis import DEFAULT_BETA
from soap.simulator.costs import COST_SOURCES, CostSource
from soap.simulator.draws import Risk
from soap.simulator.kernels import Kernels, check_kernels
from soap.strategy.compression import Compression, parse
from soap.strategy.config import Strategy, SyncConfig

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_BUDGET = 10_000
"""Number of proposals: takes seconds to a few minutes for the models of the zoo."""
DEFAULT_DRAWS = 8
DEFAULT_RISK = Risk.TAIL
"""Draws of the costs under which a search compares strategies."""
MOST_DRAWS = 1024
OPTIMIZER_STATES = 2
"""Tensors of a parameter's size that the optimizer keeps for it: Adam's two, so that memory is not underestimated."""

Constraints: TypeAlias = "Mapping[str, str] | Sequence[tuple[str, str]]"
"""Pattern of operator names -> constraint on these operators (``soap.search.constraints``); pairs if a pattern occurs more than once."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SearchOptions:
    """How to search. StrategyError, TopologyError or ProfileError in one line for an impossible value.

    ``budget``: proposals to evaluate, beside the starts. ``seed``: equal seeds give equal results. ``beta``: how strictly a chain refuses
    slower strategies (``soap.search.metropolis``). ``starts``: names of strategies to begin with; by default all classical ones.
    ``initial``: one more start. ``patience``: a chain ends if this share of its budget has brought no improvement; None: never.
    ``seconds``: time limit of the whole search, from the call, with reading and deciding; outside of the main thread it may end a little
    later. ``cores``: how many of this machine's to use, by default all; the result does not depend on it.

    ``pins={"layers.*": "sample:4"}`` fixes some operators and searches the rest. ``forbidden={"*": "reduction"}`` rules out ways to split,
    devices or copies. ``syncs=[parameter_server(4)]``: methods that parameters may be synchronized by, beside all-reduce; by default all
    methods for sparse parameters, and all-reduce for dense ones. ``lossy=["rgc:0.001"]``: methods that may compress gradients
    (``soap.strategy.compression``), where their policy says so; by default none, so that every plan trains like one process. ``training``:
    what training then adds: corrected momentum, a warm-up, clipping (``CompressedTraining.planned``); with clipping no plan is found by
    which ranks cannot clip, and updates wait for the norm (``plan.syncs.clipping``). ``memory_budget``: how much of each device's memory
    plans may use, such as ``80%`` or ``20GB``; by default all that the cluster has.

    ``recompute``: whether operators may be recomputed instead of keeping what they make (``soap.search.recomputing``); by default where
    memory binds.

    ``pipelines``: whether plans may cut a step into micro-batches that go through stages (``soap.search.pipelining``); by default where
    rough costs expect that to be faster than all starts.

    ``uncut``: names of parameters that every device owns whole or not at all; optimizers need this if their update is not elementwise.
    ``together``: names of parameters that a device owns either all of, or none.

    ``optimizer_states``: tensors of a parameter's size that the optimizer keeps. ``measured_updates``: whether ``soap-profile`` measures
    this optimizer's updates (SGD, Adam); if not, they are estimated. ``costs``: ``auto`` or ``estimate`` (``soap.simulator.costs``).
    ``kernels``: what runs on GPUs (``soap.simulator.kernels``). ``sum_dtype``: in which type partial results of 16-bit tensors are summed
    (``soap.load``).

    Costs are uncertain (``soap.simulator.draws``). ``risk``: what strategies are compared by: their mean time under ``draws`` draws of the
    costs, or something more careful (a ``Risk`` or its word); None: their time under the most likely costs. ``confidence``: which plan is
    the answer: a safe one, which is faster than data parallelism in at least this share of further draws (``soap.search.deciding``), or
    with 0 the fastest one on average; by default the fastest, or, where the cluster is this machine, on which plans can be run, one that
    is safe by 0.9. The outcome has both.
    """

    budget: int = DEFAULT_BUDGET
    seed: int = 0
    beta: float = DEFAULT_BETA
    starts: Sequence[str] | None = None
    initial: Strategy | None = None
    patience: float | None = None
    seconds: float | None = None
    cores: int | None = None
    pins: Constraints = ()
    forbidden: Constraints = ()
    syncs: Sequence[SyncConfig] = ()
    lossy: Sequence[Compression | str] = ()
    training: PlannedTraining = PLAIN
    recompute: bool | None = None
    pipelines: bool | None = None
    uncut: Collection[str] = ()
    together: Collection[str] = ()
    optimizer_states: int = OPTIMIZER_STATES
    measured_updates: bool = True
    costs: CostSource = "auto"
    kernels: Kernels = "eager"
    sum_dtype: str | None = None
    risk: Risk | str | None = DEFAULT_RISK
    draws: int = DEFAULT_DRAWS
    confidence: float | None = None
    memory_budget: str | None = None

    def __post_init__(self) -> None:
        _check(self.budget, self.beta, self.patience, self.seconds)
        if self.cores is not None and self.cores < 1:
            raise StrategyError(f"cores {self.cores}: expected at least 1, or None for all of this machine")
        if not 0 <= (self.confidence or 0) <= 1:
            expected = f"a share from 0 to 1, such as {DEFAULT_CONFIDENCE}; 0: the fastest plan"
            raise StrategyError(f"{asked('confidence')} {self.confidence}: expected {expected}")
        object.__setattr__(self, "risk", _risk(self.risk))
        if not 1 <= self.draws <= MOST_DRAWS:
            raise StrategyError(f"draws {self.draws}: expected 1 to {MOST_DRAWS}; the default is {DEFAULT_DRAWS}")
        if self.optimizer_states < 0:
            raise StrategyError(f"optimizer_states {self.optimizer_states}: expected 0 or more tensors of a parameter's size")
        check_costs(self.costs)
        check_kernels(self.kernels)
        if self.memory_budget is not None:
            read_budget(self.memory_budget)
        for name in ("pins", "forbidden"):
            object.__setattr__(self, name, pairs_of(getattr(self, name)))
        for name in ("syncs", "uncut", "together"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "lossy", self.compressions)
        if self.starts is not None:
            object.__setattr__(self, "starts", tuple(self.starts))

    def __repr__(self) -> str:
        """A call that makes the same options, without what is usual."""
        usual = {field.name: field.default for field in fields(self)}
        own = (f"{name}={getattr(self, name)!r}" for name in usual if getattr(self, name) != usual[name])
        return f"{type(self).__name__}({', '.join(own)})"

    @property
    def compressions(self) -> tuple[Compression, ...]:
        """``lossy`` as settings."""
        return tuple(parse(one) if isinstance(one, str) else one for one in self.lossy)


def without_fields(verb: Callable[P, T]) -> Callable[P, T]:
    """A verb that takes ``SearchOptions``: TypeError in one line, with what to write, if it is given fields of these by themselves."""

    @wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if loose := [f"{field.name}={kwargs[field.name]!r}" for field in fields(SearchOptions) if field.name in kwargs]:
            options = f"soap.SearchOptions({', '.join(loose)})"
            raise TypeError(f"{verb.__name__} takes no {loose[0].partition('=')[0]}: write soap.{verb.__name__}(model, cluster, {options})")
        return verb(*args, **kwargs)

    return call


def _check(budget: int, beta: float, patience: float | None, seconds: float | None) -> None:
    """Raise StrategyError in one line for an impossible value."""
    if budget < 1:
        raise StrategyError(f"{asked('budget')} {budget}: expected at least 1 proposal; a few hundred are a good beginning")
    if not 0 < beta < inf:
        raise StrategyError(f"{asked('beta')} {beta}: expected a positive number; the default is {DEFAULT_BETA:g}")
    if patience is not None and not 0 < patience <= 1:
        raise StrategyError(f"patience {patience}: expected a share of the budget above 0 and up to 1, such as 0.5")
    if seconds is not None and not 0 < seconds < inf:
        raise StrategyError(f"{asked('seconds')} {seconds}: expected a positive number of seconds")


def _risk(risk: Risk | str | None) -> Risk | None:
    """The risk, also by its word. StrategyError in one line if there is no such risk."""
    try:
        return None if risk is None else Risk(risk)
    except ValueError:
        known = ", ".join(repr(one.value) for one in Risk)
        raise StrategyError(f"risk {risk!r}: expected one of {known}, or None for the most likely costs alone") from None


def check_costs(costs: CostSource) -> None:
    """Raise ProfileError in one line if there is no such source of costs."""
    if costs not in COST_SOURCES:
        raise ProfileError(f"costs {costs!r}: expected one of {', '.join(COST_SOURCES)}")
