"""Torch trains by our CSV files: gradients are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from soap.schedules import csv_file
from soap.schedules.named import parse
from tests.extent import rows_often
from tests.runtime.pool import Pool
from tests.schedules.torch_ranks import batch, gradients_of, layers, loss, trained_by

CASES = [
    ("accumulation", 2, 3), ("accumulation:2:v", 2, 3), ("gpipe", 3, 4), ("gpipe:2", 2, 3), ("gpipe:2:v", 3, 2), ("1f1b", 4, 6),
    ("1f1b", 4, 2), ("interleaved:2", 2, 5), ("interleaved:3", 3, 7), ("zb-h1", 2, 5), ("zb-h1", 4, 6), ("zb-h1", 4, 2),
    ("zb-1p", 3, 5), ("zb-2p", 4, 9), ("zb-v", 3, 4), ("v-half", 2, 5), ("v-min", 4, 5), ("dualpipe-v", 2, 3),
]  # fmt: skip
"""Fewer micro-batches than stages, and rounds of unequal sizes, which torch's own schedules refuse, included."""
OFTEN = {("accumulation", 2, 3), ("gpipe:2:v", 3, 2), ("1f1b", 4, 2), ("interleaved:3", 3, 7), ("zb-h1", 4, 6), ("v-min", 4, 5)}


@pytest.mark.parametrize(("name", "stages", "microbatches"), rows_often(CASES, OFTEN))
def test_torch_trains_by_our_files(four: Pool, name: str, stages: int, microbatches: int, tmp_path: Path) -> None:
    table = parse(name).table(stages, microbatches)
    path = tmp_path / "schedule.csv"
    csv_file.dump(path, table)
    modules = layers(table.chunk_count)
    inputs, target = batch(microbatches)
    loss(torch.nn.Sequential(*modules)(inputs), target).backward()
    ranks = four.run(trained_by, str(path), table.placement, microbatches, ranks=stages)
    found = {chunk: gradients for rank in ranks for chunk, gradients in rank.items()}
    for chunk, expected in enumerate(gradients_of(modules)):
        assert len(expected) == len(found[chunk]) == 2
        for one, other in zip(expected, found[chunk], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)
