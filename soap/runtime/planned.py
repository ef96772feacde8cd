"""Plans for all ranks, made by rank 0. Each rank is handed its part of the program, and knows no other rank's tiles.

So what a rank computes before its first step grows with its own tiles. Rank 0 keeps the whole program, for batches of other sizes, traces
and checks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from soap import collector
from soap.cluster.kinds import run_kind
from soap.cluster.presets import local_topology
from soap.cluster.topology import DeviceKind, Topology
from soap.errors import RuntimeFailure
from soap.plan.plan import Plan
from soap.plan.planning import build_plan
from soap.plan.running.forward_order import ExecutionOrder
from soap.runtime.comm.handing_out import packed, unpacked
from soap.runtime.comm.redistribute import Communicator, needed_by
from soap.runtime.program.program import Program, compile_program
from soap.runtime.program.rank_programs import RankPrograms
from soap.runtime.program.resizing import other_program, resized_program
from soap.strategy.config import Strategy
from soap.tracing.model import TracedModel

Order = ExecutionOrder | Sequence[int] | None


@dataclass(frozen=True)
class Asked:
    """What ranks were asked to run: a plan, or a strategy on a topology. ``kind``: of the devices."""

    model: TracedModel
    given: Plan | None
    strategy: Strategy
    topology: Topology
    kind: DeviceKind
    order: Order

    @classmethod
    def of(cls, model: TracedModel, plan: Plan | tuple[Strategy, Topology], order: Order, kind: DeviceKind | None) -> Asked:
        """RuntimeFailure if the plan is for another model, StrategyError if the strategy is, or does not fit the topology."""
        if isinstance(plan, Plan):
            if plan.graph.hash != model.graph.hash:
                ours, theirs = f"{model.graph.name!r} ({model.graph.hash})", f"{plan.graph.name!r} ({plan.graph.hash})"
                raise RuntimeFailure(f"plan is for model {theirs}, not {ours}; build it for this model")
            return cls(model, plan, plan.strategy, local_topology(plan.device_count), kind or "cpu", order)
        strategy, topology = plan
        strategy.require_exact()
        strategy.validate(model.graph, topology.device_count)
        return cls(model, None, strategy, topology, kind or run_kind(topology), order)

    @property
    def digest(self) -> str:
        """The same on ranks that were asked to run the same."""
        if self.given is not None:
            asked: object = (self.given.messages, self.given.exchanges, self.given.syncs)
        else:
            named = sorted(self.strategy.operators.items()), sorted(self.strategy.parameters.items())
            asked = (named, replace(self.strategy, operators={}, parameters={}))
        return hashlib.sha256(repr((self.model.graph.hash, self.order, asked)).encode()).hexdigest()

    def plan(self) -> Plan:
        """The plan of all ranks."""
        return self.given or build_plan(self.model.graph, self.strategy, self.topology)


@dataclass(frozen=True)
class Handed:
    """What a rank is handed. ``groups``: the process groups that it makes, by their numbers among ``group_count``. ``unread``: see
    ``TileContext``. ``most_bytes``: what the rank holds at most in a step, as predicted; None if nobody has asked. ``whole``: the program
    of all ranks, on rank 0."""

    program: Program
    groups: Mapping[int, tuple[int, ...]]
    group_count: int
    unread: frozenset[str]
    most_bytes: int | None = None
    whole: Program | None = None


Predict = Callable[[Plan], Sequence[int] | None]
"""Whole plan -> what each of its devices holds at most, in bytes, if that matters."""


class Planned:
    """The programs of a trainer; every method is called on all ranks at once."""

    def __init__(self, comm: Communicator, asked: Asked) -> None:
        self._comm, self._asked = comm, asked

    def first(self, predict: Predict) -> Handed:
        """The program that was asked for. ``predict`` is called on rank 0, and may refuse the plan."""
        return self._handed(self._asked.model, lambda: compile_program(self._asked.plan(), self._asked.order), predict)

    def single_tiles(self, model: TracedModel, whole: Program | None) -> Program:
        """The program in which each tile is a segment."""

        def make() -> Program:
            assert whole is not None, "rank 0 keeps it"
            return compile_program(whole.plan, whole.order, single_tiles=True)

        return self._handed(model, make).program

    def resized(self, model: TracedModel, whole: Program | None) -> Handed:
        """The program for batches of another size, for which ``model`` was traced."""

        def make() -> Program:
            assert whole is not None, "rank 0 keeps it"
            return resized_program(whole, model.graph, self._asked.topology)

        return self._handed(model, make)

    def evaluation(self, model: TracedModel, whole: Program | None) -> Handed:
        """The program of another model of the same parameters, split and placed as the one that was asked for."""

        def make() -> Program:
            assert whole is not None, "rank 0 keeps it"
            return other_program(whole, model.graph, self._asked.topology)

        return self._handed(model, make)

    def _handed(self, model: TracedModel, make: Callable[[], Program], predict: Predict = lambda _: None) -> Handed:
        strategy = self._asked.strategy
        kept: list[Program] = []

        def parts() -> Iterator[bytes]:
            program = make()
            kept.append(program)
            most, unread = predict(program.plan), model.unread(program.plan.tiles)
            ranks, groups = self._comm.world_size, program.device_groups(both_ways=self._comm.messages_apart)
            needed, cut = needed_by(groups, ranks), RankPrograms(program)
            known = {"graph": program.plan.graph, "strategy": strategy}
            yield packed((cut.alike, unread), known)  # under fsdp, by far the most: written once
            for rank in range(ranks):
                peak = None if most is None or rank >= len(most) else most[rank]
                part, uses = cut.bare(rank)
                yield packed((Handed(part, needed[rank], len(groups), frozenset(), peak), uses), known)

        with collector.paused():
            shared, own = self._comm.hand_out(parts)
        known = {"graph": model.graph, "strategy": strategy}
        (alike, unread), (handed, uses) = unpacked(shared, known), unpacked(own, known)
        assert isinstance(handed, Handed)
        return replace(handed, program=alike.put_into(handed.program, uses), unread=unread, whole=kept[0] if kept else None)
