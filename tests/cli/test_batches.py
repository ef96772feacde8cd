from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from soap.cli.batches import ConvertedBatches, DrawnBatches, JoinedBatches, parts_of, user_batches
from soap.errors import SoapError
from soap.plan.samples import Samples
from soap.runtime.inputs import PartBatch
from soap.tracing.calls import TileContext
from soap.tracing.export import export_model
from soap.tracing.load import load_model

EXAMPLES = [torch.tensor([[0.5, 1.5], [2.5, 3.5]]), torch.tensor([3, 7]), torch.zeros(0, 4), torch.tensor(2.0)]


def drawn(seed: int) -> DrawnBatches:
    names = ["scores", "labels", "empty", "number"]
    return DrawnBatches(SimpleNamespace(example_inputs=EXAMPLES, input_names=names, element_inputs={"labels"}), seed)  # type: ignore[arg-type]


def test_drawn_batches_look_like_the_examples() -> None:
    for step in range(5):
        batch = drawn(1)(step)
        assert [(t.shape, t.dtype) for t in batch] == [(t.shape, t.dtype) for t in EXAMPLES]
        for tensor, example in zip(batch, EXAMPLES, strict=True):
            assert set(tensor.reshape(-1).tolist()) <= set(example.reshape(-1).tolist())


def test_drawn_elements_stay_at_their_place_in_a_sample() -> None:
    for step in range(5):
        columns = drawn(1)(step)[0].T.tolist()  # indices into tables of different sizes
        assert set(columns[0]) <= {0.5, 2.5}
        assert set(columns[1]) <= {1.5, 3.5}


def test_drawn_batches_depend_on_seed_and_step_alone() -> None:
    def text(seed: int, step: int) -> str:
        return str([tensor.tolist() for tensor in drawn(seed)(step)])

    assert text(1, 2) == text(1, 2)
    assert len({text(seed, step) for seed in range(4) for step in range(4)}) > 8


def test_batches_follow_the_type_that_replaces_the_models() -> None:
    given = [torch.tensor([0.5, 0.25]), torch.tensor([1, 2]), torch.tensor([True])]
    converted = ConvertedBatches(lambda step: [tensor * step if tensor.is_floating_point() else tensor for tensor in given], torch.float64)
    assert [tensor.dtype for tensor in converted(2)] == [torch.float64, torch.int64, torch.bool]
    assert converted(2)[0].tolist() == [1.0, 0.5]


def test_whole_numbers_that_do_not_stand_for_themselves_are_the_examples() -> None:
    given = [torch.tensor([0, 2, 5]), torch.tensor([4, -100, 3]), torch.tensor([True, False, True]), torch.tensor([4, 6, 3])]
    names = ["offsets", "labels", "mask", "ids"]
    model = SimpleNamespace(example_inputs=given, input_names=names, element_inputs={"labels", "ids"})
    batches = [DrawnBatches(model, 1)(step) for step in range(8)]  # type: ignore[arg-type]
    for place in range(3):
        assert all(torch.equal(batch[place], given[place]) for batch in batches)
    assert {tuple(batch[3].tolist()) for batch in batches} - {(4, 6, 3)}


@pytest.mark.parametrize("examples", [[], [torch.zeros(2, device="meta")]])
def test_a_model_without_example_inputs_needs_data(examples: list[torch.Tensor]) -> None:
    with pytest.raises(SoapError, match=r"^the model has no example inputs to draw batches like: give --data PKG\.MOD:CALLABLE"):
        DrawnBatches(SimpleNamespace(example_inputs=examples, input_names=["x"], element_inputs=set()), 0)  # type: ignore[arg-type]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "batches_of_a_user.py").write_text(
        "import torch\n"
        "def two():\n    yield [torch.tensor(0)]\n    yield torch.tensor(1)\n"
        "def none():\n    return []\n"
        "def words():\n    yield ['a']\n"
        "def number():\n    return 3\n"
        "value = 3\n"
        "asked = []\n"
        "class Numbers(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 10\n"
        "    def __getitem__(self, i):\n        asked.append(i)\n        return i, torch.tensor([2 * i, 0])\n"
        "def numbers():\n    return Numbers()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "batches_of_a_user", raising=False)
    return "batches_of_a_user"


def test_user_batches_by_step(module: str) -> None:
    batches = user_batches(f"{module}:two", 1)
    assert [int(batches(step)[0]) for step in (0, 0, 1, 2, 3, 3, 0, 1)] == [0, 0, 1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "no batches; expected at least one"),
        ("words", "a batch holds str; expected a sequence of tensors per step"),
        ("number", "the callable returned int; expected an iterable of batches"),
        ("value", "int cannot be called; expected package.module:callable, which yields"),
        ("absent", "has no .absent."),
        ("", "expected package.module:callable"),
    ],
)
def test_wrong_user_batches(module: str, name: str, message: str) -> None:
    with pytest.raises(SoapError, match=message):
        user_batches(f"{module}:{name}", 1)(0)


