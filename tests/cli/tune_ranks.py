"""What ranks do in the tests of ``soap-tune``; at the top of a module, so that it can be pickled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import soap
from soap import zoo
from soap.measure.iteration import StepTimes, measure_steps
from soap.runner import tuning
from soap.runtime.trainer import Trainer
from soap.search.partition_tuning import Curve
from tests.runner.ranks import sgd

MODEL = "zoo:full_sparse:tiny"
CURVE = Curve(1e8, 8e8, 5e7)
"""Least at 4 partitions."""
ITERATIONS = 3

Seen = tuple[int, tuple[float, ...]]


def on_a_curve(seen: list[Seen]) -> Callable[..., StepTimes]:
    """Measures, but what it says of time is the curve's; ``seen``: partitions and losses of each run."""

    def measure(trainer: Trainer, *args: Any, **options: Any) -> StepTimes:
        found = measure_steps(trainer, *args, **options)
        sparse = trainer.plan.graph.sparse
        (partitions,) = {len(own.shards) for own in trainer.plan.syncs if own.parameter in sparse}
        seen.append((partitions, found.losses))
        return replace(found, times_ns=tuple(round(CURVE.time_ns(partitions)) for _ in found.times_ns))

    return measure


class Source:
    """Batches, counted; there is no end of them."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for batch in zoo.batches(MODEL):
            self.asked += 1
            yield [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch]


def tune(ranks: int) -> dict[str, Any]:
    """Tune from different numbers, by the curve's times: what came of it, what was run, and what it did to model and data."""
    cluster = soap.load_cluster(f"emulated:{ranks}x1@200Mbit/s")
    model = soap.load(MODEL, dtype="float64")
    before = {name: tensor.clone() for name, tensor in model.parameters.items()}
    strategy = soap.api.classical("parameter_server", model.graph, cluster)
    source, seen = Source(), list[Seen]()
    real, tuning.measure_steps = tuning.measure_steps, on_a_curve(seen)  # type: ignore[attr-defined]
    try:
        found = soap.tune(model, cluster, strategy, source, iterations=ITERATIONS, optimizer=sgd)
    finally:
        tuning.measure_steps = real  # type: ignore[attr-defined]
    changed = [name for name, tensor in model.parameters.items() if not torch.equal(tensor, before[name])]
    return {"found": found, "given": strategy, "seen": seen, "asked": source.asked, "changed": changed}
