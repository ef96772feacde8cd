"""Tensor parallelism inside groups of devices, data parallelism across them (Shoeybi et al. 2019), and pipelines of such groups.

Of a pair of matrices the first is split by columns, the second by rows, and the operators between them alike. Large tables and output
layers are split by vocabulary. Cheap operators between such parts are repeated on every device of the group. The rest is data parallel.

In context parallelism the devices of a group share the positions of each sample's sequence. Everything follows its own positions; only
attention gathers keys and values (as Llama 3 does it: Grattafiori et al. 2024, section 3.3.2).

Experts have a mapping of their own on the devices of a stage (``ExpertMapping``), whatever the groups of the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.batch import MicroBatches, sample_factor
from soap.model.graph import FactorKind, Operand, Operator, OperatorGraph, TensorKind
from soap.schedules.named import parse
from soap.strategy.config import OpConfig, Strategy, settled
from soap.strategy.grids import device_order, fill, grouped, positions_of_loss, shared, spread, tensor_parallel_width, width_for
from soap.strategy.stages import stages_of, stages_of_chunks
from soap.strategy.tensor_parallel_chains import Chain, dense, expert_factor, find_chains, table

CHEAP_FLOPS_PER_ELEMENT = 64
"""Up to this many operations per element of its outputs, an operator is repeated rather than split, which saves gathering its inputs.

Norms, residual sums and activations need 1 to 20, matrix products and convolutions twice their inner size: hundreds and more.
"""
CHEAP_FLOPS_PER_INPUT = 2
"""Or up to so many per element that it reads: means of squares, of which norms make one number for each token."""


class ExpertMapping(NamedTuple):
    """How experts lie on the devices of a stage: divided among ``parallel`` parts of a group, in each of which ``tensor`` neighbouring
    devices split matrices. Groups divide the samples (Liu et al., "MoE Parallel Folding", 2025)."""

    parallel: int
    tensor: int = 1


def megatron(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Tensor parallelism inside each host, data parallelism across hosts (Shoeybi et al. 2019).

    Each split operator is cut into as many pieces as possible, at most one per device of a host.
    """
    return _everywhere(graph, topology).place(tensor_parallel_width(topology))


def sequence_parallel(graph: OperatorGraph, topology: Topology, tensor: int | None = None) -> Strategy:
    """``megatron`` whose cheap operators between split parts share the positions of sequences, instead of repeating all of them: sums are
    scattered to them, and their results gathered (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    2022). As many bytes move; activations between parts take a share of the memory. ``tensor``: devices of a group, by default a host's."""
    return _everywhere(graph, topology, scatters=True).place(tensor or tensor_parallel_width(topology))


def hybrid(
    graph: OperatorGraph,
    topology: Topology,
    *,
    tensor: int,
    pipeline: int = 1,
    microbatches: int = 1,
    scatters: bool = False,
    context: int = 1,
    experts: ExpertMapping | None = None,
) -> Strategy:
    """``megatron`` with groups of ``tensor`` neighbouring devices, and with the operators in ``pipeline`` stages of about equal work, each
    on a group of its own (Narayanan et al. 2021). So each copy of the model takes ``tensor * context * pipeline`` neighbouring devices;
    with ``experts`` each stage takes neighbouring ones, so that rows travel to experts as near as may be (Megatron-LM's order of ranks).
    ``microbatches``, ``scatters``, ``context``, ``experts``: as in ``staged``.

    StrategyError if the number of devices is not a multiple of that, or there are more stages than operators.
    """
    _require_groups(graph, topology, tensor * context, pipeline, pipeline)
    blocks = balanced_blocks(operator_work(graph), pipeline)
    for chain in find_chains(graph):
        first = blocks[min(chain.factors)]
        for i in chain.factors:
            blocks[i] = first
    groups = _stages(topology, tensor * context, pipeline, experts)
    return staged(
        graph, topology, blocks, groups, tensor=tensor, microbatches=microbatches, scatters=scatters, context=context, experts=experts
    )


