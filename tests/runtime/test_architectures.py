"""Architectures of ``transformers``, exported in another process, read and trained where the library is not: right, or refused in one line.

Each is exported by ``torch.export.save`` and by ``soap.export``. Loss and every gradient of both programs are eager PyTorch's, which the
exporting process computes; data parallelism and a random strategy on four ranks train like one process. All of them take a quarter of an
hour: a few are tried in every run. ``SOAP_MODELS_TABLE=docs/models.md`` writes the table.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from soap.presets import local_topology
from soap.runtime.check import TOLERANCES
from soap.strategies import CLASSICAL, random_strategy
from soap.tracing.load import DTYPES
from tests.runtime.exporting import EXPECTED, WAYS, Exporter, compared
from tests.runtime.pool import Pool
from tests.runtime.traced import checked, traced
from tests.transformers_models import ARCHITECTURES

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

FOUR = local_topology(4)
QUICK = ("mixtral", "deepseek_v3", "segformer", "clip")
MAY_BE_REFUSED = {
    "longformer": "control flow depends on data: which tokens see all others",
    "led": "the same",
    "autoformer": "sizes depend on data: which shifts of the series are compared",
    "wav2vec2_ctc": "the labels' values are looked at",
    "time_series_transformer": "the distribution's parameters are looked at",
    "detr": "whether activations are finite is looked at",
    "fnet": "complex tensors",
}
"""Those that torch.export or an importer without rules for complex numbers refuses. They may be right as well, but never wrong."""
CLOSE = 1e-9
"""Of loss and gradients, both in float64, relative to the largest of a parameter's, or to a thousandth of the largest of all."""


@pytest.fixture(scope="module")
def exporter() -> Iterator[Exporter]:
    process = Exporter()
    yield process
    process.close()


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in QUICK else pytest.mark.long) for n in ARCHITECTURES])
def test_architecture(
    exporter: Exporter, four: Pool, tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    row: dict[str, Any] = {"name": name}
    record_property("architecture", row)
    refused = exporter.export(name, tmp_path)
    row["refused"] = next(filter(None, reversed(refused.values())), "")
    for way, reason in refused.items():
        assert "\n" not in reason and (not reason or name in MAY_BE_REFUSED), f"{way}: {reason}"
    assert len(set(map(bool, refused.values()))) == 1, refused
    if row["refused"]:
        return
    for way in WAYS:
        path = str(tmp_path / f"{way}.pt2")
        error, place = max(four.run(compared, path, str(tmp_path / EXPECTED)))
        row[way] = error
        assert error <= CLOSE, f"{way}: {place} is off by {error:.1e}"
    if name in QUICK:
        _wrong_numbers_are_seen(four, path, tmp_path / EXPECTED)
    graph = traced(path, "float64").graph
    row["operators"], row["whole"] = len(graph.operators), sum(not op.partitionable for op in graph.operators)
    strategies = {"data_parallel": CLASSICAL["data_parallel"](graph, FOUR), "random": random_strategy(graph, FOUR, random.Random(name))}
    for plan, strategy in strategies.items():
        results = four.run(checked, path, "float64", strategy, FOUR)
        row[plan] = results[0].worst.error
        assert results[0].tolerance == TOLERANCES[DTYPES["float64"]]
        assert results[0].passed, f"{plan}: {results[0].worst}"
        assert all(result == results[0] for result in results)


def _wrong_numbers_are_seen(four: Pool, path: str, expected: Path) -> None:
    """A millionth more of one element of one gradient."""
    right = torch.load(expected, weights_only=True)
    name = max(right["gradients"], key=lambda n: float(right["gradients"][n].abs().max()))
    gradient = right["gradients"][name]
    gradient.view(-1)[int(gradient.abs().argmax())] *= 1 + 1e-6
    torch.save(right, expected.with_suffix(".wrong"))
    error, place = max(four.run(compared, path, str(expected.with_suffix(".wrong"))))
    assert place == name and error == pytest.approx(1e-6, rel=1e-2)
