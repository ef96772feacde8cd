"""What workers without state get of ``--data``: the parts of the batches that ranks get whole."""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import soap
from soap.cli.batches import Chronological, DrawnBatches, PartsOfSteps, lease_data
from soap.cli.command import UsageError
from soap.model.batch import sample_dims

MODEL = "zoo:full_sparse:tiny"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Nine samples as ``soap-preprocess`` writes them."""
    columns = [{"kind": "integer", "log1p": False}, {"kind": "hex", "dictionary": "own"}]
    meta = {"rows": 9, "spec": {"columns": columns}, "dictionaries": {"own": {"rows": 4}}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    for name, width in (("numbers", 1), ("categories", 1), ("labels", 1)):
        np.save(tmp_path / f"{name}.npy", np.arange(9).reshape(9, width))
    return tmp_path


def test_parts_of_a_step_are_its_batch() -> None:
    model = soap.load(MODEL)
    assert sample_dims(model.graph) == dict.fromkeys(model.input_names, 0)
    data, batch = lease_data(MODEL, {}, soap.load(MODEL, plan_only=True), None, workers=4, batch=2, seed=3, dtype="float64")
    data = pickle.loads(pickle.dumps(data))
    assert batch == 1 and isinstance(data, PartsOfSteps)
    for step in (0, 5):
        parts = [data.batch([4 * step + part]) for part in range(4)]
        for number, whole in enumerate(DrawnBatches(model, 3)(step)):
            found = torch.cat([part[number] for part in parts])
            assert torch.equal(found, whole.double() if whole.is_floating_point() else whole)
            assert [len(part[number]) for part in parts] == [2] * 4


def test_whole_inputs_stay_whole_and_others_must_divide() -> None:
    data = PartsOfSteps(partial(lambda: lambda step: [torch.arange(6), torch.tensor(step)]), 2, (0, None))
    assert [one.tolist() for one in data.batch([7])] == [[3, 4, 5], 3]
    with pytest.raises(UsageError, match=r"a batch of shape \[6\] for 4 workers; expected samples in dimension 0 to divide"):
        PartsOfSteps(data.make, 4, (0, None)).batch([0])
    with pytest.raises(UsageError, match=r"a batch has 2 tensors; expected 3, the model's inputs"):
        PartsOfSteps(data.make, 2, (0, None, None)).batch([0])


def test_preprocessed_samples_come_in_their_order_and_must_be_enough(folder: Path) -> None:
    planned = soap.load(MODEL, plan_only=True)
    data, batch = lease_data(MODEL, {}, planned, f"preprocessed:{folder}", workers=2, batch=2, seed=0, dtype=None)
    assert isinstance(data, Chronological) and (len(data), batch) == (8, 2)
    assert [one.flatten().tolist() for one in pickle.loads(pickle.dumps(data)).batch([2, 3])] == [[2.0, 3.0], [2, 3], [2.0, 3.0]]
    with pytest.raises(UsageError, match=r"9 samples; expected at least 12, a step of 3 workers with 4 each$"):
        lease_data(MODEL, {}, planned, f"preprocessed:{folder}", workers=3, batch=4, seed=0, dtype=None)
