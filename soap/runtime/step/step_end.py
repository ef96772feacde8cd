"""The end of a step, after the last backward pass: owners add up gradients, clip them, update, and send values to the readers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch

from soap.plan.offloading import from_host_name, host_update_name, to_host_name
from soap.plan.plan import Plan, serve_name, update_name
from soap.runtime.comm.position import HERE
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.compression.dgc import DecayMomentum
from soap.runtime.step.gradients import Gradients
from soap.runtime.sync.row_update import Updater
from soap.runtime.trace import Recorder, Watch, watch_nothing
from soap.runtime.updates.loss_scaling import LossScaler, limit, squares, summed
from soap.runtime.updates.parts import Offloading, merged
from soap.runtime.updates.trial import updates_elementwise
from soap.simulator.tasks import TaskKind


class StepEnd:
    """The end of a step on one rank. ``offloading``: what its optimizer updates, and what of it in the host's memory. ``clip_norm``: the
    largest global norm of the gradients; None: no clipping. ``lazy``: see ``row_update``. ``decay``: momentum of weight decay, if
    momentum is corrected. ``scaler``: by what the loss was scaled; None: by nothing."""

    def __init__(
        self,
        plan: Plan,
        comm: Communicator,
        gradients: Gradients,
        offloading: Offloading,
        optimizer: torch.optim.Optimizer | None,
        clip_norm: float | None,
        lazy: bool,
        decay: DecayMomentum | None = None,
        scaler: LossScaler | None = None,
    ) -> None:
        self._decay, self._scaler = decay, scaler
        self.plan, self.comm, self.gradients, self.clip_norm = plan, comm, gradients, clip_norm
        self._offloading, self._parts, self._name = offloading, offloading.parts, update_name(comm.rank)
        parts = offloading.parts
        tensors = {number: part.tensor for number, part in parts.items()}
        gradients.serves_early = (
            comm.messages_apart
            and (clip_norm, decay, scaler) == (None, None, None)
            and not offloading.numbers
            and (optimizer is None or updates_elementwise(optimizer))
        )
        self._updater = Updater(optimizer, tensors, {number: (part.parameter, part.box) for number, part in parts.items()}, lazy)

    def run(self, looked_up: Mapping[str, torch.Tensor], recorder: Recorder | None) -> float | None:
        """Update all parameters, unless the loss was scaled and a gradient is not finite: then none. Returns the gradients' norm before
        clipping; None without clipping. ``looked_up``: as for ``Updater.update``."""
        gradients, norm = self.gradients, None
        watch = watch_nothing if recorder is None else recorder.watch
        HERE.task = self._name
        done = self._serve_early(looked_up) if recorder is None else self._serve(recorder)
        gradients.add_up()
        if self.clip_norm is not None or self._scaler is not None:
            norm = self._agree(watch)
        if self._scaler is not None and not self._scaler.finite:
            HERE.task = ""
            gradients.refresh(watch)
            return norm
        away = self._offloading.numbers
        left = self._parts.keys() - done - (away if recorder is not None else set())
        timed = recorder is not None and (gradients.dense.keys() | gradients.rows.keys()) - done
        with recorder.task(self._name, TaskKind.UPDATE) if recorder is not None and timed else nullcontext():
            dense, rows = gradients.dense if self._decay is None else self._decay.added(gradients.dense), gradients.rows
            dense, rows = merged(self.plan, self._parts, dense, rows)
            if recorder is None and away:  # the optimizer takes one step, so that what it counts of steps is right
                dense.update(self._offloading.to_host(dense))
            if left:
                self._updater.update(dense, rows, looked_up, left)
        if recorder is not None and away:
            self._update_on_host(dense, recorder)
        elif away:
            self._offloading.from_host()
        HERE.task = ""
        gradients.refresh(watch)
        return norm

    def _agree(self, watch: Watch) -> float | None:
        """Unscale and clip the complete gradients, as all ranks do: they sum one number for each, all at once. Returns the norm."""
        gradients, scaler, numbers = self.gradients, self._scaler, list[torch.Tensor]()
        found = {**gradients.dense, **{number: own.values for number, own in gradients.rows.items()}}
        if scaler is not None:
            numbers.append(scaler.unscale(found.values(), self.comm.device))
        if self.clip_norm is not None:
            numbers.append(squares(self.comm, self.plan, found))
        sums = summed(self.comm, numbers, watch)
        if scaler is not None:
            scaler.update(sums[0] == 0)
        if self.clip_norm is None:
            return None
        norm = math.sqrt(sums[-1])
        if scaler is None or scaler.finite:
            limit(found.values(), norm, self.clip_norm)
        return norm

    def _update_on_host(self, dense: Mapping[int, torch.Tensor], recorder: Recorder) -> None:
        """In a traced step, update what is offloaded in tasks of their own."""
        rank = self.comm.rank
        with recorder.task(to_host_name(rank), TaskKind.SYNC):
            gradients = self._offloading.to_host(dense)
        with recorder.task(host_update_name(rank), TaskKind.UPDATE):
            self._updater.update(gradients, {}, {}, self._offloading.numbers)
        with recorder.task(from_host_name(rank), TaskKind.SYNC):
            self._offloading.from_host()

    def _serve_early(self, looked_up: Mapping[str, torch.Tensor]) -> set[int]:
        """Update what this rank serves as gradients come, as simulated, unless something must be known of all gradients first. Returns the
        updated shards. Each is a step of the optimizer, so it must be one that updates each element by itself."""
        updated = set[int]()

        def update(shards: Sequence[int]) -> None:
            self._updater.update(self.gradients.dense, {}, looked_up, shards)
            updated.update(shards)

        if self.gradients.serves_early:
            self.gradients.serve(update)
        return updated

    def _serve(self, recorder: Recorder) -> set[int]:
        """In a traced step, add up and update each partition that this rank serves as a task of its own. Returns the updated shards. With
        clipping or a scaled loss none is updated here: what all ranks must agree on is not known yet."""
        updated = set[int]()
        for sync in self.plan.syncs:
            for number, shard in enumerate(sync.shards if sync.contract.has_servers else ()):
                if shard in self._parts:
                    with recorder.task(serve_name(sync, number), TaskKind.UPDATE):
                        self.gradients.add_up((shard,))
                        if self.clip_norm is None and self._scaler is None:
                            self._updater.update(self.gradients.dense, self.gradients.rows, {}, (shard,))
                            updated.add(shard)
        return updated
