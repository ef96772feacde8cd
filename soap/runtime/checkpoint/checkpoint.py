"""Checkpoints: saved from the shards of one strategy, loaded into the shards of any other, on any number of ranks.

Tensors are named as in the user's model: ``model.<parameter or buffer>``, ``optim.state.<parameter>.<key>`` and, for methods of
synchronization with a state, ``sync.state.<parameter>.<name>`` (of compressed parameters one for each rank, see ``rank_state``). Each is
stored in its full shape; ranks write and read regions of it. State that a plan's methods do not have is ignored; what is missing begins
afresh. Step and seed are the whole state of random numbers.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from soap.errors import CheckpointError, SoapError
from soap.model.regions import lengths, subtract, volume, whole
from soap.plan.plan import Plan
from soap.runtime.checkpoint.manifest import (
    MANIFEST,
    NO_STATE,
    Manifest,
    begin,
    damaged,
    discard,
    model_name,
    publish,
    read_manifest,
    require_optimizer,
    resolve,
    state_name,
    sync_state_name,
    unwritable,
)
from soap.runtime.checkpoint.rank_state import (
    Known,
    join,
    known_here,
    rank_state_to_read,
    rank_state_to_save,
    require_same_training,
    restore,
    restore_ranks,
    states_of,
)
from soap.runtime.checkpoint.storage import CheckpointReader, CheckpointWriter, Region, RegionLoadPlanner, RegionSavePlanner
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.compression.peer import CompressedTraining
from soap.runtime.step.gradients import Gradients
from soap.runtime.sync.shards import ShardStore
from soap.runtime.updates import optimizers
from soap.runtime.updates.loss_scaling import LossScaler
from soap.runtime.updates.optimizers import Schedule, recorded_name
from soap.runtime.updates.parts import Part
from soap.tracing.execute import TracedModel


def kept_names(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Parameter -> names of the states that its methods keep."""
    found: dict[str, dict[str, None]] = {}
    for sync in plan.syncs:
        for number in sync.shards if sync.contract.state else ():
            found.setdefault(plan.shards[number].parameter, {}).update(dict.fromkeys(sync.contract.state))
    return {parameter: tuple(names) for parameter, names in found.items()}


def state_to_save(
    store: ShardStore, names: Mapping[str, tuple[str, ...]], kept: Mapping[int, Mapping[str, torch.Tensor]]
) -> Iterator[Region]:
    """The regions that this rank saves: of shards whose first device it is, zeros without a state. ``kept``: shard -> name -> tensor."""
    plan = store.plan
    for number, tensor in store.tensors.items():
        shard = plan.shards[number]
        if shard.devices[0] == store.rank:
            shape, own = plan.graph.tensors[shard.parameter].shape, kept.get(number, {})
            for name in names.get(shard.parameter, ()):
                value = own[name] if name in own else torch.zeros_like(tensor, requires_grad=False)
                yield Region(sync_state_name(shard.parameter, name), shape, shard.box, value)


def state_to_read(store: ShardStore, manifest: Manifest) -> dict[tuple[int, str], Region]:
    """(shard, name) -> empty tensor for a state that this plan's methods keep of this rank's shards, if the checkpoint has it."""
    plan, found = store.plan, dict[tuple[int, str], Region]()
    for sync in plan.syncs:
        for number in sync.shards if sync.contract.state else ():
            shard = plan.shards[number]
            for name in sync.contract.state if number in store.tensors else ():
                if name in manifest.sync_states.get(shard.parameter, ()):
                    stored = manifest.tensors[sync_state_name(shard.parameter, name)]
                    dtype: torch.dtype = getattr(torch, stored.dtype)
                    empty = torch.empty(lengths(shard.box), dtype=dtype, device=store.tensors[number].device)
                    found[number, name] = Region(sync_state_name(shard.parameter, name), stored.shape, shard.box, empty)
    return found


