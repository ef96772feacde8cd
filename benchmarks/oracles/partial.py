"""A lower bound of the iteration time of every strategy in which certain operators have certain configurations.

Operators may be decided in any order. An undecided one counts as its quickest tile, and as if its inputs and outputs were on every device.
The bound follows what waits for what through the whole iteration:

- *Ahead*: when the forward results of each operator exist. If several tiles make a value, its first part and its last have times of their
  own.
- *The loss*: if each replica of it is one tile, it waits for all forward passes on which it depends. Those of one device take turns.
- *Tails*: what must follow a tile's backward pass: the backward passes of its producers, the sum of its parameters' gradients over all
  copies, and all updates of their devices, which wait for all gradients.
- *Back*: when the backward pass of each tile can begin. Those of one device take turns, with their tails (``one_machine``).

Data from another device takes a message of so many bytes: collectives and joint messages are not quicker. If a value has replicas the best
one counts. Waiting for links is left out. A second bound is the computation of the devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.oracles.choices import Choice, Choices
from benchmarks.oracles.one_machine import Job, least_time_ns
from soap.cluster.topology import Topology
from soap.model.regions import volume
from soap.search.space import Space
from soap.simulator.costs import CostModel

UNDECIDED = -1
ANYWHERE = -1
"""Stands for any device."""
NEVER = -(2**62)
"""The time of what nothing follows, in nanoseconds."""

Ready = dict[int, int]
"""Device or ``ANYWHERE`` -> nanoseconds."""


class PartialBound:
    """Bounds for one space on one cluster; parameters are synchronized by all-reduces."""

    def __init__(self, space: Space, topology: Topology, costs: CostModel) -> None:
        self.choices = Choices(space, topology, costs)
        every = self.choices.of
        self.forward_ns = [min(min(own.forward) for own in choices) for choices in every]
        """Least time of an undecided operator's tile."""
        self.backward_ns = [min(min(own.backward) for own in choices) for choices in every]
        self.update_ns = [min(min(own.update_ns) for own in choices) for choices in every]
        self.whole = [all(own.whole for own in choices) for choices in every]
        self.loads = [[_load(self.choices, position, own) for own in choices] for position, choices in enumerate(every)]
        """By operator, choice and device: the least computation."""
        self.work_ns = [min(map(sum, own)) for own in self.loads]

    def bound_ns(self, chosen: Sequence[int]) -> int:
        """No strategy takes less in which every operator has its choice of ``choices.of``; an operator that is ``UNDECIDED`` may have
        any of them."""
        return _Relaxed(self, chosen).bound_ns()

    def order(self) -> list[int]:
        """The order in which to decide operators so that bounds rise early: first the one with most to compute and to update, then
        always the largest among those that share a tensor or a parameter with one before, if there are any."""
        graph, heavy = self.choices.graph, [work + update for work, update in zip(self.work_ns, self.update_ns, strict=True)]
        near: list[set[int]] = [{edge.producer for edge in edges} for edges in self.choices.edges]
        for users in graph.parameter_users.values():
            for user, _ in users:
                near[user] |= {other for other, _ in users}
        order: list[int] = []
        left = set(range(len(heavy)))
        while left:
            beside = {i for i in left if not near[i].isdisjoint(order) or any(i in near[known] for known in order)}
            order.append(min(beside or left, key=lambda position: (-heavy[position], position)))
            left.remove(order[-1])
        return order


def _load(choices: Choices, position: int, own: Choice) -> list[int]:
    """The least that each device computes for an operator. Backward passes of replicas may not be needed."""
    load = [0] * choices.topology.device_count
    sure = choices.certain[position] and own.config.replicas == 1
    for t, device in enumerate(own.devices):
        load[device] += own.forward[t] + (own.backward[t] if sure else 0)
    return load


