from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from soap import api
from soap.cli.export import drawn, example_input, main
from soap.cli.updating import setting
from tests.cli.refusals import assert_refused

MODULE = '''
import sys
import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(12, 5))

    def forward(self, words, labels):
        loss = nn.functional.cross_entropy(self.layers(words), labels)
        return loss if labels.dtype == torch.int64 else {"loss": loss, "other": loss * 2}


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        if x.sum() > 0:
            return (self.weight * x).sum()
        return self.weight.sum()


class Counting(Deciding):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return (self.weight * x).sum() * self.calls


class Several(Classifier):
    def forward(self, words, labels):
        return {"loss": super().forward(words, labels), "words": words}


def given():
    return torch.randint(11, (6, 3)), torch.randint(5, (6,))


def whole(): return Classifier(), given()
def named(): return Several(), (given()[0],), {"labels": given()[1]}
def alone(): return Classifier()
def deciding(): return Deciding(), (torch.ones(3),)
def counting(): return Counting(), (torch.ones(3),)
def fails(): return [][1]
def wants(x): return x
def leaves(): sys.exit(3)
def number(): return 7
def many(): return Classifier(), (), {}, 4
def wrong_arguments(): return Classifier(), 5
constant = 7
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a module of a user's."""
    (tmp_path / "models_of_a_user.py").write_text(MODULE)
    (tmp_path / "broken_of_a_user.py").write_text("raise SystemExit('no arguments')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("models_of_a_user", "broken_of_a_user"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_exports_what_a_function_returns(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models_of_a_user:whole"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "models_of_a_user:whole: Classifier, 109 parameters\ninputs: words int64[6,3], labels int64[6]\nwrote model.pt2 ("
    )
    graph = api.load("model.pt2", plan_only=True).graph
    assert {tensor.name: tensor.shape for tensor in graph.parameters} == {
        "layers.0.weight": (11, 4), "layers.2.weight": (5, 12), "layers.2.bias": (5,),
    }  # fmt: skip


def test_the_loss_may_be_a_field_of_the_output(here: Path) -> None:
    assert main(["models_of_a_user:named", "--loss", "loss", "-o", "named.pt2"]) == 0
    model = api.load("named.pt2")
    assert list(model.input_names) == ["words", "labels"]
    assert model.graph.tensors[model.graph.loss].shape == ()


def test_inputs_in_words(here: Path) -> None:
    """Those of a module without inputs; the number of samples may stay open."""
    inputs = ["--input", "words=int64[4,3]<11", "--input", "labels = int64[4] <5"]
    assert main(["models_of_a_user:alone", *inputs, "--dynamic-batch"]) == 0
    model = api.load("model.pt2")
    assert [tuple(own.shape) for own in model.example_inputs] == [(4, 3), (4,)]
    assert int(model.example_inputs[0].max()) < 11


def test_what_is_drawn() -> None:
    inputs = [example_input(text) for text in ("a=float32[2,3]", "b=bfloat16[]", "c=int32[50]<4", "d=bool[50]<2", "e=int64[9]")]
    found = drawn(inputs, torch.Generator().manual_seed(0))
    assert [(name, own.dtype, tuple(own.shape)) for name, own in found.items()] == [
        ("a", torch.float32, (2, 3)), ("b", torch.bfloat16, ()), ("c", torch.int32, (50,)),
        ("d", torch.bool, (50,)), ("e", torch.int64, (9,)),
    ]  # fmt: skip
    assert set(found["c"].tolist()) == {0, 1, 2, 3} and set(found["d"].tolist()) == {False, True} and not found["e"].any()


def test_settings() -> None:
    assert setting("sizes=[1,(2,3)]") == ("sizes", [1, (2, 3)])
    assert setting("rate=0.5") == ("rate", 0.5) and setting("act=gelu_new") == ("act", "gelu_new")


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["models_of_a_user:absent"], 3, "module 'models_of_a_user' has no 'absent'; expected package.module:callable"),
        (["nothing_of_a_user:f"], 3, "No module named 'nothing_of_a_user'"),
        (["broken_of_a_user:f"], 3, "SystemExit while it was imported: no arguments"),
        (["models_of_a_user.py:whole"], 3, "'models_of_a_user.py' is a file"),
        (["models_of_a_user"], 3, "SOURCE models_of_a_user: expected package.module:callable"),
        (["models_of_a_user:constant"], 3, "int cannot be called"),
        (["models_of_a_user:fails"], 3, "raised IndexError at models_of_a_user.py:"),
        (["models_of_a_user:wants"], 3, "missing 1 required positional argument"),
        (["models_of_a_user:leaves"], 3, "raised SystemExit"),
        (["models_of_a_user:number"], 3, "returned int; expected (module, args)"),
        (["models_of_a_user:many"], 3, "returned (Classifier, tuple, dict, int)"),
        (["models_of_a_user:wrong_arguments"], 3, "returned arguments int and dict"),
        (["models_of_a_user:alone"], 3, "a module without inputs; expected --input"),
        (["models_of_a_user:whole", "--input", "x=int64[2]"], 3, "inputs of its own; expected no --input"),
        (["models_of_a_user:deciding"], 3, "Deciding decides by the values of tensors"),
        (["models_of_a_user:counting"], 3, "; --no-verify exports it as it is"),
        (["models_of_a_user:named", "--loss", "lost"], 3, "--loss lost: the output is a dict without 'lost'; expected one of loss,",),
        (["models_of_a_user:whole", "-o", "absent/model.pt2"], 1, "folder 'absent' does not exist"),
        (["models_of_a_user:whole", "-o", "models_of_a_user.py"], 2, "is there and seems to be Python code, not a model"),
        (["models_of_a_user:whole", "--batch", "3"], 2, "--batch with models_of_a_user:whole; expected it with hf:CONFIG"),
        (["hf:gpt2", "--loss", "x"], 2, "--loss with hf:gpt2"),
        (["hf:gpt2", "--set", "n_layer=1", "--set", "n_layer=2"], 2, "--set n_layer is given twice"),
        (["a:b", "--input", "x=int64[,]"], 2, "expected NAME=TYPE[SIZE"),
        (["a:b", "--input", "x=complex64[2]"], 2, "type 'complex64'"),
        (["a:b", "--input", "x=float32[2]<3"], 2, "behind whole numbers alone"),
        (["a:b", "--input", "x=int64[0]"], 2, "has 0 elements"),
        (["a:b", "--set", "3=4"], 2, "expected KEY=VALUE"),
        ([], 2, "SOURCE"),
    ],
)  # fmt: skip
def test_what_is_wrong(here: Path, capsys: pytest.CaptureFixture[str], command: list[str], code: int, words: str) -> None:
    before = {path.name for path in here.iterdir() if path.name != "__pycache__"}
    assert_refused(capsys, main, command, code, words)
    assert {path.name for path in here.iterdir() if path.name != "__pycache__"} == before


def test_a_file_of_a_model_is_replaced_and_another_is_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models_of_a_user:whole"]) == 0
    first = (here / "model.pt2").read_bytes()
    capsys.readouterr()
    assert_refused(capsys, main, ["models_of_a_user:fails"], 3, "raised IndexError")
    assert (here / "model.pt2").read_bytes() == first
    assert main(["models_of_a_user:whole", "--no-verify"]) == 0
    assert (here / "model.pt2").read_bytes() != first
