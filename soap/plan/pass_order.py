"""In which order devices run the passes of micro-batches. Pure data.

A *chunk* is a set of operators. An *action* is the forward (``F``) or backward (``B``) pass of one chunk for one micro-batch, or the
backward pass in two, input gradients (``I``) and weight gradients (``W``: ``strategy.division``). All devices follow one list of actions,
each for its own tiles; inside an action tiles run in the order of the model, backward in the reverse. The lists of several device groups,
each with chunks of its own, are one list as soon as actions come behind those that they wait for (``soap.plan.scheduling``).

An operator that is not cut runs forward with the first micro-batch, and backward with the last. The loss's epilogue, if it has one
(``OperatorGraph.loss_terms``), runs behind all actions, and not backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from soap.errors import StrategyError
from soap.model.batch import MicroBatches
from soap.schedules.table import KINDS, WORK, Kind, lacking
from soap.strategy.division import shares

Pass = Literal["F", "B", "W"]
"""What a tile does: its forward pass; its backward pass, or, if that is divided, the first half; the other half."""


class PassAction(NamedTuple):
    """The pass of one chunk for one micro-batch."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class PassOrder:
    """``chunks``: by operator, its chunk. ``actions``: every action once, backward passes all whole or all in two. ``anew``: whether each
    pass of a micro-batch gathers what is gathered for its uses. StrategyError if an action is missing, or comes before one for which it
    waits."""

    cut: MicroBatches
    chunks: tuple[int, ...]
    actions: tuple[PassAction, ...]
    anew: bool = False

    def __post_init__(self) -> None:
        wanted = {PassAction(kind, chunk, m) for kind in self.kinds for chunk in {*self.chunks} for m in range(self.cut.count)}
        if len(self.actions) != len(wanted) or wanted != {*self.actions}:
            odd = sorted(map(str, wanted ^ {*self.actions})) or ["one occurs twice"]
            raise StrategyError(f"schedule of {len(self.actions)} actions; expected each of {len(wanted)} once: {', '.join(odd[:3])}")
        for before, after, why in self._needs():
            if self.ranks[before] >= self.ranks[after]:
                raise StrategyError(f"schedule runs {after} before {before}; expected the reverse: {why}")

    @cached_property
    def ranks(self) -> Mapping[PassAction, int]:
        """Action -> its place in the list."""
        return {action: place for place, action in enumerate(self.actions)}

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Those of its actions, of which one is the whole backward pass or none, and those that do what is left."""
        found = {action.kind for action in self.actions}
        if found - {"F", "B"}:
            found.discard("B")
        found.update(lacking(share for kind in found for share in WORK[kind].shares))
        return tuple(kind for kind in KINDS if kind in found)

    @cached_property
    def backward(self) -> tuple[Kind, ...]:
        """By operator: the kind of the actions in which its backward pass, or the first half of it, takes place."""
        return tuple([self._kind(*own[:1]) for own in self._shares])

    @cached_property
    def weights(self) -> tuple[Kind, ...]:
        """By operator: the kind of the actions in which its backward pass, or the other half of it, takes place."""
        return tuple([self._kind(*own[-1:]) for own in self._shares])

    @cached_property
    def _shares(self) -> list[tuple[str, ...]]:
        return [shares(self.cut.graph, op) for op in self.cut.graph.operators]

    def _kind(self, share: str = "inputs") -> Kind:
        return next(kind for kind in self.kinds if share in WORK[kind].shares)

    @cached_property
    def divided(self) -> frozenset[int]:
        """Positions of the operators whose backward pass is in two."""
        return frozenset(i for i, (first, other) in enumerate(zip(self.backward, self.weights, strict=True)) if first != other)

    def rank(self, own: Pass, position: int, part: int) -> int:
        """The place of the action to which a pass of a part of an operator belongs; of the loss's epilogue, the place behind all.
        ``part``: 0 if the operator is not cut."""
        if position in self.cut.graph.epilogue:
            return len(self.actions)
        if self.cut.parts(position) == 1:
            part = 0 if own == "F" else self.cut.count - 1
        kind = self.backward[position] if own == "B" else self.weights[position] if own == "W" else own
        return self.ranks[PassAction(kind, self.chunks[position], part)]

    def _needs(self) -> Iterator[tuple[PassAction, PassAction, str]]:
        """(action, action that waits for it, why)."""
        cut, last, back = self.cut, self.cut.count - 1, self._kind()
        for chunk in {*self.chunks}:
            for m in range(cut.count):
                yield PassAction("F", chunk, m), PassAction(back, chunk, m), "a backward pass follows its forward pass"
                for kind in self.kinds:
                    if kind not in ("F", back):
                        yield PassAction(back, chunk, m), PassAction(kind, chunk, m), "weight gradients follow input gradients"
                for kind in self.kinds if m else ():
                    yield PassAction(kind, chunk, m - 1), PassAction(kind, chunk, m), "micro-batches pass a chunk in their order"
        for (maker, reader), barrier in self._edges().items():
            why = f"chunk {reader} reads chunk {maker}"
            for m in range(cut.count if maker != reader else 0):
                yield PassAction("F", maker, m), PassAction("F", reader, m), why
                yield PassAction(back, reader, m), PassAction(back, maker, m), why
            if barrier:
                why = f"operator {barrier!r} needs all micro-batches at once, so let all of them pass it together (GPipe)"
                yield PassAction("F", maker, last), PassAction("F", reader, 0), why
                yield PassAction(back, reader, last), PassAction(back, maker, 0), why

    def _edges(self) -> dict[tuple[int, int], str]:
        """(chunk, chunk that reads it) -> the first operator that is a barrier between them; "" if none is."""
        graph, found = self.cut.graph, dict[tuple[int, int], str]()
        for reader, op in enumerate(graph.operators):
            for operand in op.inputs:
                if operand.tensor in graph.producers:
                    maker, output = graph.producers[operand.tensor]
                    pair = self.chunks[maker], self.chunks[reader]
                    barrier = "" if self.cut.keeps_apart(maker, output, reader, operand) else op.name
                    found[pair] = found.get(pair, "") or barrier
        return found

