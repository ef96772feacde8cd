"""Writing and reading regions of named tensors, through the planners and storage layers of torch.distributed.checkpoint.

Files and index are those of that library's own writer, so its tools can read them. We read by our manifest, and each chunk with torch's
weights-only unpickler. A chunk has at most ``CHUNK_BYTES``, because a rank that needs a part of a chunk reads all of it.

A trainer's parameters and buffers in full, gathered on rank 0, and written as safetensors for other programs.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future

from soap.errors import CheckpointError, ModelError, RuntimeFailure, SoapError
from soap.files import check_archive, write_text_atomically
from soap.model.regions import Box, intersect, lengths, relative, volume, whole
from soap.runtime.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    Manifest,
    StoredTensor,
    damaged,
    model_name,
    read_manifest,
    resolve,
    state_name,
    unwritable,
)
from soap.runtime.comm import signs
from soap.runtime.sync.shards import gather_regions
from soap.weights.fitting import Kind
from soap.weights.safetensors_files import check_place_of_weights, require_writable, write_weights

if TYPE_CHECKING:
    from soap.runtime.trainer import Trainer


CHUNK_BYTES = 32 * 2**20


class Region(NamedTuple):
    """A region ``box`` of the tensor ``name`` of this whole ``shape``. ``tensor``: holds its values, or receives them."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor


def halved(box: Box, itemsize: int, limit_bytes: int = CHUNK_BYTES) -> list[Box]:
    """Cut a box into pieces of at most ``limit_bytes``, along its first dimensions, so that each piece is contiguous in memory."""
    dim = next((d for d, (start, stop) in enumerate(box) if stop - start > 1), None)
    if dim is None or volume(box) * itemsize <= limit_bytes:
        return [box]
    start, stop = box[dim]
    middle = (start + stop) // 2
    halves = [(*box[:dim], part, *box[dim + 1 :]) for part in ((start, middle), (middle, stop))]
    return [piece for half in halves for piece in halved(half, itemsize, limit_bytes)]


def _offsets(box: Box) -> torch.Size:
    return torch.Size([start for start, _ in box])


class RegionSavePlanner(DefaultSavePlanner):
    """Plans the writing of this rank's regions."""

    def __init__(self, regions: Sequence[Region], manifest: Manifest) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._regions = regions
        self._manifest = manifest
        self._data: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        """Nothing to do: the regions come from the constructor, and the state dict is empty."""
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One item per chunk."""
        items = []
        for region in self._regions:
            for box in halved(region.box, region.tensor.element_size()):
                index = MetadataIndex(region.name, _offsets(box))
                self._data[index] = region.tensor.detach()[relative(box, region.box)]
                chunk = ChunkStorageMetadata(_offsets(box), torch.Size(lengths(box)))
                data = TensorWriteData(chunk, TensorProperties(region.tensor.dtype), torch.Size(region.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Torch's global plan, which checks that chunks are disjoint and cover their tensors, plus the nested keys that its tools use."""
        plans, metadata = super().create_global_plan(all_plans)
        paths: dict[str, tuple[str, ...]] = {name: ("model", name.removeprefix("model.")) for name in metadata.state_dict_metadata}
        paths.update({model_name(alias): ("model", alias) for alias in self._manifest.aliases})
        for name, state in self._manifest.states.items():
            paths.update({state_name(name, key): ("optim", "state", name, key) for key in (*state.regions, *state.scalars)})
        return plans, replace(metadata, planner_data=paths)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The chunk's tensor."""
        return self._data[write_item.index]


class CheckpointWriter(FileSystemWriter):
    """Torch's writer, which also writes our manifest (on rank 0), and lists tied parameters under all their names."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._folder = folder
        self._manifest = manifest

    def storage_meta(self) -> StorageMeta:
        """Leave out the path: it is temporary."""
        return StorageMeta(save_id=self._manifest.save_id)

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write as torch does, but turn a failure of the system into our one-line error; called on all ranks at once."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise error if cause is None else unwritable(self._folder.parent, cause) from None
        finally:
            signs.meet()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write manifest and index after all ranks have written their chunks."""
        places = {result.index: result.storage_data for result in (result for own in results for result in own)}
        tensors = {name: _stored(name, entry, places) for name, entry in metadata.state_dict_metadata.items()}
        write_text_atomically(self._folder / MANIFEST, replace(self._manifest, tensors=tensors).text(), error=CheckpointError)
        again = []
        for alias, name in self._manifest.aliases.items():
            entry = metadata.state_dict_metadata[model_name(name)]
            assert isinstance(entry, TensorStorageMetadata)
            metadata.state_dict_metadata[model_name(alias)] = entry
            for chunk in entry.chunks:
                place = places[MetadataIndex(model_name(name), chunk.offsets)]
                again.append(WriteResult(MetadataIndex(model_name(alias), chunk.offsets), 0, place))
        super().finish(metadata, [*results, again])