def three_dimensional(
    graph: OperatorGraph,
    topology: Topology,
    *,
    tensor: int,
    pipeline: int,
    microbatches: int = 1,
    scatters: bool = False,
    context: int = 1,
    experts: ExpertMapping | None = None,
    schedule: str = "1f1b",
) -> Strategy:
    """``hybrid`` as a pipeline by a schedule: an operator reads what its own chunk or one before it makes. The rest as in ``staged``.
    StrategyError as from ``hybrid``."""
    count = pipeline * parse(schedule).chunks
    _require_groups(graph, topology, tensor * context, pipeline, count)
    blocks, chains, before = balanced_blocks(operator_work(graph), count), find_chains(graph), list[int]()
    while blocks != before:
        before = list(blocks)
        for chain in chains:
            first = min(blocks[i] for i in chain.factors)
            for i in chain.factors:
                blocks[i] = first
        for i in reversed(range(len(blocks))):
            for operand in graph.operators[i].inputs:
                if operand.tensor in graph.producers:
                    maker = graph.producers[operand.tensor][0]
                    blocks[maker] = min(blocks[maker], blocks[i])
    groups, stage_of = _stages(topology, tensor * context, pipeline, experts), stages_of_chunks(count, schedule)
    lays: dict[str, Any] = {"tensor": tensor, "microbatches": microbatches, "scatters": scatters, "context": context}
    strategy = staged(graph, topology, [stage_of[chunk] for chunk in blocks], groups, **lays, experts=experts)
    return replace(strategy, stages=stages_of(graph, blocks), schedule=schedule)


def _require_groups(graph: OperatorGraph, topology: Topology, tensor: int, pipeline: int, chunks: int) -> None:
    if tensor < 1 or pipeline < 1 or len(topology.workers) % (tensor * pipeline):
        raise StrategyError(
            f"{len(topology.workers)} devices in groups of {tensor} and {pipeline} stages; expected a divisor of the number of devices"
        )
    if chunks > len(graph.operators):
        raise StrategyError(f"{chunks} stages or chunks for {len(graph.operators)} operators; expected no more than operators")


def _stages(topology: Topology, width: int, pipeline: int, experts: ExpertMapping | None) -> list[tuple[int, ...]]:
    """The devices of each stage, in groups of this width."""
    if experts is None:
        return copied_stages(topology, tensor=width, pipeline=pipeline)
    return neighbouring_stages(topology, pipeline)


def neighbouring_stages(topology: Topology, pipeline: int) -> list[tuple[int, ...]]:
    """The devices of each stage where it takes neighbouring ones, as many as the others do: Megatron-LM's order of ranks."""
    order = device_order(topology)
    each = len(order) // pipeline
    return [tuple(order[stage * each : (stage + 1) * each]) for stage in range(pipeline)]


