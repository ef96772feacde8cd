"""What ``soap-preprocess`` wrote, as data for training: samples by number, a rank's share of them, and batches in chronological order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from soap.errors import SoapError

Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Preprocessed(Dataset[Sample]):
    """Samples ``(numbers, categories, label)``: float32 (integer columns,), with log(1 + x) where the SPEC says so; int64 (category
    columns,), rows of their tables; float32, the label, or (labels,) if there are several. Files are mapped: nothing is read before it is
    asked for.

    Of ``ranks`` ranks, this one has samples ``rank``, ``rank + ranks``, …, as many as every other: the last few are left out if they do not
    divide evenly. With a DataLoader, a batch is read at once. SoapError if the folder is none that ``soap-preprocess`` has finished.
    """

    def __init__(self, folder: str | Path, *, rank: int = 0, ranks: int = 1) -> None:
        self.folder = Path(folder)
        if not 0 <= rank < ranks:
            raise SoapError(f"rank {rank} of {ranks}: expected a rank from 0 to {ranks - 1}")
        try:
            self._meta = json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))
            arrays = [np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in ("numbers", "categories", "labels")]
            columns = self._meta["spec"]["columns"]
            self.rows, own = int(self._meta["rows"]), self._meta["dictionaries"]
            self.table_rows = tuple(int(own[column["dictionary"]]["rows"]) for column in columns if column["kind"] in ("hex", "string"))
            self._log1p = torch.tensor([bool(column["log1p"]) for column in columns if column["kind"] == "integer"], dtype=torch.bool)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
            reason = " ".join(str(cause).split())
            raise SoapError(f"{str(folder)!r} is not what soap-preprocess wrote ({reason}); expected its -o, finished") from None
        if any(len(array) != self.rows for array in arrays):
            raise SoapError(f"{str(folder)!r}: arrays have {[len(array) for array in arrays]} rows; expected {self.rows}: preprocess again")
        self._numbers, self.categories, self._labels = arrays
        self._rank, self._ranks = rank, ranks

    def __len__(self) -> int:
        return self.rows // self._ranks

    def __getitem__(self, index: int) -> Sample:
        numbers, categories, labels = self.at(np.array([self._row(index)]))
        return numbers[0], categories[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Several samples at once, as DataLoader asks for them."""
        return list(zip(*self.at(np.array([self._row(index) for index in indices], np.int64)), strict=True))

    def batches(self, size: int) -> Iterator[Sample]:
        """Whole batches in chronological order, of all samples whatever the rank: (size, columns) each. A smaller last one is left out."""
        for begin in range(0, self.rows - size + 1, size):
            yield self.at(slice(begin, begin + size))

    def _row(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return (index % len(self)) * self._ranks + self._rank

    def at(self, rows: slice | NDArray[np.int64]) -> Sample:
        """The samples in these rows of the files, whatever the rank: (rows, columns) each."""
        numbers = torch.from_numpy(self._numbers[rows].astype(np.float32))
        numbers = torch.where(self._log1p, torch.log1p(numbers), numbers)
        labels = torch.from_numpy(self._labels[rows].astype(np.float32))
        return numbers, torch.from_numpy(self.categories[rows].astype(np.int64)), labels[:, 0] if labels.shape[1] == 1 else labels
