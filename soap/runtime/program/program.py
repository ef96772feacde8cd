"""The program: what every rank does, in one global order that is the same everywhere. Pure data, no torch.

``compile_program`` turns a plan and an order of its tiles into two lists of actions, forward and backward, which take turns if there are
micro-batches (``Program.interleaved``). Each rank executes its own part of both lists. An action waits only for actions before it in the
list, so ranks cannot wait for each other in a cycle, whatever the backend.

In which order tiles and segments run is ``run_order``'s. ``actions`` decides what follows tiles and segments, ``sync_actions`` how
parameters are kept in step; the rest, here, keeps these:

*Invariant*: no action before the end of the backward pass waits for a number that only the epilogue reads.

*Invariant*: reductions of one number each with the same devices and dtype become one action at the end of the forward pass: nothing reads
them before the backward pass is over. If one such sum gives every device all numbers that enter the loss epilogue, every device can compute
the loss from it.

*Invariant*: a segment's second run comes right before the backward pass for which it is made (``RunOrder.second_turns``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from soap.plan.delivery import reduced_tensor
from soap.plan.division import weights_name
from soap.plan.marks.offload import come_back_with
from soap.plan.plan import (
    AGAIN,
    Message,
    Plan,
    backward_name,
    exchange_name,
    forward_name,
    local_pieces,
    message_name,
    recompute_name,
    reduce_name,
    remote_parts,
)
from soap.plan.recomputation import dropped_holdings
from soap.plan.running.activity import (
    Activity,
    Carrier,
    PlanIndex,
    ValueKey,
    count_readers,
    count_second_readers,
    count_takers,
)
from soap.plan.running.epilogue import LossEpilogue, closing_tensors
from soap.plan.running.order import ExecutionOrder, Segment, answered_elsewhere, places_of, read_elsewhere
from soap.plan.syncs.bucketing import idle_shards
from soap.runtime.program import sync_actions
from soap.runtime.program.actions import BEFORE, Action, ActionKind, Entry, backward_entries, forward_entries, in_order, interleaved
from soap.runtime.program.run_order import RunOrder, run_order
from soap.runtime.program.sync_actions import after_backward, after_update, before_forward, gather_entries, groups


def second_runs(run: RunOrder) -> Iterator[Entry]:
    """The second run of each recomputed segment."""
    for turn, number in run.second_turns:
        yield (turn, BEFORE, run.segments[number].start), Action(ActionKind.RECOMPUTE, number, (run.segments[number].device,))


def gathered_again(plan: Plan, run: RunOrder) -> Iterator[Entry]:
    """What travels a second time, right before the first second run, or backward pass, that reads it."""
    second, backward = {number: turn for turn, number in run.second_turns}, run.turns.backward

    def entry(fetches: Iterable[int], kind: ActionKind, number: int, devices: tuple[int, ...]) -> Iterator[Entry]:
        readers = {run.segment_of[tile] for fetch in fetches for tile, _ in plan.fetches[fetch].consumers if tile in run.activity.tiles}
        turns = {reader: second.get(reader, backward[reader]) for reader in readers}
        turn = min(turns.values(), default=None)
        if turn is not None:
            start = min(run.segments[reader].start for reader in readers if turns[reader] == turn)
            yield (turn, BEFORE, start - 1, kind.value, number), Action(kind, number, devices)  # behind second runs of what is read

    for number, reduction in enumerate(plan.reductions if plan.summed_again else ()):
        if reduction.operator in plan.summed_again:
            holdings = [run.index.reduced[number, device] for device in reduction.devices if (number, device) in run.index.reduced]
            fetches = (fetch for holding in holdings for fetch in run.index.fetches_from[holding])
            yield from entry(fetches, ActionKind.REDUCE_AGAIN, number, reduction.devices)
    for (_, number), carrier in run.index.moves.items() if plan.gathered_again else ():
        maker = remote_parts(plan, carrier.parts)[0][3]
        if plan.tiles[plan.holdings[maker].tile].operator not in plan.gathered_again:
            continue
        devices = (carrier.source, carrier.target) if isinstance(carrier, Message) else carrier.devices
        kind = ActionKind.TRANSFER_AGAIN if isinstance(carrier, Message) else ActionKind.EXCHANGE_AGAIN
        yield from entry((fetch for fetch, _ in carrier.parts), kind, number, devices)


NumberSums = tuple[tuple[int, ...], ...]
"""Reductions that are summed together."""


def sum_together(plan: Plan, sums: Iterable[Action]) -> tuple[NumberSums, list[Action]]:
    """The groups of reductions that are summed together, and one action for each group."""
    found: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for action in sums:
        reduction = plan.reductions[action.subject]
        dtype = plan.graph.tensors[reduced_tensor(plan, reduction)].dtype
        found.setdefault((reduction.devices, dtype), []).append(action.subject)
    actions = [Action(ActionKind.REDUCE_NUMBERS, number, devices) for number, (devices, _) in enumerate(found)]
    return tuple(map(tuple, found.values())), actions


def everyone_knows(plan: Plan, epilogue: LossEpilogue, number_sums: Sequence[Sequence[int]]) -> bool:
    """Whether a single sum over all devices has every number that enters the epilogue, each once."""
    if not epilogue.operators or len(number_sums) != 1:
        return False
    found = [reduced_tensor(plan, plan.reductions[number]) for number in number_sums[0]]
    everywhere = len(plan.reductions[number_sums[0][0]].devices) == plan.device_count
    return everywhere and len(found) == len(epilogue.seeds) and set(found) == set(epilogue.seeds)


@dataclass(frozen=True)
class Parted:
    """``before``: actions of the forward pass. ``sums``: reductions that only the epilogue reads. ``behind``: the epilogue's actions."""

    before: list[Action]
    sums: list[Action]
    behind: list[Action]


