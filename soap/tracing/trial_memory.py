"""Which memory comes and goes while an operator is tried, and which of it autograd keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from soap.tracing.products import is_product


class TrialMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the memory that calls allocate. ``most_bytes``: the most that was there at once, without what is left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes = 0
        self._products: list[tuple[StorageWeakRef, int, int]] = []
        self._needed = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._kept: dict[int, tuple[StorageWeakRef, int]] = {}
        self._left_out: dict[int, torch.UntypedStorage] = {}
        self._noted: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [item.untyped_storage() for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        self._products += [(_reference(storage), storage._cdata, storage.nbytes()) for storage in made if is_product(func)]
        if made:
            self._live = {key: entry for key, entry in self._live.items() if _is_there(entry[0])}
            self._live.update((storage._cdata, (_reference(storage), storage.nbytes())) for storage in made)
            self.most_bytes = max(self.most_bytes, sum(size for key, (_, size) in self._live.items() if key not in self._left_out))
        return result

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that autograd keeps this tensor."""
        storage, self._needed = tensor.untyped_storage(), len(self._products)
        self._kept[storage._cdata] = (_reference(storage), storage.nbytes())
        return tensor

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> int:
        """Leave these tensors out: they are counted elsewhere. If they keep something larger alive of which they are parts, the rest
        counts, in so many bytes."""
        room: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._left_out:
                self._left_out[storage._cdata] = storage
                room[storage._cdata] = storage.nbytes()
            if storage._cdata in room:
                room[storage._cdata] -= bytes_of(tensor)
        return sum(max(0, rest) for rest in room.values())

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Know these tensors' memory, without keeping it."""
        self._noted.update((storage._cdata, _reference(storage)) for storage in (tensor.untyped_storage() for tensor in tensors))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is that of one that was noted or left out, or that autograd has kept."""
        return any(tensor.untyped_storage()._cdata in own for own in (self._noted, self._left_out, self._kept))

    def kept_bytes(self) -> int:
        """Bytes that autograd keeps, without what is left out."""
        return sum(size for key, (storage, size) in self._kept.items() if key not in self._left_out and _is_there(storage))

    def product_bytes(self) -> int:
        """Bytes that products have made which a second run needs (``products.Products``), without what is left out."""
        made = self._products[: self._needed]
        return sum(size for storage, key, size in made if key not in self._left_out or not _is_there(storage))

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether autograd keeps the memory of a tensor."""
        return tensor.untyped_storage()._cdata in self._kept


def _reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_there(reference: StorageWeakRef) -> bool:
    return not reference.expired()  # type: ignore[no-untyped-call]


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements, wherever they lie."""
    return tensor.numel() * tensor.itemsize
