"""The backward pass of one step on one rank: its segments by decreasing start, with gradients that come from and go elsewhere.

Where gradients flow is decided by the program: a rank that has none to give sends zeros. Contributions are added in the program's
order, never in that of arrival, so that equal runs give equal bits.
"""

from __future__ import annotations

import torch

from soap.runtime.redistribute import Pending, cut
from soap.runtime.state import LeafKey, Output, StepState
from soap.runtime.sync import GradientSync
from soap.simulator.plan import backward_name, reduce_name, sync_name, transfer_name
from soap.simulator.tasks import TaskKind


class BackwardPass:
    """One method per action."""

    def __init__(self, state: StepState, gradients: GradientSync) -> None:
        self.state, self.program, self.plan = state, state.program, state.plan
        self.gradients = gradients
        self._returning: dict[int, list[tuple[int, Pending]]] = {}
        self._reduced: dict[int, Pending] = {}

    def run_segment(self, number: int) -> None:
        """Run a segment backward and hand the gradients of its inputs on."""
        outputs, gradients = [], []
        for output in self.state.outputs.pop(number, ()):
            gradient = self._gradient(output)
            if gradient is not None and output.tensor.requires_grad:
                outputs.append(output.tensor)
                gradients.append(gradient)
        if not outputs:
            return
        first = self.plan.tiles[self.program.segments[number].tiles[0]]
        with self.state.task(backward_name(self.plan.operator(first), first), TaskKind.BACKWARD), self.gradients.segment(number):
            torch.autograd.backward(outputs, gradients)

    def return_gradient(self, number: int) -> None:
        """Send a transfer's gradient back, or receive it."""
        transfer = self.program.transfers[number]
        tensor = self.plan.fetches[transfer.fetch].tensor
        tag = len(self.program.transfers) + number
        name = transfer_name(tensor, transfer.box, transfer.target, transfer.source, gradient=True)
        if transfer.source == self.state.rank:
            pending = self.state.receive(transfer.box, tensor, transfer.target, tag, name)
            self._returning.setdefault(transfer.holding, []).append((number, pending))
            return
        gradient = self._take(("transfer", number))
        if gradient is None:
            gradient = self.state.empty(transfer.box, tensor).zero_()
        self.state.send(gradient, transfer.source, tag, name)

    def reduce_gradient(self, number: int) -> None:
        """Sum the gradients that the group's members have for a sum that was left on all of them."""
        reduction = self.plan.reductions[number]
        own = self._collect(self.program.index.reduced[number, self.state.rank])
        if own is None:
            own = self.state.empty(reduction.box, self.state.reduced_tensor(number)).zero_()
        elif len(reduction.devices) > 1:
            own = own.contiguous()
        name = reduce_name(self.state.graph.operators[reduction.operator], reduction, gradient=True)
        self._reduced[number] = self.state.sum_over(own, reduction.devices, name)

    def synchronize(self, bucket: int) -> None:
        """Start summing the gradients of parameter shards over their copies."""
        pending = self.gradients.start(bucket)
        names = [sync_name(self.plan.shards[shard]) for shard in self.program.buckets[bucket].shards]
        self.state.watch(names, TaskKind.SYNC, pending)

    def _gradient(self, output: Output) -> torch.Tensor | None:
        """What comes from outside for one output of a segment; None stands for zeros."""
        if output.holding is not None:
            total = self._collect(output.holding)
        else:
            assert output.reduction is not None
            pending = self._reduced.get(output.reduction)
            total = None if pending is None else pending.wait()
        if not output.seed:
            return total
        one = torch.full_like(output.tensor, self.state.share)
        return one if total is None else total + one

    def _collect(self, holding: int) -> torch.Tensor | None:
        """All gradients for a holding, whose value is needed no longer: from this rank's own segments, then from other ranks."""
        held = self.plan.holdings[holding]
        total = self._take(("holding", holding))
        returned = self._returning.pop(holding, ())
        if returned:
            total = self.state.empty(held.box, held.tensor).zero_() if total is None else total
            for number, pending in returned:
                cut(total, held.box, self.program.transfers[number].box).add_(pending.wait())
        return total

    def _take(self, key: LeafKey) -> torch.Tensor | None:
        """The gradient that this rank's segments have left on a leaf, which is needed no longer."""
        leaf = self.state.leaves.pop(key, None)
        return None if leaf is None else leaf.grad