def by_shard(kept: Mapping[tuple[int, str], Region]) -> dict[int, dict[str, torch.Tensor]]:
    """Shard -> name -> tensor."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for (number, name), region in kept.items():
        found.setdefault(number, {})[name] = region.tensor
    return found


T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """What checkpoints need to know of a training on this rank. ``parts``: what the optimizer updates. ``place``: moves a tensor to this
    rank's device, in the dtype that is computed in. ``gradients``: give the state of the methods of synchronization. ``compressing``: see
    ``TrainingOptions``. ``scaler``: of the loss."""

    model: TracedModel
    plan: Plan
    comm: Communicator
    shards: ShardStore
    parts: Mapping[int, Part]
    optimizer: torch.optim.Optimizer | None
    schedule: Schedule
    place: Callable[[torch.Tensor], torch.Tensor]
    gradients: Gradients
    compressing: CompressedTraining
    scaler: LossScaler | None = None


@dataclass(frozen=True)
class Loaded:
    """A checkpoint beside shards and optimizer state. ``unchanged``: untrained tensors, on rank 0. ``loss_scaling``: the scaler's state."""

    step: int
    seed: int
    buffers: Mapping[str, torch.Tensor]
    unchanged: Mapping[str, torch.Tensor]
    loss_scaling: Mapping[str, Any] | None


def save_checkpoint(
    folder: str | Path, training: Training, step: int, seed: int, buffers: Mapping[str, torch.Tensor], keep: int | None = None
) -> Path:
    """Save a checkpoint; called on all ranks at once. Returns its path. ``buffers``: in full, on rank 0.

    CheckpointError, the same on all ranks, if some state cannot be kept (nothing is written then) or the folder cannot be written to.
    """
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep {keep}: expected at least 1, or None for all")
    comm = training.comm
    here = _together(comm, lambda: known_here(training.parts, training.optimizer))
    everywhere = comm.gather(here)
    known = _together(comm, lambda: join(everywhere))
    own = _together(comm, training.schedule.record)
    records = comm.gather(own)
    schedule = _together(comm, lambda: optimizers.joined(records))
    begun = _together(comm, lambda: begin(folder, step) if comm.rank == 0 else None)
    temporary, save_id = comm.gather((begun, secrets.token_hex(8)))[0]
    ranks = states_of(comm, training.shards, training.gradients)
    manifest = replace(_manifest(training, step, seed, save_id, known), schedule=schedule, rank_states=ranks)
    if training.scaler is not None:
        manifest = replace(manifest, loss_scaling=training.scaler.state())
    if ranks:
        manifest = replace(manifest, compressing=asdict(training.compressing))
    try:
        _together(comm, lambda: _require_visible(temporary))
        kept = training.gradients.state() if manifest.sync_states else {}
        regions = [*_regions_to_save(training, known, buffers), *state_to_save(training.shards, manifest.sync_states, kept)]
        regions += rank_state_to_save(training.shards, ranks, training.gradients)
        planner = RegionSavePlanner(regions, manifest)
        writer = CheckpointWriter(temporary, manifest)
        _through_torch(Path(folder), lambda: save({}, storage_writer=writer, planner=planner))
        published = _together(comm, lambda: publish(temporary, step, keep) if comm.rank == 0 else None)
    except BaseException:
        if comm.rank == 0:
            discard(temporary)
        raise
    final: Path = comm.gather(published)[0]
    return final


def load_checkpoint(path: str | Path, training: Training, buffers: Mapping[str, torch.Tensor]) -> Loaded:
    """Fill shards and the optimizer's state from a checkpoint, or from the latest in a folder; called on all ranks at once.

    ``buffers``: tensors of the wanted names, shapes and dtypes. CheckpointError if the checkpoint does not fit or lacks something; nothing
    is changed then. If a data file turns out to be damaged inside, some shards may have been changed already.
    """
    comm, plan, tensors = training.comm, training.plan, training.shards.tensors
    checkpoint, manifest = _together(comm, lambda: _read(path, training, buffers))
    ids = comm.gather(manifest.save_id)
    if len(set(ids)) > 1:
        raise CheckpointError(f"ranks see different checkpoints at {str(path)!r}; expected a folder that all ranks share")
    optimizers.require_same(comm.gather(training.schedule.name), manifest.schedule, str(checkpoint))
    require_same_training(training.compressing, training.shards, manifest, str(checkpoint))
    read_buffers = {name: torch.empty_like(tensor) for name, tensor in buffers.items()}
    regions = [Region(model_name(name), tuple(t.shape), whole(t.shape), t) for name, t in read_buffers.items()]
    for number, tensor in tensors.items():
        shard = plan.shards[number]
        regions.append(Region(model_name(shard.parameter), plan.graph.tensors[shard.parameter].shape, shard.box, tensor))
    unchanged = _unchanged_to_read(training, manifest) if comm.rank == 0 else {}
    regions += [Region(model_name(name), tuple(t.shape), whole(t.shape), t) for name, t in unchanged.items()]
    found = _together(comm, lambda: _state_to_read(training, manifest))
    regions += found.values()
    kept = state_to_read(training.shards, manifest)
    regions += kept.values()
    of_ranks = rank_state_to_read(training.shards, manifest, training.gradients)
    regions += of_ranks.values()
    reader, planner = CheckpointReader(checkpoint, manifest, together=True), RegionLoadPlanner(regions, manifest)
    _through_torch(checkpoint, lambda: load({}, storage_reader=reader, planner=planner))
    read = {key: region.tensor for key, region in found.items()}
    _together(comm, lambda: restore(training.optimizer, training.parts, manifest.states, read))
    if manifest.sync_states and kept_names(plan):
        training.gradients.restore(by_shard(kept))
    if manifest.rank_states:
        restore_ranks(training.shards, manifest, training.gradients, of_ranks, training.compressing)
    if manifest.schedule is not None:
        record = manifest.schedule
        _together(comm, lambda: training.schedule.restore(record))
    return Loaded(manifest.step, manifest.seed, read_buffers, unchanged, manifest.loss_scaling)


