"""State beside parameters in checkpoints: the optimizer's, and what each rank keeps of compressed parameters for itself (residuals,
momentum, thresholds and their age, signs, the warm-up's position).

The optimizer's is saved by parameter name, whatever way parameters are split. State with a part's shape is a region of a tensor with the
parameter's shape. Numbers, such as Adam's step, must be the same for all parts. Tensors of other shapes (factors, matrices) are saved if
the parameter is not cut. Anything else cannot be saved.

A residual is saved for each *place* among a shard's peers (``sync.state.<parameter>.residual@<place>``), as a tensor of the parameter's
shape. Peers are the readers, or with local aggregation one of each host. Regions of a parameter may have unlike numbers of peers, so each
region's is recorded. A region that overlaps only such with as many peers as its own gives each peer what the one at its place had.
Elsewhere the first peer goes on from the sum of all places, the others from zero. What means nothing to others (a reused threshold, a
basis) then begins anew, also where regions or the method's settings are others; numbers that were equal everywhere (steps, whose sign's
turn it is) go on. What has no place in this plan is dropped. All of that is said in one line each. Another momentum correction or warm-up
is refused: no sum of states would mean the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from soap.errors import CheckpointError, SoapWarning
from soap.model.regions import Box, intersect, lengths, subtract, whole
from soap.plan.plan import ShardSync
from soap.plan.syncs.compressed import compressed_names, compressed_shards
from soap.runtime.checkpoint.manifest import Manifest, ParameterState, RankEntry, RankStates, place_name, sync_state_name
from soap.runtime.checkpoint.storage import Region
from soap.runtime.comm.redistribute import Communicator
from soap.runtime.compression.peer import MOMENTUM, STEPS, CompressedTraining
from soap.runtime.compression.seam import State, kept_dtype
from soap.runtime.step.gradients import Gradients
from soap.runtime.sync.shards import ShardStore
from soap.runtime.updates.optimizers import recorded_name
from soap.runtime.updates.parts import Part
from soap.strategy.compression import Compression, written_settings

Wanted = dict[tuple[int, str, int], Region]
"""(shard, name, place) -> where it is read to."""
COMMON = -1
"""In place of a place: the same for all peers."""


def _states(gradients: Gradients) -> Mapping[int, State]:
    return {} if gradients.compressed is None else gradients.compressed.states


def _peers(store: ShardStore) -> dict[int, tuple[int, ...]]:
    """Compressed shard -> its peers."""
    return {number: sync.peers for number, sync in compressed_shards(store.plan).items()}


def _settings(sync: ShardSync) -> dict[str, Any]:
    assert sync.compression is not None  # it compresses
    return written_settings(sync.compression)


def states_of(comm: Communicator, store: ShardStore, gradients: Gradients) -> dict[str, RankStates]:
    """Parameter -> what all ranks keep of it; called on all ranks at once."""
    syncs, own = compressed_shards(store.plan), []
    for shard, state in _states(gradients).items():
        box, peers = store.plan.shards[shard].box, syncs[shard].peers
        own_numbers = {name: (str(tensor.dtype).removeprefix("torch."), float(tensor)) for name, tensor in state.own.items()}
        entry = RankEntry(box, peers.index(store.rank), len(peers), dict(state.numbers), own_numbers)
        names, common = tuple(state.summed), tuple(common_name(name, box) for name in state.common)
        own.append((store.plan.shards[shard].parameter, RankStates(names, len(peers), _settings(syncs[shard]), common, (entry,))))
    found: dict[str, RankStates] = {}
    for parameter, one in (each for ranks in comm.gather(own) for each in ranks):
        before = found.get(parameter, RankStates(one.names, 0, one.method, (), ()))
        every = tuple(dict.fromkeys((*before.common, *one.common)))
        found[parameter] = RankStates(one.names, max(before.peers, one.peers), one.method, every, (*before.entries, *one.entries))
    return found


def rank_state_to_save(store: ShardStore, known: Mapping[str, RankStates], gradients: Gradients) -> Iterator[Region]:
    """The regions that this rank saves: its own places, as a shard's first device zeros for places without a peer, and what is common."""
    peers, states = _peers(store), _states(gradients)
    for number, tensor in store.tensors.items():
        shard = store.plan.shards[number]
        if shard.parameter not in known:
            continue
        shape, stored, state = store.plan.graph.tensors[shard.parameter].shape, known[shard.parameter], states.get(number)
        for name in stored.names:
            if state is not None:
                value = state.summed[name].view(tensor.shape)
                yield Region(place_name(shard.parameter, name, peers[number].index(store.rank)), shape, shard.box, value)
            if shard.devices[0] == store.rank:
                empty = torch.zeros_like(tensor, dtype=kept_dtype(tensor.dtype), requires_grad=False)
                for place in range(len(peers.get(number, ())), stored.peers):
                    yield Region(place_name(shard.parameter, name, place), shape, shard.box, empty)
        if state is not None and peers[number][0] == store.rank:
            for name, value in state.common.items():
                full = sync_state_name(shard.parameter, common_name(name, shard.box))
                yield Region(full, tuple(value.shape), whole(value.shape), value)


