"""``soap-export hf:CONFIG``: models of the library from their configurations."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from soap import api
from soap.cli.export import main
from tests.cli.refusals import assert_refused
from tests.extent import often

LLAMA = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 50,
}  # fmt: skip
GPT2 = ["--set", "n_layer=1", "--set", "n_embd=16", "--set", "n_head=2", "--set", "vocab_size=40"]
SMALL = ["--set", "num_hidden_layers=1", "--set", "hidden_size=16", "--set", "intermediate_size=32", "--set", "num_attention_heads=2"]
T5 = ["--set", "num_layers=1", "--set", "d_model=16", "--set", "d_kv=8", "--set", "num_heads=2",
      "--set", "d_ff=32", "--set", "vocab_size=40"]  # fmt: skip
FAMILIES = {
    "gpt2": (["hf:gpt2", *GPT2], "causal-lm", {"input_ids": (2, 8), "labels": (2, 8)}),
    "bert": (["hf:bert", *SMALL, "--set", "vocab_size=40"], "masked-lm", {"input_ids": (2, 8), "attention_mask": (2, 8), "labels": (2, 8)}),
    "t5": (["hf:t5", *T5], "seq2seq-lm", {"input_ids": (2, 8), "labels": (2, 8)}),
    "vit": (["hf:vit", *SMALL, "--set", "image_size=16", "--set", "patch_size=8"], "image-classification",
            {"pixel_values": (2, 3, 16, 16), "labels": (2,)}),
    "bert-classifier": (["hf:bert", *SMALL, "--set", "vocab_size=40", "--task", "sequence-classification"], "sequence-classification",
                        {"input_ids": (2, 8), "attention_mask": (2, 8), "labels": (2,)}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("family", often([*FAMILIES], {*FAMILIES} - {"bert"}, pytest.mark.slow))
def test_a_model_type_becomes_a_model_that_is_planned(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, task, shapes = FAMILIES[family]
    texts = [] if family == "vit" else ["--sequence", "8"]
    assert main([*command, "--batch", "2", *texts]) == 0
    assert f"({task})" in capsys.readouterr().out
    model = api.load("model.pt2", plan_only=True)
    assert {name: model.graph.tensors[name].shape for name in model.input_names} == {
        name: shape for name, shape in shapes.items() if name in model.input_names
    }
    assert {"labels", next(iter(shapes))} <= set(model.input_names)
    assert api.simulate(model, "p100-4x4", "data_parallel").makespan_ns > 0


@pytest.mark.slow
def test_a_folder_s_configuration_and_its_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes are the folder's, settings change them, and the class that it names decides the task."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"], **LLAMA}))
    assert main([f"hf:{tmp_path}", "--set", "num_hidden_layers=1", "--set", "pad_token_id=0", "--batch", "2", "--sequence", "8"]) == 0
    assert "(sequence-classification): LlamaForSequenceClassification, " in capsys.readouterr().out
    graph = api.load("model.pt2", plan_only=True).graph
    assert graph.tensors["model.embed_tokens.weight"].shape == (50, 16)
    assert not any(".layers.1." in tensor.name for tensor in graph.parameters)


@pytest.mark.slow
def test_weights_are_drawn_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["hf:gpt2", *GPT2, "--batch", "2", "--sequence", "8"]
    assert main(command) == 0
    assert "without values" in capsys.readouterr().out
    without = Path("model.pt2").stat().st_size
    assert main([*command, "--initialize"]) == 0
    assert "without values" not in capsys.readouterr().out
    model = api.load("model.pt2")
    count = sum(tensor.numel() for tensor in model.parameters.values())
    assert Path("model.pt2").stat().st_size > without + 3 * count


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["hf:gpt22"], "neither a folder or file that is there, nor a model type of transformers"),
        (["hf:gpt2", "--set", "n_layers=2"], "--set n_layers: GPT2Config has no such setting; expected one such as n_layer"),
        (["hf:gpt2", "--task", "masked-lm"], "no masked-lm model of gpt2; expected one of causal-lm"),
        (["hf:encodec"], "encodec has no model with a loss"),
        (["hf:empty"], "the folder has no config.json"),
        (["hf:wrong.json"], "expected a configuration that transformers"),
        (["hf:strange.json"], "expected a configuration that transformers"),
        (["hf:bert", "--sequence", "513"], "bert takes at most 512 words"),
        (["hf:gpt2", "--set", "n_embd=5", "--set", "n_head=3"], "no model of this configuration"),
        (["hf:gpt2", "--set", "n_layer=many"], "n_layer"),
    ],
)
def test_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong.json").write_text("{")
    (tmp_path / "strange.json").write_text('{"model_type": "strange"}')
    assert_refused(capsys, main, command, 3, words)
    assert not (tmp_path / "model.pt2").exists()


def test_without_the_library_a_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert_refused(capsys, main, ["hf:gpt2"], 3, "pip install transformers")