def _stored(name: str, entry: Any, places: Mapping[MetadataIndex, Any]) -> StoredTensor:
    chunks = []
    for chunk in entry.chunks:
        box = tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        place = places[MetadataIndex(name, chunk.offsets)]
        chunks.append(Chunk(box, place.relative_path, place.offset, place.length))
    return StoredTensor(str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size), tuple(chunks))


class CheckpointReader(StorageReader):
    """Reads chunks where the manifest says they are. ``together``: all ranks read at once, and wait for the slowest."""

    def __init__(self, folder: Path, manifest: Manifest, *, together: bool = False) -> None:
        self._folder, self._together = folder, together
        self._chunks: dict[MetadataIndex, tuple[Chunk, str]] = {}
        for name, tensor in manifest.tensors.items():
            for chunk in tensor.chunks:
                self._chunks[MetadataIndex(name, _offsets(chunk.box))] = (chunk, tensor.dtype)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to forget."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return nothing: our planner reads by the manifest, as torch's index is a pickle."""
        return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read each chunk once, and copy its parts to all regions that need them."""
        try:
            self._read_all(plan, planner)
        finally:
            if self._together:
                signs.meet()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_all(self, plan: LoadPlan, planner: Any) -> None:
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        for index in sorted(wanted, key=lambda i: (self._chunks[i][0].file, self._chunks[i][0].offset)):
            tensor = self._read(*self._chunks[index])
            for item in wanted[index]:
                planner.resolve_tensor(item).copy_(tensor[_slices(item.storage_offsets, item.lengths)])

    def _read(self, chunk: Chunk, dtype: str) -> torch.Tensor:
        path = self._folder / chunk.file
        try:
            with path.open("rb") as stream:
                stream.seek(chunk.offset)
                data = stream.read(chunk.length)
            check_archive(data)
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise damaged(path, f"its part at byte {chunk.offset} cannot be read ({type(error).__name__})") from None
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != lengths(chunk.box) or str(tensor.dtype) != f"torch.{dtype}":
            raise damaged(path, f"its part at byte {chunk.offset} is no {dtype} tensor of shape {lengths(chunk.box)}")
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """False: readers are made for one folder."""
        return False


class RegionLoadPlanner(DefaultLoadPlanner):
    """Plans the filling of regions from the chunks that overlap them."""

    def __init__(self, regions: Sequence[Region], manifest: Manifest) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._regions = regions
        self._manifest = manifest

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Nothing to do: the regions come from the constructor, and the state dict is empty."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """One item per region and chunk. The target's index is the region's position."""
        items = []
        for position, region in enumerate(self._regions):
            for chunk in self._manifest.tensors[region.name].chunks:
                common = intersect(region.box, chunk.box)
                if common is None:
                    continue
                item = ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(region.name, index=position),
                    dest_offsets=_offsets(tuple((a - o, b - o) for (a, b), (o, _) in zip(common, region.box, strict=True))),
                    storage_index=MetadataIndex(region.name, _offsets(chunk.box)),
                    storage_offsets=_offsets(tuple((a - o, b - o) for (a, b), (o, _) in zip(common, chunk.box, strict=True))),
                    lengths=torch.Size(lengths(common)),
                )
                items.append(item)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of the region's tensor that receives the data."""
        position = read_item.dest_index.index
        assert position is not None
        return self._regions[position].tensor.detach()[_slices(read_item.dest_offsets, read_item.lengths)]


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