def copied_stages(topology: Topology, *, tensor: int, pipeline: int) -> list[tuple[int, ...]]:
    """The devices of each stage where a copy of the model takes ``tensor * pipeline`` neighbouring devices, copy by copy."""
    order, each = device_order(topology), tensor * pipeline
    return [
        tuple([order[copy * each + stage * tensor + rank] for copy in range(len(order) // each) for rank in range(tensor)])
        for stage in range(pipeline)
    ]


def staged(
    graph: OperatorGraph,
    topology: Topology,
    blocks: Sequence[int],
    stages: Sequence[Sequence[int]],
    *,
    tensor: int = 1,
    microbatches: int = 1,
    scatters: bool = False,
    context: int = 1,
    experts: ExpertMapping | None = None,
) -> Strategy:
    """``megatron`` in groups of ``tensor`` devices with each operator on the devices of its stage. ``blocks``: by operator, its stage; a
    chain of tensor parallelism is in one of them. ``stages``: the devices of each, a multiple of ``tensor``. ``microbatches``: what the
    strategy will have; operators whose samples are too few for all devices of a stage are repeated on several. ``scatters``: as
    ``sequence_parallel`` does. ``context``: so many neighbouring groups share the positions of their samples' sequences. ``experts``: how
    they lie; by default all of them on each group, which splits their matrices. StrategyError if they do not divide so."""
    orders = [tuple(stages[block]) for block in blocks]
    placement = _Placement(graph, orders, topology.device_count, scatters=scatters, context=context)
    if microbatches > 1 or context > 1:
        placement.repeat_few(MicroBatches(graph, microbatches))
    return placement.place(tensor, experts)


def _everywhere(graph: OperatorGraph, topology: Topology, *, scatters: bool = False) -> _Placement:
    return _Placement(graph, [device_order(topology)] * len(graph.operators), topology.device_count, scatters=scatters)


class _Placement:
    """One strategy being made. ``orders``: by operator, its stage's devices. ``scatters``: cheap operators are split along sequences.
    ``context``: so many neighbouring groups share positions."""

    def __init__(
        self, graph: OperatorGraph, orders: Sequence[tuple[int, ...]], device_count: int, *, scatters: bool = False, context: int = 1
    ) -> None:  # fmt: skip
        self._graph, self._orders, self._device_count, self._scatters = graph, orders, device_count, scatters
        self._chains, self._context = find_chains(graph), context
        self._positions = positions(graph, context)
        if context > 1 and not self._positions:
            raise StrategyError(f"groups of {context} that share positions of sequences; expected a model with sequences of such a length")
        self._chosen: dict[int, OpConfig] = {}
        self._few: dict[int, OpConfig] = {}
        self._gathered: set[int] = set()

    def repeat_few(self, cut: MicroBatches) -> None:
        """Where micro-batches have fewer samples than a stage has devices, divide them among groups of devices that do the same
        (``grids.shared``), unless tensor parallelism finds something better. In groups that share positions, so are these."""
        for i, op in enumerate(self._graph.operators):
            factor, count = sample_factor(op), len(self._orders[i])
            if factor is None:
                continue
            least = cut.least_size(i, factor)
            if i in self._positions:
                width = width_for(count // self._context, least)
                self._few[i] = self._grouped(i, width, positions_of_loss(op, width * self._context))
            elif least < count:
                self._few[i] = shared(op, self._orders[i], least)

    def _grouped(self, i: int, width: int, factor: int | None = None, periods: int = 1) -> OpConfig:
        """The operator in groups of devices, which share positions if it has some."""
        own, outer = self._graph.operators[i], (self._positions.get(i), self._context)
        return grouped(own, self._orders[i], width * self._context, factor, periods, outer)

    def place(self, most: int, experts: ExpertMapping | None = None) -> Strategy:
        """The strategy with groups of at most ``most`` devices."""
        graph = self._graph
        of_experts = {i: factor for i, op in enumerate(graph.operators) if (factor := expert_factor(graph, op)) is not None}
        split = [chain for chain in self._chains if of_experts.keys().isdisjoint(chain.factors)]
        chains: list[tuple[Chain, int]] = [(chain, chain.width(graph, most)) for chain in split] if most > 1 else []
        width = max((width for _, width in chains if width > 1), default=most)
        for chain, own in chains:
            if own > 1:
                self._gathered.update(chain.rows)
                for i, factor in chain.factors.items():
                    self._chosen[i] = self._grouped(i, own, factor, chain.periods.get(i, 1))
        self._place_experts(of_experts, experts or ExpertMapping(1, most))
        self._split_vocabularies(width)
        self._repeat_between(width)
        return settled(graph, fill(graph, self._orders, self._few | self._chosen), self._device_count)

    def _place_experts(self, of_experts: Mapping[int, int], own: ExpertMapping) -> None:
        """Divide experts (``of_experts``: position -> factor), and split their matrices."""
        graph, chains = self._graph, {i: chain for chain in self._chains for i in chain.factors}
        for i, factor in of_experts.items():
            op, devices, width = graph.operators[i], len(self._orders[i]), own.parallel * own.tensor
            if devices % width or op.factors[factor].size < own.parallel:
                raise StrategyError(
                    f"{op.factors[factor].size} experts in {own.parallel} parts of {own.tensor} devices, on {devices} devices of a stage; "
                    "expected a divisor of the number of devices, and no more parts than experts"
                )
            chain = chains.get(i) if own.tensor > 1 else None
            fits = chain is not None and chain.width(graph, own.tensor) == own.tensor
            inner, periods = (chain.factors[i], chain.periods.get(i, 1)) if chain is not None and fits else (None, 1)
            if width > 1:
                each = width if inner is not None or own.parallel > 1 else 1
                self._chosen[i] = grouped(op, self._orders[i], each, inner, periods, (factor, own.parallel))
        for i, op in enumerate(graph.operators) if of_experts else ():
            read, made = ({operand.tensor for operand in own} & graph.routed.keys() for own in (op.inputs, op.outputs))
            if i in of_experts or not (read or made):
                continue
            if read and made:  # handed over: each device of a group has a part of the rows of its experts
                self._chosen[i] = spread(op, self._orders[i], op.outputs[0].dims[0].factor, *own)
            else:  # each device sends rows of its own samples, and brings them back
                self._chosen[i] = grouped(op, self._orders[i], 1)
                self._gathered.update([] if made else [i])

    def _split_vocabularies(self, width: int) -> None:
        """Split tables by entries and output layers by columns where the vocabulary is larger than the features."""
        last = _last_matrices(self._graph)
        for i, op in enumerate(self._graph.operators):
            if i in self._chosen or sample_factor(op) is None or width == 1:
                continue
            entries, matrix = table(self._graph, op), dense(self._graph, op) if i in last else None
            if entries is not None and entries.entries > entries.width and op.factors[entries.factor].size >= width:
                self._chosen[i] = self._grouped(i, width, entries.factor)
                self._gathered.add(i)
            elif matrix is not None and matrix.outputs > matrix.inputs and op.factors[matrix.column].size >= width:
                self._chosen[i] = self._grouped(i, width, matrix.column)

    def _repeat_between(self, width: int) -> None:
        """Repeat cheap operators on all devices of a group where they read the sums of a split part and lead to another one; or split them
        along sequences."""
        graph, splits = self._graph, SequenceSplits(self._graph, width)
        for i in sorted(self._gathered) if self._scatters else ():
            splits.scattered(self._graph.operators[i])
        leads: set[int] = set()
        for i in reversed(range(len(self._graph.operators))):
            readers = {reader for out in self._graph.operators[i].outputs for reader, _ in self._graph.consumers.get(out.tensor, ())}
            if any(reader in self._chosen or reader in leads for reader in readers):
                leads.add(i)
        for i, op in enumerate(self._graph.operators):
            sources = {self._graph.producers[o.tensor][0] for o in op.inputs if o.tensor in self._graph.producers}
            if i in self._chosen or i not in leads or sample_factor(op) is None or not sources & self._gathered:
                continue
            read, made = (sum(prod(graph.tensors[own.tensor].shape) for own in side) for side in (op.inputs, op.outputs))
            if op.flops <= max(CHEAP_FLOPS_PER_ELEMENT * made, CHEAP_FLOPS_PER_INPUT * read):
                factor = splits.following(op)
                self._chosen[i] = self._grouped(i, width, factor)
                self._gathered.add(i)
                if factor is not None:
                    splits.split(op, factor)


def _last_matrices(graph: OperatorGraph) -> set[int]:
    """Positions of the operators after which no weight matrix follows; output layers are among them."""
    before: set[int] = set()
    for i in reversed(range(len(graph.operators))):
        op = graph.operators[i]
        if i in before or dense(graph, op) is not None:
            before.update(graph.producers[operand.tensor][0] for operand in op.inputs if operand.tensor in graph.producers)
    return set(range(len(graph.operators))) - before


def operator_work(graph: OperatorGraph) -> list[int]:
    """Floating-point operations of each operator; at least one for each number that it makes, or reads of other operators. (A lookup reads
    no more of its table than it makes.)"""
    return [max(op.flops, *(prod(graph.tensors[own.tensor].shape) for own in (*op.inputs, *op.outputs))) for op in graph.operators]


def balanced_blocks(work: Sequence[int], blocks: int) -> list[int]:
    """Block number of each operator: blocks are contiguous, the fullest has the least possible work, and the others are filled evenly."""
    low, high = max(work, default=0), sum(work)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _blocks_needed(work, middle) <= blocks else (middle + 1, high)
    result: list[int] = []
    block, load, rest = 0, 0, sum(work)
    for i, amount in enumerate(work):
        left = blocks - block - 1
        full = load + amount > low
        # Closing a block early, at its fair share, must leave room for the rest in the remaining blocks.
        fair = load > 0 and (2 * load + amount) * (left + 1) >= 2 * (load + rest)
        if full or (left > 0 and fair and _blocks_needed(work[i:], low) <= left):
            block, load = block + 1, 0
        result.append(block)
        load, rest = load + amount, rest - amount
    return result


def _blocks_needed(work: Sequence[int], capacity: int) -> int:
    """How many contiguous blocks of at most ``capacity`` the work fills."""
    count, load = 1, 0
    for amount in work:
        if load + amount > capacity:
            count, load = count + 1, 0
        load += amount
    return count


class SequenceSplits:
    """Along which dimension tensors are split in ``width`` parts inside groups of devices. It is told operator by operator, in order."""

    def __init__(self, graph: OperatorGraph, width: int) -> None:
        self._graph, self._width = graph, width
        self._dimensions: dict[str, int] = {}

    def following(self, op: Operator) -> int | None:
        """The factor that follows most elements of the inputs that are split; None if it has none that can be split."""
        found: Counter[int] = Counter()
        for operand in op.inputs:
            dimension = self._dimensions.get(operand.tensor)
            factor = None if dimension is None else operand.dims[dimension].factor
            if factor is not None and self._is_sequence(op, factor):
                found[factor] += prod(self._graph.tensors[operand.tensor].shape)
        return max(found, key=lambda factor: (found[factor], -factor), default=None)

    def beginning(self, op: Operator) -> int | None:
        """The longest factor along which an operator that reads nothing but the model's inputs and constants can be split."""
        if any(self._graph.tensors[operand.tensor].kind is TensorKind.ACTIVATION for operand in op.inputs):
            return None
        return self._longest(op, op.inputs)

    def scattered(self, op: Operator) -> None:
        """The outputs of this operator are wanted in parts, along their longest dimension that is one of a sequence."""
        factor = self._longest(op, op.outputs)
        if factor is not None:
            self.split(op, factor)

    def split(self, op: Operator, factor: int) -> None:
        """The operator is split along this factor."""
        for output in op.outputs:
            dimension = next((d for d, dim in enumerate(output.dims) if dim.factor == factor), None)
            if dimension is not None:
                self._dimensions[output.tensor] = dimension

    def _longest(self, op: Operator, operands: tuple[Operand, ...]) -> int | None:
        factors = {dim.factor for operand in operands for dim in operand.dims if dim.factor is not None}
        found = [factor for factor in factors if self._is_sequence(op, factor) and not op.factors[factor].summed]
        return max(found, key=lambda factor: (op.factors[factor].size, -factor), default=None)

    def _is_sequence(self, op: Operator, factor: int) -> bool:
        if factor == positions_of_loss(op, self._width):
            return True
        own = op.factors[factor]
        return op.partitionable and own.kind is FactorKind.ATTRIBUTE and own.size >= self._width


def context_parallel(graph: OperatorGraph, topology: Topology) -> Strategy:
    """Positions of sequences split inside each host, data parallelism across hosts. Parameters are on all devices.

    What cannot follow positions is data parallel on all devices.
    """
    width, order = tensor_parallel_width(topology), device_order(topology)
    chosen = {i: grouped(graph.operators[i], order, width, factor) for i, factor in positions(graph, width).items()}
    return settled(graph, fill(graph, [order] * len(graph.operators), chosen), topology.device_count)


def positions(graph: OperatorGraph, width: int) -> dict[int, int]:
    """By operator that follows the positions of sequences: the factor to split in so many parts."""
    splits, found = SequenceSplits(graph, width), dict[int, int]()
    for i, op in enumerate(graph.operators) if width > 1 else ():
        factor = splits.following(op)
        if factor is None:
            factor = splits.beginning(op)
        if factor is not None:
            found[i] = factor
            splits.split(op, factor)
    return found
