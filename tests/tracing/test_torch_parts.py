"""Each private part of torch that we replace is there, is replaced, and is put back; a version without it is told in one line."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
import torch
from torch import nn

import soap
from soap.tracing import export, load
from soap.tracing.torch_parts import replaced

Hook = tuple[object, str]
DESERIALIZER = torch._export.serde.serialize.GraphModuleDeserializer
READER = torch._export.serde.serialize
HOOKS = {
    "blocks without results": (DESERIALIZER, "deserialize_outputs", load._blocks_without_results),
    "types looked up once": (READER, "typing", load._types_looked_up_once),
    "mended LSTMs": (torch._decomp.decompositions, "one_layer_lstm", export._mended_lstms),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_part_is_replaced_and_put_back(name: str) -> None:
    owner, part, hook = HOOKS[name]
    before = getattr(owner, part)
    with pytest.raises(KeyError), hook():
        assert getattr(owner, part) is not before
        raise KeyError
    assert getattr(owner, part) is before


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("name", HOOKS)
def test_a_version_without_it_is_told_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, part, _ = HOOKS[name]
    path = tmp_path / "m.pt2"
    soap.export(Linear(), (torch.ones(3),), path=path, verify=False)
    monkeypatch.delattr(owner, part)
    told = rf"^torch 2\..* has no torch\..*\.{part}, in whose place .*; expected torch 2\.11 to 2\.13: "
    with pytest.raises(soap.ModelError, match=told) as said:
        soap.load(path) if name != "mended LSTMs" else soap.export(Linear(), (torch.ones(3),), path=path, verify=False)
    assert "\n" not in str(said.value)


def test_types_are_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    hints = typing.get_type_hints

    def noted(kind: object, **names: object) -> dict[str, object]:
        asked.append(kind)
        return hints(kind, **names)

    soap.export(Linear(), (torch.ones(3),), path=tmp_path / "m.pt2", verify=False)
    monkeypatch.setattr(typing, "get_type_hints", noted)
    soap.load(tmp_path / "m.pt2")
    own = [kind for kind in asked if getattr(kind, "__module__", "") == "torch._export.serde.schema"]
    assert len(own) == len(set(own)) > 10


def test_a_module_that_is_gone() -> None:
    with pytest.raises(soap.ModelError, match=r"has no torch\._nothing\.part"), replaced("torch._nothing", "part", lambda own: own):
        pass
