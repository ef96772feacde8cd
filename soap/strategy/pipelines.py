"""Strategies whose operators are in the stages of a pipeline."""

from __future__ import annotations

from dataclasses import replace

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.strategy.config import Strategy
from soap.strategy.megatron import staged
from soap.strategy.stages import chunks_of, devices_of_stages, stages_of_chunks


def usual_in_stages(graph: OperatorGraph, strategy: Strategy, topology: Topology) -> Strategy:
    """The strategy with data parallelism inside each of its stages, on the devices that they use already; without stages, on all of these.
    It may have more micro-batches than its own configurations allow."""
    chunks = chunks_of(graph, strategy.stages)
    stage_of = stages_of_chunks(max(chunks, default=0) + 1, strategy.schedule)
    groups = [sorted(own) or [0] for own in devices_of_stages(graph, strategy)]
    made = staged(graph, topology, [stage_of[chunk] for chunk in chunks], groups, microbatches=strategy.microbatches)
    return replace(strategy, operators=made.operators)
