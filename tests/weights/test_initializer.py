"""Weights that are drawn, and those of checkpoints: by names, the same wherever they are asked for."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

import soap
from soap import zoo
from soap.api.weights import open_weights
from soap.cli.run import main
from soap.errors import ModelError
from soap.runtime.checkpoint.checkpoint import read_state_dict
from soap.tracing.calls import TileContext
from soap.tracing.execute import TracedModel
from soap.weights.fitting import Kind, OneByOne
from soap.weights.initializer import Initializer
from soap.weights.safetensors_files import SafetensorsFiles
from tests.cli.refusals import assert_refused

pytest.importorskip("safetensors")
MODEL = "zoo:gpt:tiny"
KINDS = {
    "a.weight": Kind((300, 200), torch.float32),
    "b.weight": Kind((300, 200), torch.float64),
    "a.bias": Kind((7,), torch.float32),
    "in_proj_bias": Kind((7,), torch.float32),
    "norm.weight": Kind((7,), torch.bfloat16),
    "scale": Kind((), torch.float32),
}


def test_values_depend_on_name_and_seed_alone() -> None:
    drawn, again = Initializer("init:normal:0.02", KINDS), Initializer("init:normal:2e-2@0", dict(reversed(KINDS.items())))
    for name, kind in KINDS.items():
        found = drawn.tensor(name)
        assert (tuple(found.shape), found.dtype) == kind and torch.equal(found, again.tensor(name))
    first = drawn.tensor("a.weight")
    assert float(first.mean()) == pytest.approx(0, abs=5e-4) and float(first.std()) == pytest.approx(0.02, rel=0.02)
    assert not torch.equal(first, drawn.tensor("b.weight").float()) and not torch.equal(
        first, Initializer("init:normal:0.02@1", KINDS).tensor("a.weight")
    )
    assert [float(drawn.tensor(name).sum()) for name in ("a.bias", "in_proj_bias", "norm.weight", "scale")] == [0, 0, 7, 1]


def test_up_to_the_fan_in() -> None:
    kinds = {"conv.weight": Kind((40, 5, 4, 5), torch.float32)}
    found = Initializer("init:fan_in", kinds).tensor("conv.weight")
    assert 0.099 < float(found.abs().max()) <= 0.1 and float(found.std()) == pytest.approx(0.1 / 3**0.5, rel=0.05)


@pytest.mark.parametrize("spec", ["init:", "init:normal", "init:normal:x", "init:normal:-1", "init:fan_in:2", "init:fan_in@x", "init:zero"])
def test_unknown_initializers_are_one_line(spec: str) -> None:
    with pytest.raises(ModelError, match=r"no such initializer; expected init:normal:STD or init:fan_in, with @SEED") as caught:
        open_weights(spec, soap.load(MODEL, plan_only=True))
    assert "\n" not in str(caught.value)


def test_a_model_begins_with_them() -> None:
    model = soap.load(MODEL, weights="init:normal:0.02@5")
    drawn = open_weights("init:normal:0.02@5", model)
    assert [name for name, own in model.parameters.items() if not torch.equal(own, drawn.tensor(name))] == []
    state = OneByOne(model, drawn)
    assert {*state} == {*model.parameters, *model.buffers} and len(state) == len({*state})
    name = next(iter(model.parameters))
    assert state[name] is state[name]


@pytest.mark.slow
@pytest.mark.usefixtures("kept_ranks")
def test_ranks_begin_with_drawn_values_or_a_checkpoint_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster, graph = soap.load_cluster("local:2"), soap.load(MODEL, plan_only=True).graph
    soap.save_strategy("s.json", soap.classical("megatron", graph, cluster), graph, cluster)
    still = ["s.json", "--model", MODEL, "--cluster", "local:2", "--steps", "1", "--lr", "1e-30"]
    assert main([*still, "--weights", "init:normal:0.02", "--check", "--save-weights", "a", "--save", "c"]) == 0
    drawn, saved = open_weights("init:normal:0.02", soap.load(MODEL)), SafetensorsFiles(Path("a"))
    state = read_state_dict("c")
    for name in drawn.kinds:
        assert torch.allclose(saved.tensor(name), drawn.tensor(name), rtol=0, atol=1e-20) and torch.equal(state[name], saved.tensor(name))
    capsys.readouterr()
    assert main([*still, "--weights", "c", "--save-weights", "b", "--eval-data", MODEL, "--eval-steps", "2", "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)["evaluation"]
    again = SafetensorsFiles(Path("b"))
    assert again.kinds == saved.kinds
    assert all(torch.allclose(again.tensor(name), saved.tensor(name), rtol=0, atol=1e-20) for name in saved.kinds)
    given = soap.load(MODEL, weights="c")
    assert isinstance(given, TracedModel)
    batches = islice(zoo.batches(MODEL), 2)
    losses = [float(given.reference_loss(batch, given.parameters, TileContext(0, 0, dict(given.buffers)))) for batch in batches]
    assert evaluated == {"data": MODEL, "batches": 2, "model": None, "loss": pytest.approx(sum(losses) / 2, rel=1e-5)}
    assert all(torch.equal(own, saved.tensor(name)) for name, own in given.parameters.items())
    (next(Path("c").glob("step-*")) / "soap.json").write_text("{")
    capsys.readouterr()
    assert_refused(capsys, main, [*still, "--weights", "c"], 3, "weights 'c': ")
    assert_refused(capsys, main, [*still, "--eval-steps", "2"], 2, "--eval-steps without --eval-data")
    assert_refused(capsys, main, [*still, "--eval-model", "m.pt2"], 2, "--eval-model without --eval-data")
