"""The end of a step, after the last backward pass: owners add up gradients, clip them, update, and send values to the readers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch

from soap.plan.plan import Plan, serve_name, update_name
from soap.runtime.comm.position import HERE
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.step.gradients import Gradients
from soap.runtime.sync.row_update import Updater
from soap.runtime.trace import Recorder, watch_nothing
from soap.runtime.updates.clipping import clip
from soap.runtime.updates.momentum import DecayMomentum
from soap.runtime.updates.parts import Part, merged
from soap.simulator.tasks import TaskKind


class StepEnd:
    """The end of a step on one rank. ``parts``: what its optimizer updates. ``clip_norm``: the largest global norm of the gradients; None:
    no clipping. ``lazy``: see ``row_update``. ``decay``: momentum of weight decay, if momentum is corrected."""

    def __init__(
        self,
        plan: Plan,
        comm: Communicator,
        gradients: Gradients,
        parts: Mapping[int, Part],
        optimizer: torch.optim.Optimizer | None,
        clip_norm: float | None,
        lazy: bool,
        decay: DecayMomentum | None = None,
    ) -> None:
        self._decay = decay
        self.plan, self.comm, self.gradients, self.clip_norm = plan, comm, gradients, clip_norm
        self._parts, self._name = parts, update_name(comm.rank)
        tensors = {number: part.tensor for number, part in parts.items()}
        self._updater = Updater(optimizer, tensors, {number: (part.parameter, part.box) for number, part in parts.items()}, lazy)

    def run(self, looked_up: Mapping[str, torch.Tensor], recorder: Recorder | None) -> float | None:
        """Update all parameters. Returns the gradients' norm before clipping; None without clipping. ``looked_up``: as for
        ``Updater.update``."""
        gradients, norm = self.gradients, None
        watch = watch_nothing if recorder is None else recorder.watch
        HERE.task = self._name
        done = set() if recorder is None else self._serve(recorder)
        gradients.add_up()
        if self.clip_norm is not None:
            found = {**gradients.dense, **{number: own.values for number, own in gradients.rows.items()}}
            norm = clip(self.comm, self.plan, found, self.clip_norm, watch)
        left = None if not done else self._parts.keys() - done
        timed = recorder is not None and (gradients.dense.keys() | gradients.rows.keys()) - done
        with recorder.task(self._name, TaskKind.UPDATE) if recorder is not None and timed else nullcontext():
            dense = gradients.dense if self._decay is None else self._decay.added(gradients.dense)
            self._updater.update(*merged(self.plan, self._parts, dense, gradients.rows), looked_up, left)
        HERE.task = ""
        gradients.refresh(watch)
        return norm

    def _serve(self, recorder: Recorder) -> set[int]:
        """In a traced step, add up and update each partition that this rank serves as a task of its own. Returns the updated shards. With
        clipping none is updated here: the norm is not known yet."""
        updated = set[int]()
        for sync in self.plan.syncs:
            for number, shard in enumerate(sync.shards if sync.contract.has_servers else ()):
                if shard in self._parts:
                    with recorder.task(serve_name(sync, number), TaskKind.UPDATE):
                        self.gradients.add_up((shard,))
                        if self.clip_norm is None:
                            self._updater.update(self.gradients.dense, self.gradients.rows, {}, (shard,))
                            updated.add(shard)
        return updated
