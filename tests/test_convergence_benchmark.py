"""The benchmark of training with compressed gradients: what is trained, what is kept, and what its page says of made-up trainings."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import convergence, convergence_cells, convergence_page, convergence_tasks
from benchmarks.convergence import trained
from benchmarks.convergence_cells import LARGER, METHODS, Cell, Key, wanted
from benchmarks.convergence_tasks import RANKS, TASKS, CharacterLstm, Data, DigitsNet
from soap.errors import SoapError
from soap.runtime.compression.dgc import WarmUp

KEY = Key("lstm", "dense", "none", 32, 500, 0)


def cell(method: str = "dense", seed: int = 0, loss: float = 1.0, **more: object) -> Cell:
    made = Cell("lstm", method, "none", 32, 500, seed, (3.0, 2.0, 1.0), loss, loss / 10, 0.5, None, None, 60.0)
    return replace(made, **more)  # type: ignore[arg-type]


DENSE = [cell(seed=seed, loss=loss) for seed, loss in enumerate((1.0, 1.1, 1.2))]


def text_like(samples: int = 300) -> Data:
    """Each character follows from the one before."""
    steps = torch.arange(convergence_tasks.LENGTH + 1)
    text = (torch.arange(samples)[:, None] + steps) % 7
    return Data((text,), (text[:40],))


@pytest.mark.parametrize("method", ["rgc:0.05", "rgc+asq:0.05", "powersgd"])
def test_a_training_counts_what_ranks_send(method: str) -> None:
    """The union of what ranks send is at most p D, and at least D."""
    dense, found = trained(KEY._replace(steps=4, batch=8), text_like()), trained(KEY._replace(method=method, steps=4, batch=8), text_like())
    assert found.losses[0] == dense.losses[0] and found.losses[-1] != dense.losses[-1]
    assert dense.bytes_share == 1 and 0 < found.bytes_share < 1
    assert dense.density is None is dense.union
    if method == "powersgd":
        assert found.density is None is found.union
    else:
        assert found.density is not None and found.union is not None
        assert 0.02 <= found.density <= 0.1 and found.density < found.union <= RANKS * found.density


@pytest.mark.long
def test_trainings_of_one_seed_are_equal_and_learn() -> None:
    key = KEY._replace(method="rgc:0.05", warm_up="density", steps=30, batch=16)
    one, other = trained(key, text_like()), trained(key, text_like())
    assert replace(one, seconds=0.0) == replace(other, seconds=0.0)
    assert one.losses[-1] < 0.8 * one.losses[0] and one.loss < 4 and 0 <= one.error < 1
    assert trained(key._replace(seed=1), text_like()).losses != one.losses


def test_warm_ups_take_a_tenth_of_the_steps() -> None:
    assert convergence.warm_up_of(KEY._replace(warm_up="dense")) == WarmUp(50)
    assert convergence.warm_up_of(KEY._replace(warm_up="density")) == WarmUp(0, 10)
    assert convergence.warm_up_of(KEY) == WarmUp()


def test_what_is_trained() -> None:
    keys = list(wanted(list(TASKS), METHODS, 3))
    assert len(keys) == len(set(keys))
    assert {key.warm_up for key in wanted(["lstm"], ["dense", "rgc"], 1, 7, ["methods"])} == {"none"}
    batches = {key.batch for key in keys if key.task == "digits"}
    assert batches == {16, LARGER * 16}
    assert {key.warm_up for key in keys if key.method == "rgc"} == {"none", "dense", "density"}
    assert {key.seed for key in keys} == {0, 1, 2}
    assert sum(tensor.numel() for tensor in DigitsNet().parameters()) == 38_282  # as the page says
    assert sum(tensor.numel() for tensor in CharacterLstm().parameters()) == 157_025


def test_the_library_s_text_is_characters() -> None:
    data = convergence_tasks.library_text()
    (train,), (test,) = data.train, data.test
    assert train.shape[1] == convergence_tasks.LENGTH + 1 and len(test) == convergence_tasks.HELD_OUT
    assert int(train.min()) >= 0 and int(train.max()) < convergence_tasks.CHARACTERS


def test_digits_are_images() -> None:
    pytest.importorskip("sklearn")
    data = convergence_tasks.digits()
    assert data.train[0].shape[1:] == (1, 8, 8) and len(data.train[0]) + len(data.test[0]) == 1797
    assert float(data.train[0].min()) >= 0 and float(data.train[0].max()) == 1


@pytest.mark.parametrize(
    ("losses", "said"),
    [((1.0, 1.2, 1.4), "yes"), ((1.31, 1.31, 1.31), "no"), ((0.8, 0.85, 0.9), "no, lower"), ((0.9, 0.9, 0.9), "yes")],
)
def test_within_is_the_spread_of_dense(losses: tuple[float, ...], said: str) -> None:
    assert convergence_page.verdict(losses, [own.loss for own in DENSE]) == said


def test_steps_to_dense_s_loss() -> None:
    falling = tuple(float(own) for own in range(100, 0, -1))
    assert convergence_page.first_step(falling, 88.0) == 25  # the mean of 100 to 76
    assert convergence_page.first_step(falling, 87.0) == 26
    assert convergence_page.first_step(falling, 0.5) is None
    assert convergence_page.first_step((3.0, 2.0, 1.0), 2.0) == 3  # shorter than the window
    slow = [cell("rgc", seed, losses=(5.0,) * 30) for seed in range(3)]
    assert convergence_page.steps_text(slow, DENSE) == "not in 500"
    assert convergence_page.steps_text([*slow[:2], DENSE[0]], DENSE) == "not in 500 (in 3 by 1 of 3)"
    assert convergence_page.steps_text(DENSE, DENSE) == "3"


def test_the_page_has_a_line_for_each_kind_of_training() -> None:
    cells = [*DENSE, *(cell("rgc", seed, 1.5, density=0.001, union=0.0036) for seed in range(3))]
    cells += [cell("rgc", seed, 1.2, warm_up="dense") for seed in range(3)]
    cells += [cell(method, 0, loss, batch=LARGER * 32) for method, loss in (("dense", 2.0), ("rgc", 2.0))]
    text = convergence_page.page(cells)
    assert "| lstm | rgc | 50.0% | **1.500** (1.500, 1.500, 1.500) | no | **15.0%** (15.0%, 15.0%, 15.0%) | no | 3 |" in text
    assert "| lstm | dense | 50.0% | **1.100** (1.000, 1.100, 1.200) |  |" in text
    assert "| lstm | rgc | dense | **1.200** (1.200, 1.200, 1.200) | yes |" in text
    assert "| lstm | 512 | rgc | **2.000** (2.000) | yes | **20.0%** (20.0%) | yes |" in text
    assert "| lstm | rgc | 0.100% | 0.400% | 0.399% | 0.360% | 0.90 |" in text
    assert "held-out loss (dense's spread: 0.200): rgc: higher than that." in text
    assert "An element waits longer for its turn, on average, than the training's 500 steps: rgc: 1000." in text
    longer = convergence_page.page([*cells, *(replace(own, steps=900, loss=0.5) for own in DENSE[:1])])
    assert "| lstm, 900 steps | dense | 50.0% | **0.500** (0.500) |  |" in longer and "| lstm | dense | 50.0% | **1.100** (" in longer
    assert all(len(line) <= 140 for line in text.splitlines() if not line.startswith(("|", "20")))


def test_the_command_goes_on_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, written, ran = tmp_path / "results.json", tmp_path / "page.md", []

    def made(key: Key, data: Data) -> Cell:
        if key.method == "rgc":
            raise SoapError("a gradient is nan")
        ran.append(key)
        return cell(key.method, key.seed, batch=key.batch, steps=key.steps)

    monkeypatch.setattr(convergence, "trained", made)
    arguments = ["--tasks", "lstm", "--seeds", "2", "--steps", "500", "--results", str(results), "--write", str(written)]
    assert convergence.main([*arguments, "--methods", "dense"]) == 0
    assert convergence.main([*arguments, "--methods", "dense", "int8"]) == 0
    assert [(key.method, key.seed) for key in ran] == [("dense", 0), ("dense", 1), ("int8", 0), ("int8", 1)]
    assert [own.key for own in convergence_cells.read(results)] == ran
    assert convergence.main([*arguments, "--methods", "rgc"]) == 1
    assert "lstm rgc none 32 500 0: a gradient is nan" in capsys.readouterr().err
    assert len(convergence_cells.read(results)) == 4
    assert convergence_page.main([str(results), str(tmp_path / "again.md")]) == 0
    assert (tmp_path / "again.md").read_text().count("\n| lstm |") == written.read_text().count("\n| lstm |")


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results.json"
    convergence_cells.write(results, [replace(DENSE[0], loss=-1.0)])
    for arguments, said in (
        (["--methods", "rgd"], "compression 'rgd' is unknown"),
        (["--results", str(results)], "cells/0/loss: -1.0 is less than the minimum of 0"),
        (["--write", str(tmp_path / "none" / "page.md")], "cannot write"),
    ):
        with pytest.raises(SystemExit) as stopped:
            convergence.main(arguments)
        assert stopped.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    convergence_tasks.digits.cache_clear()
    assert convergence.main(["--tasks", "digits", "--methods", "dense"]) == 1
    assert "digits: digits need scikit-learn, which is not installed; pip install" in capsys.readouterr().err