def set_apart(plan: Plan, epilogue: LossEpilogue, actions: Iterable[Action]) -> Parted:
    """Split the actions of the forward pass into these three lists; each keeps its order."""
    closing = closing_tensors(plan, epilogue)
    parted = Parted([], [], [])
    for action in actions:
        if action.kind is ActionKind.REDUCE:
            closes = reduced_tensor(plan, plan.reductions[action.subject]) in closing
            (parted.sums if closes else parted.before).append(action)
            continue
        if action.kind not in (ActionKind.TILE, ActionKind.TRANSFER, ActionKind.EXCHANGE):
            parted.before.append(action)
            continue
        if action.kind is ActionKind.TILE:
            apart = plan.tiles[action.subject].operator in epilogue.operators
        else:
            carrier = plan.messages[action.subject] if action.kind is ActionKind.TRANSFER else plan.exchanges[action.subject]
            apart = plan.fetches[carrier.parts[0][0]].tensor in closing
        (parted.behind if apart else parted.before).append(action)
    return parted


@dataclass(frozen=True)
class Program:
    """A plan with the order of all actions. Positions in its tuples are the subjects of actions."""

    plan: Plan
    activity: Activity
    order: ExecutionOrder
    segments: tuple[Segment, ...]
    segment_of: Mapping[int, int]
    """Tile -> its segment."""
    kept: frozenset[int]
    """Holdings whose values outlive their segment: another segment or device reads them. The loss is among them."""
    answered: frozenset[int]
    """Holdings that get a gradient from another segment or device."""
    recomputed: frozenset[int]
    """Tiles that run forward a second time."""
    dropped: frozenset[int]
    """Holdings of recomputed tiles that are not kept till then (``recomputation.dropped_holdings``)."""
    come_back_with: Mapping[int, int]
    """Tiles of offloading operators -> the tile with which what they keep comes back (``offload.come_back_with``)."""
    idle_shards: tuple[int, ...]
    """Shards whose gradient is zero."""
    losses: Mapping[int, int]
    """Device -> the holding in which it has the loss (replica 0); devices without the loss are missing."""
    loss_count: int
    """How many devices have the loss."""
    seeds: Mapping[str, float]
    """Tensor -> the loss's gradient by it; the backward pass begins at these tensors."""
    number_sums: NumberSums
    """Reductions that are summed together at the end of the forward pass."""
    known: bool
    """Whether every rank can compute the loss from the first of ``number_sums`` and ``seeds``. Then the loss epilogue is not run."""
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    after_update: tuple[Action, ...]
    """Actions after the optimizer's update, and after values were loaded."""
    interleaved: tuple[Action, ...] = ()
    """With micro-batches, what a step runs: the actions of both passes together, in the order of ``Plan.order``. Else empty."""

    @cached_property
    def index(self) -> PlanIndex:
        """Look-up tables of the plan."""
        return PlanIndex(self.plan)

    @cached_property
    def tags(self) -> tuple[int, ...]:
        """By message, its tag among those between the same two devices; its gradients have the next one. Both ends know it."""
        counts: dict[tuple[int, int], int] = {}
        found = []
        for message in self.plan.messages:
            ends = message.source, message.target
            found.append(2 * counts.get(ends, 0))
            counts[ends] = counts.get(ends, 0) + 1
        return tuple(found)

    @cached_property
    def looking_up(self) -> frozenset[int]:
        """Tiles with sparse lookups."""
        return frozenset(tile for sync in self.plan.syncs if sync.contract.by_rows for tile, _ in sync.uses)

    def readers(self, rank: int) -> dict[ValueKey, int]:
        """How often the forward pass of a rank reads each value, as ``count_readers`` counts; the loss counts once more."""
        counts = count_readers(self.plan, self.index, rank)
        if rank in self.losses:
            counts["holding", self.losses[rank]] = counts.get(("holding", self.losses[rank]), 0) + 1
        return counts

    def second_readers(self, rank: int) -> dict[ValueKey, int]:
        """How often second runs of a rank's tiles read each value, as ``count_second_readers`` counts, and how often values are gathered
        again: once by each message and exchange that takes a part, and once for a region of the rank's own."""
        counts, fetches = count_second_readers(self.plan, self.index, rank, self.recomputed), self.gathered_again
        holdings = [
            holding
            for number in self._carried_again
            for holding in {own for source, _, _, own in remote_parts(self.plan, self.index.moves[number].parts) if source == rank}
        ]
        own = (self.plan.fetches[number] for number in fetches if self.plan.fetches[number].device == rank)
        holdings += [holding for fetch in own for holding in {piece.holding for piece in local_pieces(self.plan, fetch)}]
        for holding in holdings:
            counts["holding", holding] = counts.get(("holding", holding), 0) + 1
        return counts

    @cached_property
    def gathered_again(self) -> frozenset[int]:
        """Fetches whose parts come a second time."""
        return frozenset(fetch for number in self._carried_again for fetch, _ in self.index.moves[number].parts)

    @cached_property
    def summed_again(self) -> frozenset[int]:
        """Reductions that are made a second time."""
        return frozenset(own.subject for own in self.interleaved or self.backward if own.kind is ActionKind.REDUCE_AGAIN)

    @cached_property
    def _carried_again(self) -> list[Carrier]:
        own: dict[ActionKind, Literal["message", "exchange"]]
        own = {ActionKind.TRANSFER_AGAIN: "message", ActionKind.EXCHANGE_AGAIN: "exchange"}
        return [(own[action.kind], action.subject) for action in self.interleaved or self.backward if action.kind in own]

    def takers(self, rank: int) -> dict[ValueKey, int]:
        """How often parts of the gradients of a rank's fetches are taken, as ``count_takers`` counts."""
        return count_takers(self.plan, self.index, rank)

    def device_groups(self, *, both_ways: bool) -> list[tuple[int, ...]]:
        """The distinct sets of devices that sum or exchange something together, in an order that is the same on all ranks. ``both_ways``:
        also those that have a second group, as ``comm.redistribute.Groups`` has them."""
        sets = {r.devices for r in self.plan.reductions} | {s.devices for s in self.plan.shards} | {e.devices for e in self.plan.exchanges}
        everyone = tuple(range(self.plan.device_count))
        sets |= groups(self.plan) | ({everyone[::-1]} if self.plan.messages else set())
        return sorted(devices for devices in sets if len(devices) > 1 and (both_ways or devices[0] < devices[-1]))


