"""Sharded parameters: each reader owns a part of every region, and the rest of its values is there only for the passes that read them.

Values are all-gathered before the forward passes that use them, freed behind, and gathered again for the backward passes. Gradients are
reduce-scattered to the owners, which update their parts; nothing follows the update: ZeRO-3 of Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023. Frozen values are gathered, for
backward passes only if these read them, and that is all.

Without stages each micro-batch does so (``gathering``), as FSDP, DeepSpeed and Megatron do by default: owners add what is
scattered to the sums of the micro-batches before, in the gradients' type, reader by reader. Where hosts have copies of their own these sums
are all-reduced with the last one. In stages values are gathered once a step, and gradients are added up until the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from soap.model.graph import OperatorGraph
from soap.plan.memory_kinds import MemoryKind
from soap.plan.plan import Plan, ShardSync, sync_name, update_name
from soap.plan.syncs.amounts import Group
from soap.plan.syncs.bucketing import gather_limit, gradient_bytes, shard_bytes
from soap.plan.syncs.even_parts import bucket_bytes, is_even, part_bytes
from soap.plan.syncs.gathering import is_read_back, stays
from soap.plan.syncs.large_parts import large_bytes, packed_of_owners
from soap.plan.syncs.seam import PULL, REGATHER, Hold, How, Phase, Setting, ShardUpdate, SyncStep, Template, Uses
from soap.plan.syncs.sharded_state import ShardedState, gather_name, held_gradients, moving_row, received_bytes, scatter_name, scatter_rows
from soap.plan.syncs.sharing import owned_bytes, sharers, sharing_groups
from soap.strategy.sync_contracts import named


class Sharded(ShardedState):
    """Cuts regions as ``ShardedState`` does. What is gathered together is scattered together."""

    def limits(self, graph: OperatorGraph) -> tuple[int, int]:
        """About ``gather_limit`` each: what lies together in a model is gathered together, and scattered together."""
        return (gather_limit(graph),) * 2

    def template(self, readers: Group, leaders: Group, how: Setting) -> Template:
        """Every owner sends every reader of its copy the values, twice; gradients go as those of sharded states."""
        copies = sharing_groups(readers, leaders)
        first = moving_row(copies, Phase.BEFORE_FORWARD, PULL, "gather", How.GATHER, even=how.even)
        again = moving_row(copies, Phase.BEFORE_BACKWARD, REGATHER, "regather", How.GATHER, even=how.even)
        added = super().template(readers, leaders, how).added
        return Template((first, again, *scatter_rows(copies, even=how.even)), tuple(copies), added)

    def steps(self, plan: Plan, sync: ShardSync, *, pull_together: bool = True) -> Sequence[SyncStep]:
        """Those of the template; values that stay, or that no backward pass reads, are gathered once. Copies are summed when gradients are
        complete."""
        read_back, completes = is_read_back(plan, sync), plan.completes(sync)
        found = [step for step in super().steps(plan, sync) if completes or not step.summed_bytes]
        return found if read_back else [step for step in found if step.phase is not Phase.BEFORE_BACKWARD]

    def updates(self, plan: Plan, sync: ShardSync) -> Sequence[ShardUpdate]:
        """None of frozen values. Owners add up what comes for all micro-batches."""
        if plan.is_frozen(sync) or not plan.completes(sync):
            return ()
        more = sync.part or 0
        own = ((update, shard_bytes(plan.graph, plan.shards[update.shard])) for update in super().updates(plan, sync))
        return [replace(update, added_bytes=(1 + more) * update.added_bytes + more * size) for update, size in own]

    def holds(self, plan: Plan, sync: ShardSync) -> Iterator[Hold]:
        """Of values, what is received in a buffer until the first use, and large ones in their places; the rest of the copy from the first
        use on, to the last of the forward and of the backward pass, or of both if it stays. Gradients as of sharded states; they and what
        others send until two later ones are on their way; the sums from the first micro-batch on."""
        owned, whole, even = owned_bytes(plan, sync), gradient_bytes(plan, sync), is_even(plan, sync)
        large, small = large_bytes(plan, sync), packed_of_owners(plan, sync)
        bucket, part = bucket_bytes(plan, sync), part_bytes(plan, sync)
        if not plan.is_frozen(sync):
            yield from held_gradients(plan, sync)
        for reader in sync.readers:
            own = owned.get(reader, 0)
            come = bucket if even else whole - large - small.get(reader, 0)
            for name, passes in self._gathered(plan, sync):
                yield Hold(reader, come, since=name, used=passes)
                yield Hold(reader, large, since=name, used=passes, throughout=True, kind=MemoryKind.VALUES)
                yield Hold(reader, whole - large, used=passes, kind=MemoryKind.VALUES)
            if plan.is_frozen(sync):
                continue
            scatter = scatter_name(sync)
            received = received_bytes(sync, own)
            moving, total = (bucket, part) if even else (whole + received, own)
            later = own if received and not (even or sync.aggregated) else 0
            if sync.part:  # the sum is there
                moving, later = (moving + part if even else whole + (sharers(sync) - 1) * own), 0
            if sync.aggregated and plan.completes(sync):  # ranks sum over hosts next, and before that wait for what comes, and add it up
                yield Hold(reader, moving + total, since=scatter, until=scatter, before=True, queue="few")
            else:
                yield Hold(reader, moving, since=scatter, until=update_name(reader), before=True, queue="few", sum_bytes=later)
            if not sync.part:
                yield Hold(reader, total - later, since=scatter, kind=MemoryKind.GRADIENTS)

    @staticmethod
    def _gathered(plan: Plan, sync: ShardSync) -> tuple[tuple[str, Uses], ...]:
        """(task that gathers values, the passes for which it does)."""
        if stays(plan, sync):
            return ((gather_name(sync), "both"),)
        return (gather_name(sync), "forward"), (regather_name(sync), "backward")


def regather_name(sync: ShardSync) -> str:
    """Task name of the all-gather of values before the backward pass."""
    return sync_name(sync, "regather")


METHOD = Sharded(named("sharded"))