class _Relaxed:
    """One bound. Times by operator, for a decided one also by tile or part. ``arrive``: when a tile has what it reads. ``head``: by
    part, when it exists. ``first``, ``last``: when any part exists, and when all do. ``leave``: time after a tile's backward pass;
    ``after``: after any tile's. ``tail``: by part, its tiles' backward passes and the time after them. ``begin``: when a tile's
    backward pass begins; ``back``: when the first one does."""

    def __init__(self, bound: PartialBound, chosen: Sequence[int]) -> None:
        self.b, self.c, self.chosen = bound, bound.choices, chosen
        count = len(chosen)
        self.positions = range(count)
        self.own = [None if i == UNDECIDED else choices[i] for i, choices in zip(chosen, self.c.of, strict=True)]
        self.arrive: list[list[int]] = [[] for _ in self.positions]
        self.head: list[list[Ready]] = [[] for _ in self.positions]
        self.first, self.last = [0] * count, [0] * count
        self.leave: list[list[int]] = [[] for _ in self.positions]
        self.tail: list[list[Ready]] = [[] for _ in self.positions]
        self.after = [0] * count
        self.begin: list[list[int]] = [[] for _ in self.positions]
        self.back = [0] * count
        updates: list[dict[str, int]] = [{} for _ in range(self.c.topology.device_count)]
        for choice in self.own:
            for name, spent in choice.updates.items() if choice else ():
                for known, update_ns in zip(updates, spent, strict=True):
                    known[name] = max(update_ns, known.get(name, 0))
        self.updates = [sum(known.values()) for known in updates]

    def bound_ns(self) -> int:
        """The whole bound."""
        for position in self.positions:
            self._ahead(position)
        if self.c.loss is not None:
            self._loss(self.c.loss)
        for position in self.positions:
            if self.c.certain[position]:
                self._tails(position)
        for position in reversed(self.positions):
            self._back(position)
        return max(0, *self.last, *self._paths(), *self._loads())

    # Forward.

    def _ahead(self, position: int) -> None:
        own, edges = self.own[position], self.c.edges[position]
        everything = max((self.last[e.producer] for e in edges if e.covered and e.partitioned), default=0)
        anything = max((self.first[e.producer] for e in edges if e.touched), default=0)
        if own is None:
            begin = max(anything, everything) if self.b.whole[position] else anything
            self.first[position] = begin + self.b.forward_ns[position]
            self.last[position] = max(begin, everything) + self.b.forward_ns[position]
            return
        arrive = [max(anything, everything) if own.whole else anything] * len(own.devices)
        for number, edge in enumerate(edges):
            if self.own[edge.producer] is None or not edge.partitioned:
                continue
            head = self.head[edge.producer]
            for flow in self.c.flows(position, number, self.chosen[edge.producer], self.chosen[position]):
                there = head[flow.part][ANYWHERE] + flow.ahead_ns if flow.ahead_ns >= 0 else head[flow.part][own.devices[flow.tile]]
                arrive[flow.tile] = max(arrive[flow.tile], there)
        self.arrive[position] = arrive
        self._results(position, own)
        self.last[position] = max(self.last[position], everything + self.b.forward_ns[position])

    def _results(self, position: int, own: Choice) -> None:
        """When the parts of a decided operator's results exist."""
        arrive = self.arrive[position]
        heads: list[Ready] = []
        for holdings in own.held:
            ready: Ready = {}
            for holding in holdings:
                there = max(arrive[t] + own.forward[t] for t in holding.tiles) + holding.sum_ns
                for device in (*holding.devices, ANYWHERE):
                    ready[device] = min(there, ready.get(device, there))
            heads.append(ready)
        self.head[position] = heads
        self.first[position] = min(ready[ANYWHERE] for ready in heads)
        self.last[position] = max(ready[ANYWHERE] for ready in heads)

    # The loss.

    def _loss(self, loss: int) -> None:
        """When a loss of one tile begins: once everything that it waits for exists, where each device's tiles come one after the other."""
        own = self.own[loss]
        if not (own.whole if own else self.b.whole[loss]):
            return
        jobs: list[list[Job]] = [[] for _ in self.updates]
        ways = self._ways(loss)
        for position, way in enumerate(ways):
            choice = self.own[position]
            if choice and position != loss:
                for t, tail_ns in enumerate(way):
                    if tail_ns != NEVER:
                        jobs[choice.devices[t]].append(Job(self.arrive[position][t], choice.forward[t], tail_ns))
        begin = max(least_time_ns(own) for own in jobs)
        if own:
            self.arrive[loss][0] = max(self.arrive[loss][0], begin)  # the backward pass begins at replica 0
            if own.config.replicas == 1:
                self._results(loss, own)
        else:
            self.first[loss] = self.last[loss] = max(self.first[loss], begin + self.b.forward_ns[loss])

    def _ways(self, loss: int) -> list[list[int]]:
        """Least time between a tile's end and the begin of the loss's first tile; ``NEVER`` if the loss may not wait for the tile. Of
        an undecided operator it is one figure: some tile of it, which reads any given part, has so much before it."""
        ways: list[list[int]] = [[] for _ in self.positions]
        for position in reversed(self.positions):
            own = self.own[position]
            way = ways[position] = [NEVER] * (len(own.devices) if own else 1)
            for reader, number in self.c.readers[position]:
                edge, other = self.c.edges[reader][number], self.own[reader]
                if not edge.partitioned or position == loss:
                    continue
                steps = self._steps(reader, loss, ways[reader])
                if own and other:
                    self._way_between(position, reader, number, steps, way)
                elif edge.covered and NEVER not in steps and (own is None or own.config.replicas == 1):
                    way[:] = [max(known, min(steps)) for known in way]
        return ways

    def _steps(self, reader: int, loss: int, way: list[int]) -> list[int]:
        """By tile of a reader: from the begin of its forward pass to that of the loss."""
        own = self.own[reader]
        if reader == loss:
            return [0, *[NEVER] * (len(own.devices) - 1 if own else 0)]
        forward = own.forward if own else [self.b.forward_ns[reader]]
        return [known if known == NEVER else known + forward_ns for known, forward_ns in zip(way, forward, strict=True)]

    def _way_between(self, position: int, reader: int, number: int, steps: list[int], way: list[int]) -> None:
        """The same for two decided operators. Who reads from whom is known unless there is a choice of replicas."""
        own, other = self.own[position], self.own[reader]
        assert own and other
        for flow in self.c.flows(reader, number, self.chosen[position], self.chosen[reader]):
            if steps[flow.tile] == NEVER:
                continue
            held = own.held[flow.part]
            if flow.ahead_ns < 0:
                held = [holding for holding in held if other.devices[flow.tile] in holding.devices]
            if len(held) == 1:
                for t in held[0].tiles:
                    way[t] = max(way[t], steps[flow.tile] + max(0, flow.ahead_ns) + held[0].sum_ns)

    # Backward.

    def _tails(self, position: int) -> None:
        own, edges = self.own[position], self.c.edges[position]
        follow_ns = 0
        for edge in edges:
            producer = edge.producer
            if edge.gradient and self.c.certain[producer] and edge.touched and (self.own[producer] is None or not edge.partitioned):
                follow_ns = max(follow_ns, self.b.backward_ns[producer] + self.after[producer])
        if own is None:
            for edge in edges:
                if edge.gradient and self.c.certain[edge.producer] and edge.touched and self.own[edge.producer]:
                    follow_ns = max(follow_ns, min(ready[ANYWHERE] for ready in self.tail[edge.producer]))
            self.after[position] = max(follow_ns, self.b.update_ns[position])
            return
        leave = [max(follow_ns, self._finish_ns(own, t)) for t in range(len(own.devices))]
        for number, edge in enumerate(edges):
            producer = edge.producer
            if not edge.gradient or not self.c.certain[producer] or self.own[producer] is None or not edge.partitioned:
                continue
            for flow in self.c.flows(position, number, self.chosen[producer], self.chosen[position]):
                ready = self.tail[producer][flow.part]
                after = ready[ANYWHERE] + flow.back_ns if flow.back_ns >= 0 else ready[own.devices[flow.tile]]
                leave[flow.tile] = max(leave[flow.tile], after)
        self.leave[position], self.after[position] = leave, min(leave)
        for holdings in own.held:
            ready = {}
            for holding in holdings:
                sum_ns = 0 if position == self.c.loss else holding.sum_ns
                after = max(leave[t] + own.backward[t] for t in holding.tiles) + sum_ns
                for device in (*holding.devices, ANYWHERE):
                    ready[device] = min(after, ready.get(device, after))
            self.tail[position].append(ready)

    def _finish_ns(self, own: Choice, t: int) -> int:
        """From the end of a tile's backward pass to the end of the updates that wait for its parameters' gradients."""
        finish_ns = 0
        for name, regions in own.regions.items():
            box = regions[t]
            if volume(box) == 0:
                continue
            finish_ns = max(finish_ns, self.updates[own.devices[t]])
            if name in self.c.same_regions:
                devices = {own.devices[t]}
                for user, _ in self.c.graph.parameter_users[name]:
                    other = self.own[user]
                    if other and name in other.regions:
                        devices |= {d for d, region in zip(other.devices, other.regions[name], strict=True) if region == box}
                if len(devices) > 1:
                    sum_ns = self.c.sum_ns(volume(box) * self.c.graph.tensors[name].itemsize, tuple(sorted(devices)))
                    finish_ns = max(finish_ns, sum_ns + max(self.updates[d] for d in devices))
        return finish_ns

    def _back(self, position: int) -> None:
        """When the backward passes of a decided operator begin: none before the loss's. A tile waits for all its gradients; one of
        several replicas for one of them."""
        own, loss = self.own[position], self.c.loss
        if position == loss:
            self.back[position] = self.first[position]
            if own:
                begin = [there + forward for there, forward in zip(self.arrive[position], own.forward, strict=True)]
                self.begin[position] = begin
                self.back[position] = min(begin[: len(begin) // own.config.replicas])  # those of replica 0
            return
        earliest = self.back[loss] if loss is not None else 0
        back: list[int] = []
        begin = [earliest] * (len(own.devices) if own else 0)
        for reader, number in self.c.readers[position]:
            edge, other = self.c.edges[reader][number], self.own[reader]
            if not edge.gradient:
                continue
            if other is None:
                end = self.back[reader] + self.b.backward_ns[reader]
            else:
                end = min(first + backward for first, backward in zip(self.begin[reader], other.backward, strict=True))
            back.append(end)
            if own is None or own.config.replicas > 1 or not self.c.certain[reader] or not edge.partitioned:
                continue
            if other is None:
                if edge.covered:
                    begin = [max(known, end) for known in begin]
            elif other.config.replicas == 1:
                for flow in self.c.flows(reader, number, self.chosen[position], self.chosen[reader]):
                    there = self.begin[reader][flow.tile] + other.backward[flow.tile] + max(0, flow.back_ns)
                    for t in own.held[flow.part][0].tiles:
                        begin[t] = max(begin[t], there)
        earliest = max(earliest, min(back, default=0))
        self.begin[position] = [max(known, earliest) for known in begin]
        self.back[position] = min(self.begin[position], default=earliest)

    # all together

    def _paths(self) -> list[int]:
        """By device and operator: from the begin of the first backward pass to the end."""
        jobs: list[list[Job]] = [[] for _ in self.updates]
        paths: list[int] = []
        for position, own in enumerate(self.own):
            if not self.c.certain[position]:
                continue
            if own is None:
                paths.append(self.back[position] + self.b.backward_ns[position] + self.after[position])
                continue
            paths.append(self.back[position] + max(ready[ANYWHERE] for ready in self.tail[position]))
            if own.config.replicas == 1:
                for t, device in enumerate(own.devices):
                    jobs[device].append(Job(self.begin[position][t], own.backward[t], self.leave[position][t]))
        return [*paths, *map(least_time_ns, jobs)]

    def _loads(self) -> list[int]:
        """The computation of each device, and all of it divided by their number."""
        loads = list(self.updates)
        rest = 0
        for position, choice in enumerate(self.chosen):
            if choice == UNDECIDED:
                rest += self.b.work_ns[position]
            else:
                loads = [known + more for known, more in zip(loads, self.b.loads[position][choice], strict=True)]
        return [*loads, -(-(sum(loads) + rest) // len(loads))]
