"""What the operators of a graph cost as layers of a pipeline (``soap.search.stages``), on device groups of every kind.

Operators are layers in the order of the graph. A border may be before any of them, except inside a chain that tensor parallelism splits
and, in large graphs, where more than the least is sent. All times are those of a whole step: all of its micro-batches, each by itself.
Every tensor counts at every border that it crosses, as if each stage in between handed it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from soap.model.batch import MicroBatches
from soap.model.graph import TensorKind
from soap.model.regions import volume
from soap.plan.tiling import made_bytes, tiles_of
from soap.search.rough_costs import Laid, RoughCosts
from soap.search.stage_groups import StageGroups
from soap.search.stages import Chain, Integers
from soap.simulator.memory.footprint import kept_share
from soap.strategy.config import OpConfig
from soap.strategy.megatron import staged
from soap.strategy.tensor_parallel_chains import find_chains

if TYPE_CHECKING:
    from soap.simulator.shared import Shared

MOST_LAYERS = 256
"""Operators between two borders are one layer where there would be more."""

Group = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StageCosts:
    """A graph's layers on kinds of groups, for one step. ``firsts``: the first operator of each layer. ``forward_ns``, ``backward_ns``
    [kinds, layers]: of all micro-batches, sums of partial results included. ``upkeep_ns``: sums of gradients, and updates. ``chain``: all
    that together, messages and memory. ``trained_bytes`` [kinds, layers]: one copy of the trained parameters on a device; ``chain`` keeps
    2 of them, and one for each of the optimizer's states. ``sent_bytes`` [2, layers - 1]: what crosses the cut behind a layer forward, and
    back as gradients."""

    firsts: tuple[int, ...]
    forward_ns: Integers
    backward_ns: Integers
    upkeep_ns: Integers
    chain: Chain
    trained_bytes: Integers
    sent_bytes: Integers


class StagePrices:
    """Works out ``StageCosts``."""

    def __init__(self, shared: Shared, optimizer_states: int) -> None:
        self._graph, self._topology, self._states, self._rough = shared.graph, shared.topology, optimizer_states, RoughCosts(shared)
        self._chains = find_chains(shared.graph)
        self._configs = lru_cache(None)(self._configs_of)
        self._borders = lru_cache(None)(self._borders_of)
        self._laid: dict[tuple[object, ...], Laid] = {}
        self._edges: dict[tuple[object, ...], int] = {}
        self._computed: dict[tuple[object, ...], tuple[int, int]] = {}
        self._kept: dict[tuple[object, ...], tuple[int, int, int, int]] = {}

    def splits(self, tensor: int) -> bool:
        """Whether tensor parallelism on so many devices finds anything to split."""
        return any(chain.width(self._graph, tensor) > 1 for chain in self._chains)

    def costs(self, groups: StageGroups, tensor: int, cut: MicroBatches) -> StageCosts:
        """On these groups, which take ``tensor`` devices together for tensor parallelism and divide samples among these."""
        kinds, firsts = len(groups.classes), self._borders(tensor)
        by_class = [self._layers(groups.example(groups.classes.index(own)), tensor, cut, firsts) for own in range(max(groups.classes) + 1)]
        forward_ns, backward_ns, upkeep_ns, kept, trained, activations = (
            np.array([by_class[own][row] for own in groups.classes], np.int64) for row in range(6)
        )
        message_ns = np.zeros((kinds, kinds, len(firsts) - 1), np.int64)
        known: dict[tuple[object, ...], Integers] = {}
        for (a, b), (sender, receiver) in groups.neighbours().items():
            figures = self._rough.communication.route_figures(sender[0], receiver[0])
            key = groups.classes[a], groups.classes[b], figures
            if key not in known:
                known[key] = self._messages(sender, receiver, tensor, cut, figures[0])[list(firsts[1:])]
            message_ns[a, b] = known[key]
        limits = [min(self._topology.memory_limits[device] for device in groups.example(kind)) for kind in range(kinds)]
        chain = Chain(
            layer_ns=forward_ns + backward_ns + upkeep_ns,
            message_ns=message_ns,
            kept_bytes=kept,
            activation_bytes=activations,
            limit_bytes=np.array(limits, np.int64),
        )
        sent = np.array([self._crossing_bytes(back=back) for back in (False, True)], np.int64)[:, list(firsts[1:])]
        return StageCosts(firsts, forward_ns, backward_ns, upkeep_ns, chain, trained, sent)

    def _borders_of(self, tensor: int) -> tuple[int, ...]:
        """The first operator of each layer."""
        count = len(self._graph.operators)
        inside: set[int] = set()
        for chain in self._chains if tensor > 1 else ():
            inside.update(range(min(chain.factors) + 1, max(chain.factors) + 1))
        borders = [p for p in range(1, count) if p not in inside]
        if len(borders) >= MOST_LAYERS:
            crossing = self._crossing_bytes()
            borders = sorted(sorted(borders, key=lambda p: (crossing[p], p))[: MOST_LAYERS - 1])
        return (0, *borders)

    def _crossing_bytes(self, *, back: bool = False) -> list[int]:
        """By operator, bytes that cross a border before it. ``back``: those of which the gradients go the other way."""
        changes = [0] * (len(self._graph.operators) + 1)
        for tensor, first, last in self._crossing():
            if back and not self._graph.tensors[tensor].requires_grad:
                continue
            size = volume(tuple((0, n) for n in self._graph.tensors[tensor].shape)) * self._graph.tensors[tensor].itemsize
            changes[first] += size
            changes[last + 1] -= size
        return [int(size) for size in np.cumsum(changes)]

    def _crossing(self) -> list[tuple[str, int, int]]:
        """(activation, first and last operator before which a border would cut it from a reader)."""
        graph, found = self._graph, []
        for tensor, (maker, _) in graph.producers.items():
            readers = [reader for reader, _ in graph.consumers.get(tensor, ())]
            if readers and max(readers) > maker and graph.tensors[tensor].kind is TensorKind.ACTIVATION:
                found.append((tensor, maker + 1, max(readers)))
        return found

    def _configs_of(self, width: int, tensor: int) -> tuple[OpConfig, ...]:
        """Each operator on the first ``width`` devices, as if all were in one stage."""
        strategy = staged(self._graph, self._topology, [0] * len(self._graph.operators), [range(width)], tensor=tensor)
        return tuple(strategy.operators[op.name] for op in self._graph.operators)

    def _config(self, position: int, group: Group, tensor: int) -> OpConfig:
        own = self._configs(len(group), tensor)[position]
        if max(own.devices) >= len(group):  # it has one configuration alone, on all devices
            return own
        return own.placed(own.degrees, tuple([group[device] for device in own.devices]), own.replicas, own.shares)

    def _lay(self, position: int, group: Group, tensor: int) -> Laid:
        config = self._config(position, group, tensor)
        key = self._rough.cuts.class_of(position), config
        if key not in self._laid:
            self._laid[key] = self._rough.lay(position, config)
        return self._laid[key]

    def _layers(self, group: Group, tensor: int, cut: MicroBatches, firsts: Sequence[int]) -> list[Integers]:
        """Forward, backward, upkeep in ns, bytes kept, bytes trained, and bytes of activations, of each layer."""
        own = [self._operator(position, group, tensor, cut) for position in range(len(self._graph.operators))]
        return list(np.add.reduceat(np.array(own, np.int64), firsts, axis=0).T)

    def _operator(self, position: int, group: Group, tensor: int, cut: MicroBatches) -> tuple[int, int, int, int, int, int]:
        config, same = self._config(position, group, tensor), self._rough.cuts.class_of(position)
        laid, parts = self._lay(position, group, tensor), cut.parts(position)
        if (key := (same, config, parts)) not in self._computed:
            self._computed[key] = self._passes_ns(position, config, laid, cut)
        if (known := (same, config)) not in self._kept:
            self._kept[known] = (self._rough.upkeep_ns(config, laid), *self._bytes(position, config))
        upkeep_ns, kept, trained, activations = self._kept[known]
        return (*self._computed[key], upkeep_ns, kept, trained, -(-activations // parts))

    def _passes_ns(self, position: int, config: OpConfig, laid: Laid, cut: MicroBatches) -> tuple[int, int]:
        """Forward and backward passes of all micro-batches on the slowest device, all with an equal share."""
        factor, parts, rough = cut.factors[position], cut.parts(position), self._rough
        degrees = list(config.degrees)
        if factor is not None:
            degrees[factor] = min(parts * degrees[factor], self._graph.operators[position].factors[factor].size)
        table, devices = rough.cuts.durations(position, tuple(degrees)), {*config.devices}
        types = {rough.cuts.type_of[device] for device in devices}
        forward, backward = (max(int(table[own, way].sum()) for own in types) * config.replicas // len(devices) for way in range(2))
        sums_ns = parts * rough.sums_ns([(own, size // parts) for own, size in laid.sums]) // 2  # ``sums_ns`` is both ways
        return forward + sums_ns, backward + sums_ns

    def _bytes(self, position: int, config: OpConfig) -> tuple[int, int, int]:
        """(what a device keeps all the time, one copy of what of that is trained, what it keeps of the whole batch for the backward pass),
        where it is most."""
        graph, op = self._graph, self._graph.operators[position]
        kept, trained, made = dict[int, int](), dict[int, int](), dict[int, int]()
        for tile in tiles_of(graph, position, config):
            for k, operand in enumerate(op.parameters):
                tensor = graph.tensors[operand.tensor]
                copies = 2 + self._states if tensor.requires_grad else 1  # value, gradient, states
                held = volume(tile.parameters[k]) * tensor.itemsize
                kept[tile.device] = kept.get(tile.device, 0) + copies * held
                trained[tile.device] = trained.get(tile.device, 0) + held * tensor.requires_grad
            size = kept_share(graph, op, tile.intervals) + sum(made_bytes(graph, op, tile, k) for k in range(len(op.outputs)))
            made[tile.device] = made.get(tile.device, 0) + size
        return max(kept.values(), default=0), max(trained.values(), default=0), max(made.values(), default=0)

    def _messages(self, sender: Group, receiver: Group, tensor: int, cut: MicroBatches, latency_seconds: float) -> Integers:
        """By operator, what messages over a border before it take, both ways; of the last part and those before it."""
        changes = np.zeros(len(self._graph.operators) + 1, np.int64)
        for name, first, last in self._crossing():
            maker, output = self._graph.producers[name]
            whole_ns = max(self._edge_ns(maker, output, reader, slot, sender, receiver, tensor) for reader, slot in self._readers(name))
            ways = 2 if self._graph.tensors[name].requires_grad else 1
            whole_ns += round(1e9 * ways * latency_seconds * (cut.parts(maker) - 1))
            changes[first] += whole_ns
            changes[last + 1] -= whole_ns
        return np.cumsum(changes)[: len(self._graph.operators)]

    def _readers(self, tensor: str) -> list[tuple[int, int]]:
        """(operator, slot) of readers that differ in more than names."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for reader, slot in self._graph.consumers[tensor]:
            found.setdefault((self._rough.cuts.class_of(reader), slot), (reader, slot))
        return list(found.values())

    def _edge_ns(self, maker: int, output: int, reader: int, slot: int, sender: Group, receiver: Group, tensor: int) -> int:
        same = self._rough.cuts.class_of
        key = same(maker), output, same(reader), slot, sender, receiver, tensor
        if key not in self._edges:
            operand = self._graph.operators[reader].inputs[slot]
            source, target = self._lay(maker, sender, tensor), self._lay(reader, receiver, tensor)
            seconds = self._rough.edge_seconds(operand, output, slot, source, target)
            self._edges[key] = 0 if seconds == inf else round(1e9 * seconds)
        return self._edges[key]