def read_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a checkpoint, or of the latest in a folder, by the names of the user's model.

    The exported module can load it. This process needs no other ranks, and reads no pickle. CheckpointError if the checkpoint is damaged.
    """
    checkpoint = resolve(path)
    manifest = read_manifest(checkpoint)
    _check_dtypes(checkpoint, manifest)
    prefix = model_name("")
    full: dict[str, torch.Tensor] = {}
    for name, stored in manifest.tensors.items():
        if name.startswith(prefix):
            full[name.removeprefix(prefix)] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    planner = RegionLoadPlanner([Region(model_name(n), tuple(t.shape), whole(t.shape), t) for n, t in full.items()], manifest)
    CheckpointReader(checkpoint, manifest).read_data(planner.create_local_plan(), planner)
    return {**full, **{alias: full[name] for alias, name in manifest.aliases.items()}}


def _regions_to_save(training: Training, known: Known, buffers: Mapping[str, torch.Tensor]) -> list[Region]:
    """The regions that this rank writes: shards whose first device it is; rank 0 also what nobody owns, buffers, and single numbers."""
    plan, rank = training.plan, training.comm.rank
    regions = []
    for number, tensor in training.shards.tensors.items():
        shard = plan.shards[number]
        if shard.devices[0] != rank:
            continue
        shape = plan.graph.tensors[shard.parameter].shape
        regions.append(Region(model_name(shard.parameter), shape, shard.box, tensor))
        if number in training.parts and training.optimizer is not None:
            regions += _state_to_save(training.parts[number], training.optimizer, known)
    if rank == 0:
        regions += _unread_regions(training)
        others = {**{name: training.place(tensor) for name, tensor in training.model.unchanged.items()}, **buffers}
        regions += [Region(model_name(name), tuple(t.shape), whole(t.shape), t) for name, t in others.items()]
        for (name, key), value in known.scalars.items():
            tensor = torch.tensor(value, dtype=known.dtypes[name, key])
            regions.append(Region(state_name(name, key), (), (), tensor))
    return regions


def _state_to_save(part: Part, optimizer: torch.optim.Optimizer, known: Known) -> list[Region]:
    own, state = known.states.get(part.parameter, NO_STATE), optimizer.state.get(part.tensor, {})
    regions = [Region(state_name(part.parameter, key), part.shape, part.box, state[key]) for key in own.regions]
    for key in own.others:
        shape = tuple(state[key].shape)
        regions.append(Region(state_name(part.parameter, key), shape, whole(shape), state[key]))
    return regions


def _unread_regions(training: Training) -> list[Region]:
    """Regions of frozen parameters that no tile reads. They have no shard, and still have their exported values."""
    boxes: dict[str, list[tuple[tuple[int, int], ...]]] = {}
    for shard in training.plan.shards:
        boxes.setdefault(shard.parameter, []).append(shard.box)
    regions = []
    for name, tensor in training.model.parameters.items():
        left = [whole(tensor.shape)]
        for box in boxes.get(name, ()):
            left = [piece for rest in left for piece in subtract(rest, box)]
        for box in left:
            if volume(box) or name not in boxes:
                part = tensor.detach()[tuple(slice(a, b) for a, b in box)]
                regions.append(Region(model_name(name), tuple(tensor.shape), box, training.place(part)))
    return regions


def _unchanged_to_read(training: Training, manifest: Manifest) -> dict[str, torch.Tensor]:
    result = {}
    for name, tensor in training.model.unchanged.items():
        stored = manifest.tensors.get(model_name(name))
        if stored is not None and stored.shape == tuple(tensor.shape):
            result[name] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return result


def _state_to_read(training: Training, manifest: Manifest) -> dict[tuple[int, str], Region]:
    """(part, key) -> empty tensor for this rank's optimizer. CheckpointError if this plan cuts what was saved for the whole."""
    optimizer = training.optimizer
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
    found = {}
    for number, part in training.parts.items():
        known = manifest.states.get(part.parameter)
        if known is None or id(part.tensor) not in mine:
            continue
        if known.others and not part.is_whole:
            raise CheckpointError(
                f"the optimizer's state {known.others[0]!r} of {part.parameter!r} was saved of the whole parameter, and this plan cuts it; "
                "go on with a plan that keeps it whole, such as data_parallel"
            )
        for key in (*known.regions, *known.scalars, *known.others):
            name = state_name(part.parameter, key)
            stored = manifest.tensors[name]
            dtype: torch.dtype = getattr(torch, stored.dtype)
            box = part.box if key in known.regions else whole(stored.shape)
            device = torch.device("cpu") if key in known.scalars else part.tensor.device
            found[number, key] = Region(name, stored.shape, box, torch.empty(lengths(box), dtype=dtype, device=device))
    return found


