"""Where a search begins: which starts there are, in which order they are evaluated, and how they are brought into the space."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from soap.cluster.topology import Topology
from soap.search.constraints import brought_inside
from soap.search.lossy import lossy_starts, lossy_ways
from soap.search.metropolis import Evaluator
from soap.search.more_starts import with_more_starts
from soap.search.options import SearchOptions
from soap.search.pipelining import is_cut, keeps_stages, require_inside
from soap.search.record import Recorder
from soap.search.space import Space
from soap.search.starts import BASELINE, INITIAL, Start, check_start, different, reference_strategies, starting_strategies
from soap.strategy.config import Strategy
from soap.strategy.named import RECOMPUTE, is_simulated, saving_starts
from soap.strategy.sync import in_one_partition

NO_STARTS: Mapping[str, Callable[[], Strategy]] = MappingProxyType({})


def inside(space: Space, options: SearchOptions, strategy: Strategy) -> Strategy:
    """The strategy with what violates the constraints changed; itself if nothing does."""
    return require_inside(strategy, in_one_partition(brought_inside(space, strategy), options.uncut))


def first_starts(
    space: Space, topology: Topology, options: SearchOptions, names: Sequence[str] | None, usual: Start
) -> dict[str, Strategy]:
    """Name -> strategy, in the order of evaluation: the starts for which no costs need to be known."""
    saving = () if usual.fits else [name for name in saving_starts(topology) if options.recompute is not False or RECOMPUTE not in name]
    strategies = starting_strategies(space.graph, topology, names, options.initial, options.seed, space.syncs, saving)
    strategies[BASELINE] = usual.strategy
    found = {name: inside(space, options, own) for name, own in strategies.items() if name == INITIAL or keeps_stages(space, own)}
    lossy = lossy_starts(space.graph, found.get(BASELINE, usual.strategy), options.compressions, lossy_ways(topology))
    return found | {name: inside(space, options, own) for name, own in lossy.items() if keeps_stages(space, own)}


def with_starts(
    space: Space,
    topology: Topology,
    evaluator: Evaluator,
    recorder: Recorder,
    options: SearchOptions,
    first: Mapping[str, Strategy],
    further: Mapping[str, Callable[[], Strategy]],
    evaluate: Callable[[str, Strategy], None],
) -> Space:
    """Evaluate all starts but those that are recorded already. Returns the space with what they call for, and with what informed proposals
    borrow from."""
    strategies = dict(first)

    def tried(name: str, strategy: Strategy) -> None:
        strategies[name] = inside(space, options, strategy)
        evaluate(name, strategies[name])

    for name, strategy in first.items():
        if all(strategy is not start.strategy for start in recorder.starts):
            evaluate(name, strategy)
    for name, make in further.items():
        if keeps_stages(space, own := make()):
            tried(name, own)
    space = with_more_starts(space, topology, evaluator, recorder, options, tried)
    references = reference_strategies(space.graph, topology, (own for own in strategies.values() if not is_cut(own)))
    return replace(space, references=different(inside(space, options, own) for own in references if keeps_stages(space, own)))


def start_names(options: SearchOptions, further_starts: Collection[str]) -> list[str] | None:
    """The starts that the options name, without those made elsewhere; None if they name none. StrategyError if there is no such start."""
    names = [name for name in options.starts or () if name not in further_starts]
    for name in names:
        check_start(name)
    return None if options.starts is None else [name for name in names if not is_simulated(name)]
