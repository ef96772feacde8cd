"""What a trainer with a few fixed kinds of parallelism can be told, and which strategy that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.strategy.classical import SYNCHRONIZED, expert_parallel, single_device
from soap.strategy.config import Strategy
from soap.strategy.grids import largest_divisor, tensor_parallel_width
from soap.strategy.megatron import ExpertMapping, context_parallel, hybrid, neighbouring_stages, sequence_parallel, staged
from soap.strategy.recomputation import recomputed, selectively_recomputed
from soap.strategy.stages import stages_of, stages_of_chunks
from soap.strategy.sync import offloaded
from soap.strategy.tensor_parallel_chains import expert_factor

Base = Literal["single", "data", "tensor", "sequence", "context", "expert"]
"""How a copy of the model is on devices: on one of them alone; on each; split inside layers (Megatron); that, with sequences split between
the layers; positions split; experts divided."""
Sharing = Literal["none", "zero1", "fsdp", "hsdp"]
"""Whether copies share optimizer states, or values as well, among all of them or inside hosts (``soap.strategy.classical``)."""
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Pipeline:
    """``chunks``: by operator, its chunk. ``schedule``: as ``soap.schedules`` names it."""

    chunks: tuple[int, ...]
    schedule: str

    @property
    def stage_of(self) -> tuple[int, ...]:
        """By chunk: its stage."""
        return stages_of_chunks(max(self.chunks) + 1, self.schedule)

    @property
    def stages(self) -> int:
        """Groups of devices."""
        return max(self.stage_of) + 1

    @property
    def chunks_each(self) -> int:
        """Chunks of each stage."""
        return len(self.stage_of) // self.stages


@dataclass(frozen=True)
class Configuration:
    """``width``: devices of a group that split a copy of the model, or its experts, by ``base``. ``world``: devices in all. ``device``:
    of base ``single``. ``samples``: of a step, of all devices. ``microbatches``: in how many parts each device takes its samples.
    ``prefetch``: how many modules, or groups of values, may be gathered while an earlier one is used. ``mapping``: how
    experts lie where the base divides something else; None: all on each group, split as its layers are."""

    base: Base
    width: int
    world: int
    samples: int
    device: int = 0
    pipeline: Pipeline | None = None
    microbatches: int = 1
    sharing: Sharing = "none"
    offload: bool = False
    recompute: Recompute = "none"
    prefetch: int = 1
    mapping: ExpertMapping | None = None

    @property
    def stages(self) -> int:
        """Stages of the pipeline, 1 if there is none."""
        return 1 if self.pipeline is None else self.pipeline.stages

    @property
    def tensor(self) -> int:
        """Devices that split layers."""
        return self.width if self.base in ("tensor", "sequence") else 1

    @property
    def context(self) -> int:
        """Devices that share the positions of a sample."""
        return self.width if self.base == "context" else 1

    @property
    def experts(self) -> int:
        """Devices that divide experts."""
        if self.mapping is not None:
            return self.mapping.parallel
        return self.width if self.base == "expert" else 1

    @property
    def data(self) -> int:
        """Groups of devices with samples of their own; those that divide experts have their own, too."""
        return self.world // (self.tensor * self.context * self.stages)

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch of one group of devices."""
        return self.samples // (self.data * self.microbatches)


def placement(graph: OperatorGraph, topology: Topology, configuration: Configuration) -> Strategy:
    """Where operators are by a configuration, without what it says of parameters and recomputation. StrategyError if it cannot be."""
    base, width, pipeline = configuration.base, configuration.width, configuration.pipeline
    if pipeline is not None:
        return _pipelined(graph, topology, pipeline, configuration)
    if base == "single":
        strategy = single_device(graph, topology, configuration.device)
    elif base == "context":
        strategy = context_parallel(graph, topology)
    elif base == "expert":
        strategy = expert_parallel(graph, topology)
    elif configuration.mapping is not None:
        mapping, count = configuration.mapping, configuration.microbatches
        strategy = hybrid(graph, topology, tensor=width, microbatches=count, scatters=base == "sequence", experts=mapping)
    elif base == "sequence":
        strategy = sequence_parallel(graph, topology, width)
    else:
        strategy = hybrid(graph, topology, tensor=width)
    return replace(strategy, microbatches=configuration.microbatches)


def _pipelined(graph: OperatorGraph, topology: Topology, pipeline: Pipeline, own: Configuration) -> Strategy:
    """Stages take neighbouring devices, as in all of these trainers: the pipeline's is the outermost dimension of their meshes."""
    homes = neighbouring_stages(topology, pipeline.stages)
    blocks = [pipeline.stage_of[chunk] for chunk in pipeline.chunks]
    scatters, lays = own.base == "sequence", {"tensor": own.width, "microbatches": own.microbatches}
    strategy = staged(graph, topology, blocks, homes, **lays, scatters=scatters, experts=own.mapping)
    stages = stages_of(graph, pipeline.chunks)
    return replace(strategy, stages=stages, schedule=pipeline.schedule, microbatches=own.microbatches)


def shared(graph: OperatorGraph, topology: Topology, strategy: Strategy, sharing: Sharing) -> Strategy:
    """The strategy with its parameters shared so, and no other way."""
    parameters = {} if sharing == "none" else SYNCHRONIZED[sharing](graph, topology).parameters
    return replace(strategy, parameters=parameters)


def recomputing(graph: OperatorGraph, strategy: Strategy, recompute: Recompute) -> Strategy:
    """The strategy with its operators recomputed so."""
    if recompute == "none":
        return strategy
    return recomputed(graph, strategy) if recompute == "full" else selectively_recomputed(graph, strategy)


def meaning(graph: OperatorGraph, topology: Topology, configuration: Configuration) -> Strategy:
    """The strategy that a configuration stands for. StrategyError if there is none."""
    strategy = shared(graph, topology, placement(graph, topology, configuration), configuration.sharing)
    strategy = replace(strategy, prefetch=configuration.prefetch)
    strategy = recomputing(graph, strategy, configuration.recompute)
    return offloaded(graph, strategy) if configuration.offload else strategy


def widths(graph: OperatorGraph, topology: Topology, base: Base, devices: int) -> Sequence[int]:
    """Widths of a base that there are for stages of so many devices, the narrowest first."""
    most = tensor_parallel_width(topology)
    if base in ("single", "data"):
        return (1,)
    if base == "expert":
        sizes = [op.factors[factor].size for op in graph.operators if (factor := expert_factor(graph, op)) is not None]
        width = max((largest_divisor(most, size) for size in sizes), default=1)
        return (width,) if width > 1 else ()
    if base == "context":
        return (most,) if most > 1 else ()
    return [width for width in range(2, most + 1) if most % width == 0 and devices % width == 0]