def _read(path: str | Path, training: Training, buffers: Mapping[str, torch.Tensor]) -> tuple[Path, Manifest]:
    """The checkpoint's path and manifest. CheckpointError if it does not fit this training."""
    checkpoint = resolve(path)
    manifest = read_manifest(checkpoint)
    _check_dtypes(checkpoint, manifest)
    own = {name: tuple(t.shape) for name, t in (*training.model.parameters.items(), *buffers.items())}
    theirs = {name: manifest.tensors[model_name(name)].shape for name in (*manifest.parameters, *manifest.buffers)}
    for name in (*own, *theirs):
        if own.get(name) != theirs.get(name):
            shown = [f"shape {list(shapes[name])}" if name in shapes else "no such tensor" for shapes in (theirs, own)]
            raise CheckpointError(
                f"checkpoint {str(checkpoint)!r} is of another model ({manifest.model!r}, not {training.plan.graph.name!r}): "
                f"{name!r} has {shown[0]} there, {shown[1]} here; load it into the model that it was saved from"
            )
    require_optimizer(checkpoint, manifest, None if training.optimizer is None else recorded_name(training.optimizer))
    return checkpoint, manifest


def _check_dtypes(checkpoint: Path, manifest: Manifest) -> None:
    for name, tensor in manifest.tensors.items():
        if not isinstance(getattr(torch, tensor.dtype, None), torch.dtype):
            raise damaged(checkpoint / MANIFEST, f"{name!r} has the unknown dtype {tensor.dtype!r}")


def _manifest(training: Training, step: int, seed: int, save_id: str, known: Known) -> Manifest:
    """The manifest without the tensors' places."""
    model, graph = training.model, training.plan.graph
    aliases = {alias: name for alias, name in graph.aliases.items() if name in model.parameters or name in model.buffers}
    return Manifest(
        save_id=save_id,
        step=step,
        seed=seed,
        model=graph.name,
        parameters=tuple(model.parameters),
        buffers=tuple(model.buffers),
        aliases=aliases,
        optimizer=known.optimizer,
        states=known.states,
        tensors={},
        sync_states=kept_names(training.plan),
    )


def _require_visible(temporary: Path) -> None:
    if not temporary.is_dir():
        raise CheckpointError(f"folder {str(temporary.parent)!r} is not seen by all ranks; expected a file system that they share")


def _together(comm: Communicator, action: Callable[[], T]) -> T:
    """Do something on this rank. A CheckpointError on any rank is raised on all."""
    failure, result = "", []
    try:
        result.append(action())
    except CheckpointError as error:
        failure = str(error)
    for found in comm.gather_late(failure):
        if found:
            raise CheckpointError(found)
    return result[0]


def _through_torch(folder: Path, action: Callable[[], object]) -> None:
    """Call torch's checkpoint library, which raises a failure of any rank on all ranks. Turns that into a CheckpointError in one line."""
    try:
        action()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, SoapError):
            raise CheckpointError(str(cause)) from None
        if isinstance(cause, OSError):
            raise unwritable(folder, cause) from None
        what = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
        raise CheckpointError(f"checkpoint {str(folder)!r} failed on rank {rank}: {what}") from None