def require_same_training(compressing: CompressedTraining, store: ShardStore, manifest: Manifest, checkpoint: str) -> None:
    """CheckpointError if this plan compresses what was compressed, with another momentum correction or warm-up."""
    again = compressed_names(store.plan) & manifest.rank_states.keys()
    ours, theirs = asdict(compressing), dict(manifest.compressing or {})
    for name in sorted(ours.keys() | theirs.keys()) if again else ():
        if ours.get(name) != theirs.get(name):
            shown = [" ".join(str(own.get(name)).split())[:120] for own in (theirs, ours)]
            raise CheckpointError(
                f"checkpoint {checkpoint!r} was saved with {name} {shown[0]} of compressed parameters, this run has {shown[1]}; expected "
                "the same (soap-run: --correct-momentum and --warm-up)"
            )


def _overlapping(stored: RankStates, box: Box) -> list[RankEntry]:
    """The entries of regions that share elements with this one."""
    return [entry for entry in stored.entries if intersect(entry.box, box) is not None]


def _counts(entries: Iterable[RankEntry]) -> set[int]:
    """Numbers of peers."""
    return {entry.peers for entry in entries}


def rank_state_to_read(store: ShardStore, manifest: Manifest, gradients: Gradients) -> Wanted:
    """Empty tensors for what this rank goes on from, as far as the checkpoint has it."""
    peers, found = _peers(store), Wanted()
    for number, state in _states(gradients).items():
        shard = store.plan.shards[number]
        stored = manifest.rank_states.get(shard.parameter)
        if stored is None:
            continue
        place, counts = peers[number].index(store.rank), _counts(_overlapping(stored, shard.box))
        every = range(max(counts, default=0)) if place == 0 else ()
        for name in (name for name in stored.names if name in state.summed):
            for other in (place,) if counts == {len(peers[number])} else every:
                found[number, name, other] = _empty(manifest, place_name(shard.parameter, name, other), shard.box)
        for name, value in state.common.items():
            full = sync_state_name(shard.parameter, common_name(name, shard.box))
            if full in manifest.tensors and manifest.tensors[full].shape == tuple(value.shape):
                found[number, name, COMMON] = _empty(manifest, full, whole(value.shape))
    return found


def _empty(manifest: Manifest, name: str, box: Box) -> Region:
    stored = manifest.tensors[name]
    return Region(name, stored.shape, box, torch.empty(lengths(box), dtype=getattr(torch, stored.dtype)))


def restore_ranks(
    store: ShardStore, manifest: Manifest, gradients: Gradients, read: Wanted, compressing: CompressedTraining
) -> None:
    """Go on from what was read. Says in one line each, on rank 0, what was summed up, what begins anew, and what this plan drops."""
    syncs = compressed_shards(store.plan)
    for number, state in _states(gradients).items():
        stored = manifest.rank_states.get(store.plan.shards[number].parameter)
        if stored is None:
            continue
        for name, tensor in state.summed.items():
            parts = [region.tensor for (shard, own, _), region in sorted(read.items(), key=_order) if (shard, own) == (number, name)]
            tensor.zero_()
            for part in parts:
                tensor.add_(part.to(tensor).reshape(-1))
        for name in state.common:
            if (number, name, COMMON) in read:
                state.common[name].copy_(read[number, name, COMMON].tensor)
        _restore_own(state, stored, syncs[number], store.plan.shards[number].box, store.rank)
    if store.rank == 0:
        _tell(store, manifest, compressing)


def _restore_own(state: State, stored: RankStates, sync: ShardSync, box: Box, rank: int) -> None:
    """Thresholds and numbers: this peer's own if nothing has changed, else those numbers that are equal everywhere."""
    state.own.clear()
    near = _overlapping(stored, box)
    mine = [own for own in near if own.box == box and own.place == sync.peers.index(rank)]
    if mine and _counts(near) == {len(sync.peers)} and stored.method == _settings(sync):
        state.numbers = dict(mine[0].numbers)
        state.own |= {name: torch.tensor(value, dtype=getattr(torch, kind)) for name, (kind, value) in mine[0].own.items()}
        return
    known = near or stored.entries
    first = known[0].numbers if known else {}
    state.numbers = {name: value for name, value in first.items() if all(own.numbers.get(name) == value for own in known)}
    if stored.method.get("method") != _settings(sync)["method"]:
        state.numbers = {name: value for name, value in state.numbers.items() if name == STEPS}


