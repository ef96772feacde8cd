"""What a time per step amounts to: samples and tokens per second, the share of the devices' peak rate, and money.

Model FLOPs utilisation (MFU) counts the operations that the model needs, not those that a plan repeats (Chowdhery et al., "PaLM: Scaling
Language Modeling with Pathways", 2022, appendix B): three times the forward pass for what is trained, since the gradients of inputs and
of parameters take as many operations each (``soap.profiles.work``). Unlike there, all operations of the graph count, not products alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from soap.cluster.price import Price
from soap.cluster.topology import Topology
from soap.model.batch import samples_of, tokens_of
from soap.model.graph import OperatorGraph
from soap.plan.tiling import whole_tile
from soap.profiles.work import forward_work

TRAINED_PASSES = 3
"""Operations of a forward and backward pass, in forward passes."""
MILLION = 1_000_000
NS_PER_HOUR = 3600 * 10**9


@dataclass(frozen=True, slots=True)
class Throughput:
    """Figures of a training step that takes ``step_ns`` nanoseconds on a cluster. ``samples``, ``tokens``: of all its batches; None where
    the graph has none. ``model_flops``: operations that the model needs for them. ``arithmetic``: the type in which most of them are
    computed. ``peak_flops_per_second``: of all devices together in that type, idle ones included. ``price``: the cluster's, if known."""

    step_ns: int
    samples: int | None
    tokens: int | None
    model_flops: int
    arithmetic: str
    peak_flops_per_second: float
    price: Price | None = None

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second."""
        return self._per_second(self.samples)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second (``soap.model.batch.tokens_of``)."""
        return self._per_second(self.tokens)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the model's operations per second as a share of the devices' peak rate."""
        return self.model_flops / (self._seconds * self.peak_flops_per_second)

    @property
    def cost_per_million_samples(self) -> float | None:
        """In the price's currency; None without a price."""
        return self._cost(self.samples)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """In the price's currency; None without a price."""
        return self._cost(self.tokens)

    @property
    def cost_per_step(self) -> float | None:
        """In the price's currency; None without a price."""
        return None if self.price is None else self.price.per_hour * self.step_ns / NS_PER_HOUR

    @property
    def _seconds(self) -> float:
        return max(1, self.step_ns) / 1e9

    def _per_second(self, count: int | None) -> float | None:
        return None if count is None else count / self._seconds

    def _cost(self, count: int | None) -> float | None:
        each = self.cost_per_step
        return None if each is None or not count else each * MILLION / count


def throughput(graph: OperatorGraph, topology: Topology, step_ns: int, batches: int = 1) -> Throughput:
    """The figures of a step of so many batches, predicted or measured."""
    samples, tokens = (None if count is None else count * batches for count in (samples_of(graph), tokens_of(graph)))
    arithmetic = arithmetic_of(graph)
    peak = sum(device.type.flops(arithmetic) for device in topology.devices)
    return Throughput(step_ns, samples, tokens, model_flops(graph) * batches, arithmetic, peak, topology.price)


def model_flops(graph: OperatorGraph) -> int:
    """Operations of one training step of one batch. Operators that no gradient reaches count once."""
    trained = graph.backward_operators
    return sum(op.flops * (TRAINED_PASSES if position in trained else 1) for position, op in enumerate(graph.operators))


def arithmetic_of(graph: OperatorGraph) -> str:
    """The type in which most operations of the forward pass are computed."""
    flops: dict[str, float] = {}
    for position in range(len(graph.operators)):
        for kernel in forward_work(graph, whole_tile(graph, position)):
            flops[kernel.dtype] = flops.get(kernel.dtype, 0.0) + kernel.flops
    return max(flops, key=lambda dtype: flops[dtype], default="float32")