SOME = {
    "scores": Samples(0, 2, ((1, 2),)), "labels": Samples(0, 2, ()), "empty": Samples(None, 0, ()), "number": Samples(None, 0, ()),
}  # fmt: skip


@pytest.mark.parametrize("at_once", [1, 2, 2**18])
def test_a_rank_draws_the_samples_that_it_reads(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """The same numbers as in the whole batch, however many are drawn at once."""
    monkeypatch.setattr("soap.cli.batches.AT_ONCE", at_once)
    for step in range(4):
        (part,), whole = drawn(3).parts(step, SOME), drawn(3)(step)
        assert part.size == 2
        assert all(torch.equal(a, b) for a, b in zip(part.tensors, PartBatch.cut(whole, SOME).tensors, strict=True))
    long = torch.arange(30).reshape(10, 3)
    model = SimpleNamespace(example_inputs=[long], input_names=["x"], element_inputs={"x"})
    read = {"x": Samples(0, 10, ((0, 1), (3, 7), (9, 10)))}
    batches = DrawnBatches(model, 1)  # type: ignore[arg-type]
    assert torch.equal(batches.parts(2, read)[0].tensors[0], batches(2)[0][[0, 3, 4, 5, 6, 9]])


def test_joined_and_converted_parts(module: str) -> None:
    joined = JoinedBatches(ConvertedBatches(drawn(1), torch.float64), 2)
    parts = parts_of(joined)
    assert parts is not None and parts_of(JoinedBatches(user_batches(f"{module}:two", 1), 2)) is None
    for step in range(2):
        found = [tensor for own in parts(step, SOME) for tensor in own.tensors]
        whole = joined(step)
        expected = [tensor for i in (0, 4) for tensor in PartBatch.cut(whole[i : i + 4], SOME).tensors]
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_dataset_is_asked_for_the_samples_of_a_rank_alone(module: str) -> None:
    """Ten samples are two batches of four, again and again."""
    batches = user_batches(f"{module}:numbers", 4)
    asked = sys.modules[module].asked
    assert [batches(step)[0].tolist() for step in (0, 1, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    asked.clear()
    read = {"x": Samples(0, 4, ((1, 2),)), "y": Samples(0, 4, ((1, 2), (3, 4)))}
    parts = parts_of(batches)
    assert parts is not None
    (part,) = parts(1, read)
    assert [tensor.tolist() for tensor in part.tensors] == [[5], [[10, 0], [14, 0]]]
    assert asked == [5, 7] and part.size == 4
    assert [tensor.shape for tensor in parts(0, dict.fromkeys("xy", Samples(0, 4, ())))[0].tensors] == [(0,), (0, 2)]
    with pytest.raises(SoapError, match=r":numbers: a batch of 2 tensors; expected 1: x"):
        parts(0, {"x": read["x"]})
    with pytest.raises(SoapError, match=r":numbers: 10 samples; expected at least 11, a batch"):
        user_batches(f"{module}:numbers", 11)


def test_missing_module(module: str) -> None:
    with pytest.raises(SoapError, match=r"--data nowhere\.data:f: No module named 'nowhere'; expected package\.module:callable"):
        user_batches("nowhere.data:f", 1)


def test_joined_batches_are_those_of_several_steps() -> None:
    batches = drawn(1)
    joined = JoinedBatches(batches, 3)
    for step in range(2):
        expected = [tensor for i in range(3) for tensor in batches(3 * step + i)]
        assert len(joined(step)) == 12
        assert all(torch.equal(a, b) for a, b in zip(joined(step), expected, strict=True))


class Ragged(torch.nn.Module):
    """Bags of different sizes, told by offsets; the last token of each row, told by lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.EmbeddingBag(32, 8, mode="sum", include_last_offset=True)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, flat: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = self.table(flat, offsets).unsqueeze(1) * torch.arange(1, 4)[:, None]
        return torch.nn.functional.cross_entropy(self.head(rows[torch.arange(6), lengths - 1]), labels)


def test_drawn_batches_of_a_model_with_offsets_and_lengths_can_be_trained_on(tmp_path: Path) -> None:
    offsets, lengths = torch.tensor([0, 3, 3, 4, 9, 12, 20]), torch.tensor([1, 3, 2, 3, 1, 2])
    inputs = (torch.arange(20) + 7, offsets, lengths, torch.tensor([0, 4, 2, 1, 3, 0]))
    export_model(Ragged(), inputs, path=tmp_path / "m.pt2")
    model = load_model(str(tmp_path / "m.pt2"))
    batches = DrawnBatches(model, 3)
    flats = set()
    for step in range(4):
        flat, *kept, labels = batches(step)
        assert torch.equal(kept[0], offsets) and torch.equal(kept[1], lengths)
        assert set(flat.tolist()) <= set(range(7, 27)) and set(labels.tolist()) <= set(range(5))
        flats.add(tuple(flat.tolist()))
        assert bool(model.reference_loss(batches(step), model.parameters, TileContext()).isfinite())
    assert len(flats) == 4