class CheckpointWeights:
    """See ``Weights``: those of a checkpoint, or of the latest in a folder. ModelError in one line if it is damaged."""

    is_mapped = False

    def __init__(self, path: str | Path) -> None:
        try:
            checkpoint = resolve(path)
            manifest = read_manifest(checkpoint)
        except CheckpointError as error:
            raise ModelError(f"weights {str(path)!r}: {error}") from None
        self.said = str(path)
        self._manifest, self._reader = manifest, CheckpointReader(checkpoint, manifest)
        prefix = model_name("")
        stored = {name.removeprefix(prefix): own for name, own in manifest.tensors.items() if name.startswith(prefix)}
        self.kinds: Mapping[str, Kind] = {name: Kind(own.shape, getattr(torch, own.dtype)) for name, own in stored.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """See ``Weights``; read from the disk each time."""
        shape, dtype = self.kinds[name]
        found = torch.empty(shape, dtype=dtype)
        planner = RegionLoadPlanner([Region(model_name(name), shape, whole(shape), found)], self._manifest)
        self._reader.read_data(planner.create_local_plan(), planner)
        return found


def save_weights(trainer: Trainer, folder: Path, names: Mapping[str, str]) -> Path:
    """See ``Trainer.save_weights``. A parameter of several names is written under one of them."""
    model = trainer.model
    kinds = {name: Kind(tuple(tensor.shape), trainer.dtype_of(name)) for name, tensor in model.parameters.items()}
    saved = [name for name in model.buffers if name not in model.transient]
    kinds |= {name: Kind(tuple(trainer.buffers[name].shape), trainer.buffers[name].dtype) for name in saved}
    places = {names.get(name, name): name for name in model.unchanged}  # of two names of one buffer, files may have one
    others = {name: model.unchanged[name] for name in places.values() if not model.unchanged[name].is_meta}
    kinds |= {name: Kind(tuple(tensor.shape), trainer.place(tensor).dtype) for name, tensor in others.items()}
    require_writable(kinds)
    buffers, parameters = whole_buffers(trainer), whole_parameters(trainer)

    def tensors() -> Iterator[torch.Tensor]:
        for _, value in parameters:
            assert value is not None
            yield value
        yield from (buffers[name] for name in saved)
        yield from map(trainer.place, others.values())

    failure = ""
    if trainer.rank == 0:
        try:
            check_place_of_weights(folder)
            write_weights(folder, {names.get(name, name): kind for name, kind in kinds.items()}, tensors())
        except SoapError as error:
            failure = str(error)
    for _ in parameters:  # others send theirs, whether they can be written or not
        pass
    if failure := next(filter(None, trainer.comm.gather_late(failure)), ""):
        raise RuntimeFailure(failure)
    return folder


def whole_parameters(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each parameter in full, one after the other, on rank 0 (None elsewhere); gone through on all ranks at once."""
    shards: dict[str, list[int]] = {}
    for number, shard in enumerate(trainer.plan.shards):
        shards.setdefault(shard.parameter, []).append(number)
    for name, tensor in trainer.model.parameters.items():
        full: dict[str, torch.Tensor] = {}
        if trainer.rank == 0 and tensor.is_meta:
            full[name] = torch.empty(tensor.shape, dtype=trainer.dtype_of(name), device=home_of(trainer, name))
        elif trainer.rank == 0:  # files of weights may have another type
            full[name] = trainer.own_copy(tensor.detach()).to(tensor.device, trainer.dtype_of(name))
        gather_regions(trainer.comm, trainer.plan, trainer.shards.tensors, shards.get(name, ()), full)
        yield name, full.get(name)


def whole_buffers(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Full buffers by name, on rank 0: each element from a rank whose tiles have changed it. State is the same on all ranks."""
    full: dict[str, torch.Tensor] = {}
    kept = set(trainer.model.state.values())
    for tag, (name, own) in enumerate(trainer.buffers.items()):
        if name in kept:
            full[name] = own.clone()
            continue
        if trainer.rank != 0:
            trainer.comm.send(own, 0, tag)
            continue
        merged, first = own.clone(), trainer.first_buffers[name]
        for source in range(1, trainer.world.size):
            other = trainer.comm.receive(torch.empty_like(own), source, tag).wait()
            merged = torch.where(merged == first, other, merged)
        full[name] = merged
    trainer.comm.finish_sends()
    return full


def home_of(trainer: Trainer, name: str) -> torch.device:
    """Where a parameter in full is put together: where the model has it."""
    own = trainer.model.parameters[name]
    return torch.device("cpu") if own.is_meta else own.device
