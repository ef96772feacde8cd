"""Checkpoints that something has happened to are refused in one line, and nothing in them is run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from soap.errors import CheckpointError
from tests.runtime.checkpointing import alone_plan, save_three_steps, trainer_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_three_steps(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """One that may be damaged."""
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 400] = bytes(400)
    path.write_bytes(bytes(data))


def _edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        document = json.loads((checkpoint / "soap.json").read_text())
        change(document)
        (checkpoint / "soap.json").write_text(json.dumps(document))

    return edit


def _chunk(document: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["tensors"]["model.fc0.weight"]["chunks"][0]
    return found


DATA = "__0_0.distcp"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda c: (c / DATA).unlink(), "__0_0.distcp' is damaged: it is missing; take another checkpoint"),
    "truncated": (lambda c: os.truncate(c / DATA, 5000), "is damaged: it has 5000 bytes, expected "),
    "overwritten": (lambda c: _flip(c / DATA), "__0_0.distcp' is damaged: its part at byte "),
    "no json": (lambda c: os.truncate(c / "soap.json", 700), "soap.json' is damaged: it is no valid JSON"),
    "no checkpoint": (lambda c: (c / "soap.json").write_text("{}"), "is damaged: expected 'soap-checkpoint' as its format"),
    "version": (_edit(lambda d: d.update(version=2)), "has version '2'; this program reads version 1"),
    "extra": (_edit(lambda d: d.update(more=1)), "is damaged: at top level: "),
    "lost state": (_edit(lambda d: d["tensors"].pop("optim.state.fc0.weight.exp_avg")), "it lacks state 'exp_avg' of 'fc0.weight'"),
    "lost parameter": (_edit(lambda d: d["tensors"].pop("model.fc0.bias")), "it lacks "),
    "outside": (_edit(lambda d: _chunk(d).update(box=[[0, 99], [0, 1]])), "lies outside its shape"),
    "hole": (_edit(lambda d: _chunk(d).update(box=[[0, 1], [0, 1]])), "do not cover its shape"),
    "elsewhere": (_edit(lambda d: _chunk(d).update(file="../../x")), "is damaged: at tensors/model.fc0.weight/chunks/0/file: "),
    "type": (_edit(lambda d: d["tensors"]["model.fc0.bias"].update(dtype="load")), "has the unknown dtype 'load'"),
    "other type": (_edit(lambda d: d["tensors"]["model.fc0.bias"].update(dtype="int64")), "is no int64 tensor of shape "),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_one_line(what: str, copy: Path) -> None:
    damage, words = DAMAGES[what]
    damage(copy)
    with trainer_of(alone_plan()) as trainer:
        before = trainer.state_dict()
        with pytest.raises(CheckpointError) as caught:
            trainer.load(copy)
        assert words in str(caught.value) and "\n" not in str(caught.value)
        if what not in ("overwritten", "other type"):  # found before anything is changed
            assert all(torch.equal(trainer.state_dict()[name], tensor) for name, tensor in before.items())
            assert trainer.steps == 0


class _Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_no_pickle_is_run(copy: Path, tmp_path: Path) -> None:
    (copy / ".metadata").write_bytes(pickle.dumps(_Evil(tmp_path / "run")))
    with trainer_of(alone_plan()) as trainer:
        trainer.load(copy)  # torch's own index is not read
        torch.save(_Evil(tmp_path / "run"), tmp_path / "evil.pt")
        data = (tmp_path / "evil.pt").read_bytes()
        (copy / DATA).write_bytes(data)
        place = {"offset": 0, "length": len(data)}
        _edit(lambda d: [chunk.update(place) for tensor in d["tensors"].values() for chunk in tensor["chunks"]])(copy)
        with pytest.raises(CheckpointError, match=r"is damaged: its part at byte 0 cannot be read \(UnpicklingError\)"):
            trainer.load(copy)
    assert not (tmp_path / "run").exists()