def _order(entry: tuple[tuple[int, str, int], Region]) -> int:
    return entry[0][2]


def _tell(store: ShardStore, manifest: Manifest, compressing: CompressedTraining) -> None:
    summed: dict[str, tuple[int, int]] = {}
    anew, dropped, lost = dict[str, None](), dict[str, str](), dict[str, None]()
    boxes: dict[str, list[Box]] = {}
    for number, sync in compressed_shards(store.plan).items():
        parameter, box = store.plan.shards[number].parameter, store.plan.shards[number].box
        boxes.setdefault(parameter, []).append(box)
        stored = manifest.rank_states.get(parameter)
        near = _overlapping(stored, box) if stored is not None else []
        if stored is None or not near:
            continue
        gone, others = set(stored.names) - _kept(sync.compression, compressing), _counts(near) - {len(sync.peers)}
        if gone:
            dropped[parameter] = min(gone)
        elif others:
            summed.setdefault(parameter, (max(others), len(sync.peers)))
        elif (stored.method, {own.box for own in near}) != (_settings(sync), {box}) and _has_own(stored, near):
            anew[parameter] = None
    for parameter, stored in manifest.rank_states.items():
        left = list(dict.fromkeys(entry.box for entry in stored.entries)) if stored.names else []
        for box in boxes.get(parameter, ()):
            left = [piece for rest in left for piece in subtract(rest, box)]
        if left:
            lost[parameter] = None
    for name, (before, now) in list(summed.items())[:1]:
        _warn(
            f"residuals of {len(summed)} compressed parameters, such as {name!r}, are of {before} ranks; of {now} ranks now the first goes "
            "on from their sum, and thresholds begin anew: losses differ from those of an uninterrupted run"
        )
    for name in list(anew)[:1]:
        _warn(
            f"thresholds and bases of {len(anew)} compressed parameters, such as {name!r}, begin anew: they were saved of other regions or "
            "settings; residuals go on"
        )
    for name, key in list(dropped.items())[:1]:
        _warn(
            f"{key} of {len(dropped)} parameters, such as {name!r}, is lost: this plan's compression keeps none; expected "
            f"{_said(manifest.rank_states[name].method)}, which it was saved with"
        )
    for name in list(lost)[:1]:
        _warn(
            f"residuals of {len(lost)} parameters, such as {name!r}, are lost: this plan does not compress them, or not all of their "
            "regions; expected the compression that they were saved with"
        )


def _has_own(stored: RankStates, near: Iterable[RankEntry]) -> bool:
    """Whether there is anything that only the same peer of the same region can go on from."""
    return bool(stored.common) or any(entry.own for entry in near)


def _kept(compression: Compression | None, compressing: CompressedTraining) -> set[str]:
    """Names of what a rank keeps of a parameter that is compressed so."""
    names = () if compression is None else compression.summed_state
    return {*names, *(() if compressing.momentum is None else (MOMENTUM,))}


def _said(method: Mapping[str, Any]) -> str:
    return " ".join(str(method.get("method")).split())[:60]


def _warn(line: str) -> None:
    warnings.warn(line, SoapWarning, stacklevel=2)


def common_name(name: str, box: Box) -> str:
    """A state that all peers of a shard share."""
    return f"{name}[{','.join(f'{a}:{b}' for a, b in box)}]"


_LOCAL_OPTIONS = frozenset(("params", "foreach", "fused", "capturable", "differentiable"))
"""Options of a parameter group that say how this rank computes the update, not what the update is. They are not saved."""


@dataclass
class Known:
    """The state of some parameters. ``optimizer``: its name. ``dtypes``, ``scalars``: (parameter, key) -> a tensor's dtype, a value."""

    optimizer: str | None = None
    states: dict[str, ParameterState] = field(default_factory=dict)
    dtypes: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)
    scalars: dict[tuple[str, str], Any] = field(default_factory=dict)


def known_here(parts: Mapping[int, Part], optimizer: torch.optim.Optimizer | None) -> Known:
    """The state of this rank's optimizer. CheckpointError if some of it cannot be saved."""
    if optimizer is None:
        return Known()
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    there = [part for part in parts.values() if id(part.tensor) in groups]
    known = [_known_of(part, groups[id(part.tensor)], optimizer.state.get(part.tensor, {})) for part in there]
    return join([Known(recorded_name(optimizer)), *known])


