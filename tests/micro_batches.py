"""Strategies with micro-batches, made of strategies without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from soap.model.graph import FactorKind, OperatorGraph
from soap.model.micro_batches import MicroBatches
from soap.plan.pass_order import OrderOf, PassAction, PassOrder
from soap.strategy.classical import random_config
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.recomputation import KEPT, repeatable


def in_micro_batches(graph: OperatorGraph, strategy: Strategy, count: int, rng: random.Random, device_count: int) -> Strategy:
    """The strategy in ``count`` micro-batches. Where that leaves an operator fewer samples than parts, it is configured anew."""
    cut = MicroBatches(graph, count)
    operators = {}
    for position, op in enumerate(graph.operators):
        config = strategy.operators[op.name]
        for _ in range(20):
            if _fits(cut, position, config):
                break
            config = random_config(op, device_count, rng)
        if not _fits(cut, position, config):
            config = OpConfig((1,) * len(op.factors), (rng.randrange(device_count),))
        operators[op.name] = replace(config, recompute=config.recompute if cut.may_repeat(position) else KEPT)
    return replace(strategy, operators=operators, microbatches=count)


def repeatable_parts(graph: OperatorGraph, count: int) -> list[str]:
    """Names of the operators that may be recomputed in ``count`` micro-batches."""
    cut = MicroBatches(graph, count)
    return [name for name in sorted(repeatable(graph)) if cut.may_repeat(graph.index[name])]


def _fits(cut: MicroBatches, position: int, config: OpConfig) -> bool:
    factor = cut.factors[position]
    return factor is None or config.degrees[factor] <= cut.least_size(position, factor)


def one_f_one_b(borders: Sequence[str]) -> OrderOf:
    """1F1B (Narayanan et al., 2006.09503) over stages that begin with these operators, beside the first one."""

    def make(cut: MicroBatches) -> PassOrder:
        starts = sorted(cut.graph.index[name] for name in borders)
        chunks = tuple(sum(position >= start for start in starts) for position in range(len(cut.graph.operators)))
        own = [_stage(stage, len(starts) + 1, cut.count) for stage in range(len(starts) + 1)]
        done: dict[PassAction, None] = {}
        while any(own):
            for actions in own:
                while actions and _wanted(actions[0], len(starts)) <= done.keys():
                    done[actions.pop(0)] = None
        return PassOrder(cut, chunks, tuple(done))

    return make


def _stage(stage: int, stages: int, count: int) -> list[PassAction]:
    ahead = min(count, stages - stage)
    actions = [PassAction("F", stage, m) for m in range(ahead)]
    for m in range(count):
        actions.append(PassAction("B", stage, m))
        if ahead + m < count:
            actions.append(PassAction("F", stage, ahead + m))
    return actions


def _wanted(action: PassAction, last: int) -> set[PassAction]:
    kind, chunk, m = action
    if kind == "F":
        return {PassAction("F", chunk - 1, m)} if chunk else set()
    return {PassAction("B", chunk + 1, m)} if chunk < last else {PassAction("F", chunk, m)}


def by_hand(graph: OperatorGraph, borders: Sequence[str], devices: Sequence[Sequence[int]]) -> Strategy:
    """Stages that begin with these operators, beside the first one, on these devices; inside a stage data parallelism."""
    starts = sorted(graph.index[name] for name in borders)
    operators = {}
    for position, op in enumerate(graph.operators):
        own = tuple(devices[sum(position >= start for start in starts)])
        sample = next((i for i, factor in enumerate(op.factors) if factor.kind is FactorKind.SAMPLE), None)
        if sample is None:
            operators[op.name] = OpConfig((1,) * len(op.factors), own[:1])
        else:
            operators[op.name] = OpConfig(tuple(len(own) if i == sample else 1 for i in range(len(op.factors))), own)
    return Strategy(operators)
