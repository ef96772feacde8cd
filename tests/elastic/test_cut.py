"""Look-ups at owners and the rest at a worker: together what the whole model computes, in loss and in all gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.elastic.cut import Cut
from soap.elastic.faults import ElasticError
from soap.elastic.layout import gradient_of_rows, sums_of_rows
from soap.tracing.execute import TracedModel
from soap.tracing.load import load_model
from tests.elastic.models import Ragged, exported, in_float64, ragged_inputs, whole_gradients


def compare(model: TracedModel, inputs: list[Tensor]) -> Cut:
    """The cut model with owners that this process plays itself, beside the whole one."""
    values = {name: value.detach() for name, value in model.parameters.items()}
    loss, gradients = whole_gradients(model, inputs, values)
    cut = Cut(model)
    lookups = {table: own.checked(len(values[table])) for table, own in cut.look_ups(inputs).items()}
    sums = {table: sums_of_rows(values[table], own) for table, own in lookups.items()}
    found = cut.gradients(inputs, lookups, sums, {name: values[name] for name in cut.dense})
    assert found.loss == pytest.approx(loss, rel=1e-12)
    assert {*found.dense, *found.sums} == {*gradients}
    for name in cut.dense:
        torch.testing.assert_close(found.dense[name], gradients[name], rtol=1e-10, atol=1e-14)
    for table in cut.tables:
        rows = gradient_of_rows(lookups[table], found.sums[table])
        own = torch.zeros_like(values[table]).index_add_(0, rows.rows, rows.values)
        torch.testing.assert_close(own, gradients[table], rtol=1e-10, atol=1e-14)
    return cut


@pytest.mark.parametrize(
    ("spec", "tables"),
    [
        ("zoo:full_sparse:tiny", ["layers.0.weight", "layers.1.weight"]),
        ("zoo:dlrm:tiny", [f"embeddings.{i}.weight" for i in range(5)]),
    ],
)
def test_cut_zoo_model_is_the_whole_one(spec: str, tables: list[str]) -> None:
    torch.manual_seed(0)
    model = load_model(spec, dtype="float64")
    for value in model.parameters.values():  # tables of zeros would hide what is looked up
        nn.init.normal_(value)
    cut = compare(model, in_float64(model.example_inputs))
    assert [*cut.tables] == tables and not cut.refused and cut.dense


def test_cut_bags_of_all_kinds_are_the_whole_model(tmp_path: Path) -> None:
    torch.manual_seed(1)
    inputs = ragged_inputs()
    model = load_model(exported(Ragged(), inputs, tmp_path / "ragged.pt2"), dtype="float64")
    cut = compare(model, in_float64(inputs))
    assert [*cut.tables] == ["first.weight", "second.weight", "shared.weight"]
    lookups = cut.look_ups(in_float64(inputs))
    assert lookups["first.weight"].counts().tolist() == [3, 0, 1, 5]
    assert 2 not in lookups["second.weight"].ids and lookups["second.weight"].values is None
    assert lookups["shared.weight"].counts().tolist() == [1] * 4 + [2] * 4  # both uses, for one push


class Padded(nn.Module):
    """A table that is looked up with a padding row, with another one, and without any."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(7, 3, padding_idx=2), nn.Linear(3, 2)

    def forward(self, ids: Tensor, others: Tensor) -> Tensor:
        rows = self.table(ids).sum(1) + F.embedding(others, self.table.weight) * F.embedding(others, self.table.weight, padding_idx=4)
        return torch.tanh(self.top(rows)).square().mean()


def test_padding_rows_are_read_but_take_no_gradient(tmp_path: Path) -> None:
    torch.manual_seed(4)
    inputs = [torch.tensor([[2, 1], [2, 2], [0, 6], [4, 2]]), torch.tensor([4, 2, 4, 0])]
    model = load_model(exported(Padded(), inputs, tmp_path / "padded.pt2"), dtype="float64")
    nn.init.normal_(model.parameters["table.weight"])
    assert not compare(model, inputs).refused


def test_batch_of_another_size_is_cut_alike() -> None:
    torch.manual_seed(2)
    model = load_model("zoo:full_sparse:tiny", dtype="float64")
    shorter = [one[:3] for one in in_float64(model.example_inputs)]
    resized = model.resized([one.shape for one in shorter])
    resized.parameters = model.parameters
    compare(resized, shorter)


class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(9, 3, mode="max")

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).mean()


class Scaled(nn.Module):
    """Values that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.EmbeddingBag(9, 3, mode="sum"), nn.Parameter(torch.rand(4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids, per_sample_weights=self.scale.expand(len(ids), 4)).mean()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.EmbeddingBag(9, 3, mode="sum"), nn.BatchNorm1d(3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.table(ids)).square().mean()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Largest(), r"no sparse layer can be computed at servers \(table\.weight: a bag's max is no sum\)"),
        (Scaled(), r"table\.weight: its ids or values do not follow from the batch alone"),
        (Normed(), r"the model keeps .*norm\.running_mean.* from step to step; workers hold no state"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(module: nn.Module, said: str, tmp_path: Path) -> None:
    model = load_model(exported(module, (torch.randint(9, (5, 4)),), tmp_path / "model.pt2"))
    with pytest.raises(ElasticError, match=said):
        Cut(model)
