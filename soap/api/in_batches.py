"""Ways that take a step's samples in several smaller batches, one after the other, so that less is kept at a time (``soap.api.fitting``).

Where each sample goes through by itself, that is a plan with micro-batches, and trains to the same numbers. Where operators need several
samples at once (batch norm), micro-batches save nothing. Then the model is made anew for fewer samples, and several of its batches join in
a step (``soap-run --accumulate``): each is normalized by itself, so that numbers are others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from soap.api.models import planned_graph
from soap.model.batch import MicroBatches, samples_of
from soap.model.graph import OperatorGraph, TensorKind
from soap.plan.delivery import box_bytes
from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Plan
from soap.plan.syncs.bucketing import sums_of_one
from soap.strategy.named import DATA_PARALLEL, JOIN, MICRO_BATCHES, WIDTH

COUNTS = (2, 4, 8)
"""In how many batches samples are tried to go through."""
BASES = (DATA_PARALLEL, "zero1", "fsdp")
"""The strategies that are tried with micro-batches."""
READING_SECONDS = 0.08
"""For each operator, what it takes to make a model of the zoo for another batch: 0.05 to 0.1 s of a core for gpt, inception_v3, nmt_gnmt
and resnet101 (Intel Xeon, 2026-11-27). It is not begun if that would take too long."""
ZOO = "zoo:"

Smaller = Callable[[int], OperatorGraph]
"""The model for a batch of so many samples."""


def counts(graph: OperatorGraph) -> Iterator[int]:
    """Into how many batches the samples may be divided, fewest first."""
    samples = samples_of(graph)
    yield from (count for count in COUNTS if samples is not None and samples % count == 0)


def in_micro_batches(base: str, count: int) -> str:
    """The name of a strategy whose samples go through in so many micro-batches."""
    return f"{base}{JOIN}{MICRO_BATCHES}{WIDTH}{count}"


def couples_samples(graph: OperatorGraph) -> bool:
    """Whether operators need several samples at once, so that micro-batches save nothing."""
    return bool(MicroBatches(graph, COUNTS[0]).barriers)


def smaller_zoo(graph: OperatorGraph) -> Smaller | None:
    """Makes a model of the zoo for fewer samples; None if it is no model of the zoo."""
    spec, found, _ = graph.name.partition("@")
    return (lambda samples: planned_graph(f"{spec}@{samples}")) if spec.startswith(ZOO) and found else None


def kept_between(plan: Plan, count: int) -> list[dict[str, int]]:
    """For each device the bytes by kind that a step of several batches holds beside what one batch does: the other batches, and gradients
    that only stay if the step goes on."""
    batch = sum(tensor.bytes for tensor in plan.graph.tensors.values() if tensor.kind is TensorKind.INPUT)
    found = [{MemoryKind.BATCH.value: (count - 1) * batch, MemoryKind.GRADIENTS.value: 0} for _ in range(plan.device_count)]
    for number in sums_of_one(plan):
        shard = plan.shards[number]
        for device in shard.devices:
            found[device][MemoryKind.GRADIENTS] += box_bytes(plan, shard.parameter, shard.box)
    return found
