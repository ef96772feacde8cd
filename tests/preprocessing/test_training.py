"""Preprocessed data as a dataset, and the way from made-up data to training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import soap
from soap import api
from soap.api.preprocessed import count_touched, measure_rows_of
from soap.cli.inputs import sized
from soap.cli.preprocess import main
from soap.data import Preprocessed
from soap.errors import ModelError, SoapError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("preprocessed")
    assert main(["--generate", "criteo-like", "--rows", "203", "--categories", "20", "-o", str(root / "raw"), "--quiet"]) == 0
    argv = ["criteo-kaggle", str(root / "raw"), "-o", str(root / "out"), "--no-parquet", "--mode", "index=serial,convert=serial"]
    assert main(argv) == 0
    return root / "out"


def test_ranks_share_all_samples(data: Path) -> None:
    whole = Preprocessed(data)
    assert len(whole) == 203
    ranks = [Preprocessed(data, rank=rank, ranks=4) for rank in range(4)]
    assert [len(rank) for rank in ranks] == [50] * 4
    for i in range(200):
        for mine, expected in zip(ranks[i % 4][i // 4], whole[i], strict=True):
            assert torch.equal(mine, expected)
    with pytest.raises(IndexError):
        ranks[0][50]
    with pytest.raises(SoapError, match="rank 4 of 4: expected a rank from 0 to 3"):
        Preprocessed(data, rank=4, ranks=4)


def test_loader_and_batches_give_the_arrays(data: Path) -> None:
    numbers, categories = np.load(data / "numbers.npy"), np.load(data / "categories.npy")
    loaded, whole = list(DataLoader(Preprocessed(data), batch_size=50)), list(Preprocessed(data).batches(50))
    assert len(whole) == 4
    for i, batch in enumerate(whole):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(loaded[i], batch, strict=True))
        assert torch.equal(batch[0], torch.log1p(torch.from_numpy(numbers[50 * i : 50 * i + 50].astype(np.float32))))
        assert torch.equal(batch[1], torch.from_numpy(categories[50 * i : 50 * i + 50].astype(np.int64)))
        assert batch[2].shape == (50,)


def test_unfinished_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SoapError, match="is not what soap-preprocess wrote"):
        Preprocessed(tmp_path)


@pytest.mark.parametrize("batch", [1, 3, 8, 10, 32])
def test_rows_are_counted_as_on_batches(batch: int) -> None:
    values = np.random.default_rng(batch).integers(0, 12, 8 * batch + batch // 2)
    whole = [values[i * batch : (i + 1) * batch] for i in range(8)]
    found = count_touched(values, batch, 3)
    for level, count in enumerate(found):
        piece = (np.arange(batch) * 2**20 // batch) >> (20 - level)
        different = sum(len(np.unique(own[piece == k])) for own in whole for k in range(2**level))
        assert count == -(-different // (8 << level))


@pytest.mark.slow
def test_alpha_is_that_of_all_batches(data: Path) -> None:
    model = soap.load(sized("zoo:dlrm:tiny@8", str(data)), plan_only=True)
    graph = measure_rows_of(model, data)
    assert graph.sparse == soap.measure_rows(model, Preprocessed(data).batches(8)).sparse
    assert all(access.source == "measured" for access in graph.sparse.values())
    assert [access.rows for access in graph.sparse.values()] == list(Preprocessed(data).table_rows)
    small = soap.load("zoo:dlrm:tiny:tables=" + "-".join(["2"] * 26) + "@8", plan_only=True)
    with pytest.raises(ModelError, match="looks up row"):
        measure_rows_of(small, data)
    with pytest.raises(ModelError, match="expected the same columns"):
        measure_rows_of(soap.load("zoo:dlrm:tiny", plan_only=True), data)


@pytest.mark.long
def test_four_commands_from_made_up_data_to_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from soap.cli.run import main as run
    from soap.cli.search import main as search

    raw, out, strategy = str(tmp_path / "raw"), str(tmp_path / "data"), str(tmp_path / "strategy.json")
    assert main(["--generate", "criteo-like", "--rows", "600", "--categories", "30", "-o", raw]) == 0
    assert main(["criteo-kaggle", raw, "-o", out, "--no-parquet"]) == 0
    common = ["--cluster", "local:2"]
    options = ["--profile", "0", "--verify", "0", "--budget", "50"]
    assert search(["zoo:dlrm:tiny@32", "--alpha-from", out, *common, *options, "-o", strategy]) == 0
    capsys.readouterr()
    assert (
        run([strategy, "--model", "zoo:dlrm:tiny@32", "--data", f"preprocessed:{out}", *common, "--steps", "3", "--check", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["check"]["passed"]
    sparse = api.load_strategy_contents(strategy).record["sparse"]
    assert {own["source"] for own in sparse.values()} == {"measured"}
