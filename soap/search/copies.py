"""Chains from a strategy of many tiles, played as two of its many equal copies, by moves that keep copies alike.

Marks, methods and the prefetch are the same for all copies. An operator that moves breaks them up, and then each proposal is played on all
devices, which takes a second. So operators stay where the start has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from soap.plan.marks.seam import all_marked
from soap.search.compiled.runner import CompiledSpace
from soap.search.space import OperatorSpace, Space
from soap.simulator.engine import Engine
from soap.simulator.folded_bound import folded_shared
from soap.simulator.folding import Folding
from soap.simulator.incremental import IncrementalSimulator
from soap.strategy.config import Strategy


@dataclass(frozen=True)
class Copies:
    """A strategy that is folded, and what is searched around it. ``compiled``: the space of the two copies."""

    whole: Strategy
    folding: Folding
    compiled: CompiledSpace
    evaluator: IncrementalSimulator

    @property
    def start(self) -> Strategy:
        """The strategy as two copies."""
        return self.folding.copies.strategy

    def fits(self, strategy: Strategy, engine: Engine) -> bool:
        """``IncrementalSimulator.fits`` of two copies."""
        return self.evaluator.fits(strategy, engine, self.folding.holding(strategy))

    def unfolded(self, strategy: Strategy) -> Strategy:
        """The strategy of all copies of which two are found to be this one."""
        placed = {name: strategy.operators[name].placed_like(config) for name, config in self.whole.operators.items()}
        return replace(strategy, operators=placed)


def copies_of(space: Space, evaluator: IncrementalSimulator, strategy: Strategy) -> Copies | None:
    """A strategy as copies, with the part of the space that keeps these alike; None if it has few tiles, or cannot be folded."""
    folding = evaluator.folding(strategy, dict.fromkeys(sync for choices in space.syncs.values() for sync in choices))
    if folding is None:
        return None
    graph, topology = folding.copies.graph, folding.topology
    stays = {len(op.factors): OperatorSpace([(1,) * (1 + len(op.factors))], 1, shuffled=0.0) for op in graph.operators}
    syncs = {name: [own for own in choices if own in folding.syncs] for name, choices in space.syncs.items()}
    on_hosts = {mark for mark, own in enumerate(all_marked()) if own.on_hosts}  # what is kept there keeps a strategy from being folded
    folds = {field: tuple(own for own in sets if on_hosts.isdisjoint(one.whole for one in own)) for field, sets in space.by_field.items()}
    own = replace(
        space,
        graph=graph,
        device_count=topology.device_count,
        operators=tuple(stays[len(op.factors)] for op in graph.operators),
        edges=((),) * len(graph.operators),
        groups=(),
        references=(),
        allowed=(),
        syncs={name: tuple(choices) for name, choices in syncs.items() if len(choices) > 1},
        by_field=folds,
        sizes=(),
    )
    shared = folded_shared(folding, evaluator.shared.costs)
    return Copies(strategy, folding, CompiledSpace(own, shared, evaluator.optimizer_states, evaluator.draws), evaluator)
