"""Operators outside of ATen: refused by name where nothing says who defines them, and read where their module is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import soap
from soap.cli.search import main as search
from soap.errors import ModelError, SoapWarning
from soap.tracing.calls import TileContext
from soap.tracing.export import exported_program
from soap.tracing.load import load_model
from soap.tracing.record import custom_operators
from tests.tracing import shop

ROOT = Path(__file__).parents[2]
X = torch.linspace(-1, 1, 48).reshape(8, 6)
SHOP = "tests.tracing.shop"


class Net(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.call, self.last = nn.Linear(6, 4), call, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self.first(x))).square().mean()  # type: ignore[no-any-return]


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "soapshop::scaled": lambda x: shop.scaled(x, 2.0),
    "soapshop::reversed": lambda x: shop.reversed_gradient(x),
    "soapshop2::doubled": lambda x: torch.ops.soapshop2.doubled(x),  # type: ignore[no-any-return]
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_that_no_command_knows_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        soap.export(Net(CALLS[name]), (X,), path=tmp_path / "m.pt2")
    said = str(caught.value)
    assert said.startswith(f"the program calls the operator {name} (") and "--import" in said and "\n" not in said
    where = ["(registered at", "tests/tracing/shop.py"] if name == "soapshop2::doubled" else [f"defined in module {SHOP}"]
    assert all(words in said for words in where)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CALLS)
def test_operators_whose_module_is_named(name: str, tmp_path: Path) -> None:
    module = Net(CALLS[name])
    soap.export(module, (X,), path=tmp_path / "m.pt2", imports=(SHOP,))
    with pytest.warns(SoapWarning, match=rf"no rule for {name.replace('::', '.')}.default .*kept whole"):
        model = load_model(tmp_path / "m.pt2")
    assert model.record is not None and model.record.compared and model.record.imports == (SHOP,)
    assert sum(not op.partitionable for op in model.graph.operators) == 1


def in_a_fresh_process(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_who_reads_it_needs_the_module_and_is_told_so(tmp_path: Path) -> None:
    """Of a file of torch's own, too."""
    path, of_torch = tmp_path / "m.pt2", tmp_path / "torch.pt2"
    soap.export(Net(CALLS["soapshop::scaled"]), (X,), path=path, imports=(SHOP,))
    torch.export.save(torch.export.export(Net(CALLS["soapshop2::doubled"]), (X,), strict=False), of_torch)
    code = f"""
import sys, soap
from soap.cli.search import main
assert main([{str(path)!r}, "--explain-graph"]) == 3
assert {SHOP!r} not in sys.modules  # nothing is imported because a file says so
try:
    soap.load({str(path)!r})
except soap.ModelError as error:
    print(error)
try:
    soap.load({str(of_torch)!r})
except soap.ModelError as error:
    print(error)
assert main([{str(path)!r}, "--explain-graph", "--import", {SHOP!r}]) == 0
"""
    done = in_a_fresh_process(code)
    assert done.returncode == 0, done.stderr
    assert "calls the operator soapshop2::doubled, which nothing here defines; expected --import MODULE" in done.stdout
    said = "m.pt2' calls the operator soapshop::scaled, which nothing here defines; expected --import MODULE (imports= of soap.load) with"
    assert said in done.stderr and said in done.stdout and f"(the file says {SHOP})" in done.stdout
    assert done.stderr.count("\n") <= 2


@pytest.mark.parametrize(
    ("imports", "said"),
    [
        (("nowhere.at_all",), "imports nowhere.at_all: No module named 'nowhere'; expected a module that can be imported from here"),
        (SHOP, "imports 'tests.tracing.shop': expected a sequence of modules"),
    ],
)
def test_modules_that_are_none(imports: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        soap.export(Net(CALLS["soapshop::scaled"]), (X,), path=tmp_path / "m.pt2", imports=imports)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_commands_say_what_they_cannot_import(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_shop.py").write_text("raise RuntimeError('no shop\\ntoday')")
    assert search(["zoo:gpt:tiny", "--explain-graph", "--import", "broken_shop"]) == 3
    said = "soap-search: error: --import broken_shop: no shop; expected a module that can be imported from here\n"
    assert capsys.readouterr().err == said
    with pytest.raises(SystemExit):
        search(["zoo:gpt:tiny", "--explain-graph", "--import", "a b"])
    assert "'a b' is not allowed; expected a module" in capsys.readouterr().err


def test_what_is_refused_is_what_is_custom() -> None:
    assert custom_operators(exported_program(Net(torch.relu), (X,))) == []
    assert custom_operators(exported_program(Net(CALLS["soapshop::scaled"]), (X,))) == ["soapshop::scaled"]

    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = shop.scaled(x, 3.0)
            return x + y

    assert custom_operators(exported_program(Net(Hidden()), (X,))) == ["soapshop::scaled"]


def test_a_reversed_gradient_by_a_custom_operator_trains_as_its_module(tmp_path: Path) -> None:
    module = Net(CALLS["soapshop::reversed"])
    soap.export(module, (X,), path=tmp_path / "m.pt2", imports=(SHOP,))
    module(X).backward()
    with pytest.warns(SoapWarning, match="kept whole"):
        model = load_model(tmp_path / "m.pt2")
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.parameters.items()}
    model.reference_loss((X,), leaves, TileContext()).backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(leaves[name].grad, parameter.grad)
