"""Architectures of ``transformers``, exported in another process, read and trained where the library is not: right, or refused in one line.

Each is exported by ``torch.export.save`` and by ``soap.export``. Loss and every gradient of both programs are eager PyTorch's, which the
exporting process computes; data parallelism and a random strategy on four ranks train like one process. All of them take a quarter of an
hour: a few are tried in every run. ``SOAP_MODELS_TABLE=docs/models.md`` writes the table.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from soap.cluster.presets import local_topology
from soap.runtime.check import TOLERANCES
from soap.strategy.classical import CLASSICAL, random_strategy
from soap.tracing.load import DTYPES
from tests.runtime.exporting import EXPECTED, WAYS, Exporter, compared
from tests.runtime.pool import Pool
from tests.runtime.traced import checked, traced
from tests.transformers_models import ARCHITECTURES

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

FOUR = local_topology(4)
QUICK = ("mixtral",)
"""Attention, and experts that are chosen by sample; ``test_transformers_plans`` has three without experts."""
MAY_BE_REFUSED = {
    "longformer": "control flow depends on data: which tokens see all others",
    "led": "the same",
    "autoformer": "sizes depend on data: which shifts of the series are compared",
    "wav2vec2_ctc": "the labels' values are looked at",
    "time_series_transformer": "by torch.export alone: the distribution's parameters are looked at",
    "detr": "whether activations are finite is looked at",
}
"""Those that torch.export refuses. They may be right as well, but never wrong."""
CLOSE = 1e-9
"""Of loss and gradients, both in float64, relative to the largest of a parameter's, or to a thousandth of the largest of all."""


@pytest.fixture(scope="module")
def exporter() -> Iterator[Exporter]:
    process = Exporter()
    yield process
    process.close()


@pytest.fixture(scope="module")
def reader() -> Iterator[Pool]:
    """One process that never imports the library."""
    pool = Pool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def files(exporter: Exporter, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, str]]]:
    """From an architecture to the folder of its files, and why there are none, by way of exporting: see ``Exporter.export``."""

    @functools.cache
    def files(name: str) -> tuple[Path, dict[str, str]]:
        folder = tmp_path_factory.mktemp(name)
        return folder, exporter.export(name, folder)

    return files


Files = Callable[[str], tuple[Path, dict[str, str]]]
EACH = pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) for n in ARCHITECTURES])


@pytest.mark.long
@EACH
def test_program_is_eagers(files: Files, reader: Pool, name: str, record_property: Callable[[str, object], None]) -> None:
    row: dict[str, Any] = {"name": name, **dict.fromkeys(WAYS, "failed")}
    record_property("architecture", row)
    folder, refused = files(name)
    reasons = [reason for reason in refused.values() if reason]
    assert all("\n" not in reason and name in MAY_BE_REFUSED for reason in reasons), refused
    own = refused[WAYS[1]]  # soap.export takes validation as passed, at which torch.export alone stops
    if own:
        assert len(reasons) == len(WAYS), refused
        row.update(dict.fromkeys(WAYS, ""), refused=own)
        return
    for way in WAYS:
        if refused[way]:
            row[way] = ""
            continue
        found = reader.run(compared, str(folder / f"{way}.pt2"), str(folder / EXPECTED))[0]
        row[way], row["operators"], row["whole"] = found.error, found.operators, found.whole
        if not found.error <= CLOSE:
            row[way] = "failed"
        assert found.error <= CLOSE, f"{way}: {found.place} is off by {found.error:.1e}"
    if name in QUICK:
        _wrong_numbers_are_seen(reader, str(folder / f"{way}.pt2"), folder / EXPECTED)


PLANS = ("data_parallel", "random")


@EACH
def test_plans_train_like_one_process(files: Files, four: Pool, name: str, record_property: Callable[[str, object], None]) -> None:
    folder, refused = files(name)
    if refused[WAYS[1]]:
        pytest.skip(f"refused: {refused[WAYS[1]]}")
    row: dict[str, Any] = {"name": name, **dict.fromkeys(PLANS, "failed")}
    record_property("architecture", row)
    path = str(folder / f"{WAYS[1]}.pt2")
    graph = traced(path, "float64").graph
    for plan in PLANS:
        strategy = CLASSICAL[plan](graph, FOUR) if plan in CLASSICAL else random_strategy(graph, FOUR, random.Random(name))
        results = four.run(checked, path, "float64", strategy, FOUR)
        assert results[0].tolerance == TOLERANCES[DTYPES["float64"]]
        assert results[0].passed, f"{plan}: {results[0].worst}"
        assert all(result == results[0] for result in results)
        row[plan] = results[0].worst.error


def _wrong_numbers_are_seen(reader: Pool, path: str, expected: Path) -> None:
    """A millionth more of one element of one gradient."""
    right = torch.load(expected, weights_only=True)
    name = max(right["gradients"], key=lambda n: float(right["gradients"][n].abs().max()))
    gradient = right["gradients"][name]
    gradient.view(-1)[int(gradient.abs().argmax())] *= 1 + 1e-6
    torch.save(right, expected.with_suffix(".wrong"))
    found = reader.run(compared, path, str(expected.with_suffix(".wrong")))[0]
    assert found.place == name and found.error == pytest.approx(1e-6, rel=1e-2)