def compile_program(
    plan: Plan,
    order: ExecutionOrder | Sequence[int] | None = None,
    *,
    single_tiles: bool = False,
) -> Program:
    """The program of a plan. Raises RuntimeFailure if ``order`` is no topological order of all tiles.

    ``order``: all tiles in a topological order; None for the plan's own. If it says nothing of the backward pass, that runs in reverse.
    ``single_tiles``: make every tile a segment of its own, so that each task can be timed: the tasks of a simulation, where without
    micro-batches the loss's epilogue has both passes.
    """
    if not isinstance(order, ExecutionOrder):
        order = ExecutionOrder(tuple(range(len(plan.tiles)) if order is None else order))
    run = run_order(plan, order, single_tiles=single_tiles)
    index, epilogue, order, activity, turns = run.index, run.epilogue, run.order, run.activity, run.turns
    segments, segment_of, places = run.segments, run.segment_of, places_of(order.forward)
    repeated = tuple(second_runs(run))
    gathered = gather_entries(plan, activity.tiles, segment_of, turns.backward, places, repeated)
    entries = (*forward_entries(plan, places), *gathered.forward)
    forward = set_apart(plan, epilogue, in_order(entries))
    number_sums, summing = sum_together(plan, forward.sums)
    backward = [
        *backward_entries(plan, index, activity, segments, segment_of, turns),
        *repeated,
        *gathered_again(plan, run),
        *after_backward(plan, activity.tiles, segment_of, turns, places),
        *gathered.backward,
    ]
    losses = _losses(plan)
    known = everyone_knows(plan, epilogue, number_sums)
    told = Action(ActionKind.LOSS, min(losses.values()), None)  # last of all: no rank needs it earlier
    end = (*(() if known else forward.behind), told)
    together: tuple[Action, ...] = ()
    if plan.order is not None:
        both = interleaved(plan, entries, backward, order.forward, turns.actions)
        together = (*before_forward(plan), *set_apart(plan, epilogue, both).before, *summing, *end)
    return Program(
        plan,
        activity,
        order,
        segments,
        segment_of,
        frozenset(read_elsewhere(plan, segment_of)) | {i for i, held in enumerate(plan.holdings) if held.tensor == plan.graph.loss},
        frozenset(answered_elsewhere(plan, segment_of, activity)),
        run.recomputed,
        dropped_holdings(plan, run.recomputed, activity.tiles),
        come_back_with(plan, activity.tiles),
        idle_shards(plan),
        losses,
        len(losses),
        epilogue.seeds,
        number_sums,
        known,
        (*before_forward(plan), *forward.before, *summing),
        (*in_order(backward), *end),
        after_update(plan),
        together,
    )


