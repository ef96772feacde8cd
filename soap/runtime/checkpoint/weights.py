"""Writing a trainer's parameters and buffers as safetensors, for other programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from soap.errors import RuntimeFailure, SoapError
from soap.runtime.comm.whole import whole_buffers, whole_parameters
from soap.weights.places import check_place_of_weights
from soap.weights.seam import Kind
from soap.weights.writing import require_writable, write_weights

if TYPE_CHECKING:
    from soap.runtime.trainer import Trainer


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
        for _, whole in parameters:
            assert whole is not None
            yield whole
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