def join(parts: Iterable[Known]) -> Known:
    """Join the states of all parts. CheckpointError if they do not agree."""
    result = Known()
    for part in parts:
        if part.optimizer is not None and result.optimizer not in (None, part.optimizer):
            raise CheckpointError(f"optimizers {result.optimizer} and {part.optimizer} on different ranks; expected the same on all ranks")
        result.optimizer = result.optimizer or part.optimizer
        different = [name for name, state in part.states.items() if result.states.setdefault(name, state) != state]
        different += [key[0] for key, dtype in part.dtypes.items() if result.dtypes.setdefault(key, dtype) is not dtype]
        different += [key[0] for key, value in part.scalars.items() if repr(result.scalars.setdefault(key, value)) != repr(value)]
        if different:
            raise CheckpointError(
                f"the optimizer's state or options differ among the shards of {different[0]!r}; "
                "expected the same numbers for a whole parameter: checkpoints need an optimizer whose update is elementwise"
            )
    return result


def _known_of(part: Part, group: Mapping[str, Any], state: Mapping[Any, Any]) -> Known:
    """The state of one part."""
    name, tensor = part.parameter, part.tensor
    regions, others = list[str](), list[str]()
    result = Known()
    values: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and isinstance(key, str):
            result.dtypes[name, key] = value.dtype
            if value.dim() == 0 and part.shape != ():
                result.scalars[name, key] = value.item()
                continue
            if value.shape == tensor.shape and value.layout is torch.strided:
                regions.append(key)
                continue
            if part.is_whole and value.layout is torch.strided:
                others.append(key)
                continue
        elif isinstance(key, str) and (value is None or isinstance(value, (bool, int, float, str))):
            values[key] = value
            continue
        what = f"has shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"is a {type(value).__name__}"
        raise CheckpointError(
            f"optimizer state {key!r} of {name!r} {what}; expected a number or a tensor of its shard's shape {tuple(tensor.shape)}: "
            "checkpoints need an optimizer whose update is elementwise"
        )
    scalars = tuple(sorted(key for _, key in result.scalars))
    result.states[name] = ParameterState(_options(name, group), tuple(sorted(regions)), scalars, values, tuple(sorted(others)))
    return result


def _options(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters as JSON values."""
    result = {}
    for key, value in group.items():
        if key not in _LOCAL_OPTIONS:
            result[key] = _plain(value)
            if result[key] is _UNKNOWN:
                raise CheckpointError(
                    f"optimizer option {key!r} of {name!r} is a {type(value).__name__}; "
                    "expected numbers and texts: leave it out of the group"
                )
    return result


_UNKNOWN = object()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        items = [_plain(item) for item in value]
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
    return value if value is None or isinstance(value, (bool, int, float, str)) else _UNKNOWN


def restore(
    optimizer: torch.optim.Optimizer | None,
    parts: Mapping[int, Part],
    states: Mapping[str, ParameterState],
    found: Mapping[tuple[int, str], torch.Tensor],
) -> None:
    """Load an optimizer's state. ``found``: (part, key) -> tensor from the checkpoint. Parameters without ``states`` start fresh."""
    if optimizer is None:
        return
    number_of = {id(part.tensor): number for number, part in parts.items()}
    packed = optimizer.state_dict()
    state: dict[int, dict[str, Any]] = {}
    for group, description in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        options: dict[str, Any] = {}
        for parameter, index in zip(group["params"], description["params"], strict=True):
            number = number_of.get(id(parameter))
            known = states.get(parts[number].parameter) if number is not None else None
            if number is None or known is None:
                continue
            read = {key: found[number, key] for key in (*known.regions, *known.scalars, *known.others)}
            if read or known.values:
                state[index] = {**known.values, **read}
            _agree(options, known.options, parts[number].parameter)
        for key, value in options.items():
            description[key] = _like(group.get(key), value)
    optimizer.load_state_dict({"state": state, "param_groups": packed["param_groups"]})


def _agree(options: dict[str, Any], own: Mapping[str, Any], name: str) -> None:
    for key, value in own.items():
        if options.setdefault(key, value) != value:
            raise CheckpointError(
                f"parameter {name!r} was saved with {key} {value}, another of its group with {options[key]}; "
                "expected the groups that the checkpoint was saved with"
            )


def _like(current: Any, value: Any) -> Any:
    """A saved option in the type that the optimizer uses for it."""
    if isinstance(current, torch.Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(value, list) and (current is None or isinstance(current, tuple)) else value