def _losses(plan: Plan) -> dict[int, int]:
    """Device -> the first holding in which it has the loss of replica 0."""
    made = [(i, h) for i, h in enumerate(plan.holdings) if h.tensor == plan.graph.loss and plan.tiles[h.tile].replica == 0]
    return {held.device: i for i, held in reversed(made)}


GRADIENTS = (ActionKind.RETURN, ActionKind.RETURN_EXCHANGE, ActionKind.REDUCE_GRADIENT)
"""Kinds that move gradients: their tasks are the transposes of forward ones."""

_PASSES = {ActionKind.SEGMENT: backward_name, ActionKind.WEIGHTS: weights_name, ActionKind.RECOMPUTE: recompute_name}


def task_name(program: Program, kind: str, subject: int) -> str:
    """The name of the task that an action is, or begins with. ``kind``: name of an ``ActionKind``."""
    plan, back = program.plan, ActionKind[kind] in GRADIENTS
    match ActionKind[kind]:
        case ActionKind.TILE:
            return forward_name(plan.operator(plan.tiles[subject]), plan.tiles[subject])
        case ActionKind.SEGMENT | ActionKind.WEIGHTS | ActionKind.RECOMPUTE as own:
            first = plan.tiles[program.segments[subject].tiles[0]]
            return _PASSES[own](plan.operator(first), first)
        case ActionKind.REDUCE_AGAIN:
            return reduce_name(plan.graph.operators[plan.reductions[subject].operator], plan.reductions[subject]) + AGAIN
        case ActionKind.TRANSFER_AGAIN:
            return message_name(plan, plan.messages[subject]) + AGAIN
        case ActionKind.EXCHANGE_AGAIN:
            return exchange_name(plan, plan.exchanges[subject]) + AGAIN
        case ActionKind.TRANSFER | ActionKind.RETURN:
            return message_name(plan, plan.messages[subject], gradient=back)
        case ActionKind.EXCHANGE | ActionKind.RETURN_EXCHANGE:
            return exchange_name(plan, plan.exchanges[subject], gradient=back)
        case ActionKind.REDUCE | ActionKind.REDUCE_GRADIENT | ActionKind.REDUCE_NUMBERS:
            number = program.number_sums[subject][0] if ActionKind[kind] is ActionKind.REDUCE_NUMBERS else subject
            reduction = plan.reductions[number]
            return reduce_name(plan.graph.operators[reduction.operator], reduction, gradient=back)
        case ActionKind.LOSS:
            return "tell the loss"
        case own:
            return sync_actions.task_name(plan, own, subject)
