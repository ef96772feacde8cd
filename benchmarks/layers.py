"""Pipelines by layers, as people write them: every chunk has as many layers of a transformer as the others."""

from __future__ import annotations

import re
from dataclasses import replace

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.schedules.named import parse
from soap.strategy.config import Strategy
from soap.strategy.megatron import ExpertMapping, neighbouring_stages, staged
from soap.strategy.stages import stages_of, stages_of_chunks

LAYER = re.compile(r"\b(?:blocks|layers|h|layer)\.(\d+)\b")
"""A layer's number in an operator's name."""


def by_layers(
    graph: OperatorGraph,
    topology: Topology,
    *,
    stages: int,
    microbatches: int,
    schedule: str,
    tensor: int = 1,
    scatters: bool = False,
    context: int = 1,
    experts: ExpertMapping | None = None,
) -> Strategy:
    """A pipeline as Megatron-LM has it: stages of neighbouring devices, in each of which groups of ``tensor`` split matrices, ``context``
    groups share positions, and groups of these divide the samples. ``experts``: how these lie on a stage."""
    groups, named = neighbouring_stages(topology, stages), parse(schedule)
    chunks = layer_chunks(graph, stages * named.chunks)
    placement = stages_of_chunks(stages * named.chunks, schedule)
    blocks = [placement[chunk] for chunk in chunks]
    lays = {"tensor": tensor, "microbatches": microbatches, "scatters": scatters, "context": context}
    strategy = staged(graph, topology, blocks, groups, **lays, experts=experts)
    return replace(strategy, microbatches=microbatches, stages=stages_of(graph, chunks), schedule=schedule)


def layer_chunks(graph: OperatorGraph, count: int) -> list[int]:
    """By operator: its chunk. Chunks begin with layers; what is before the first layer belongs to the first one, the rest to the last.

    Where that is uneven, and is not with what is before and what is behind all layers as one layer each, these count so, as Megatron-LM's
    options ``account_for_embedding_in_pipeline_split`` and ``account_for_loss_in_pipeline_split`` have it."""
    first: dict[int, int] = {}
    last = 0
    for position, op in enumerate(graph.operators):
        if (found := LAYER.search(op.name)) is not None:
            first.setdefault(int(found[1]), position)
            last = position
    starts = [first[layer] for layer in range(len(first))]
    if len(starts) % count and (len(starts) + 2) % count == 0:
        starts = [0, *starts, last + 1]
    borders = [starts[layer] for layer in first_layers(len(starts), count)[1:]]
    return [sum(position >= border for border in borders) for position in range(len(graph.operators))]


def first_layers(layers: int, chunks: int) -> list[int]:
    """The first layer of each chunk."""
    return [chunk * layers // chunks for chunk in range(chunks)]
