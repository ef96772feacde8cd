"""What is made once for all processes of the tests is what each would make for itself."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch

from soap.tracing.calls import TileContext
from soap.tracing.load import Options, ZooSource, load_model
from tests.extent import every
from tests.kept_models import ModelFiles, keep_zoo_models, made_once


@pytest.mark.slow
@pytest.mark.parametrize("name", every(2, ["dlrm", "gpt"]))
def test_a_kept_model_of_the_zoo_is_the_one_that_is_read(name: str) -> None:
    keep_zoo_models()
    spec = f"zoo:{name}:tiny"
    kept, other = (load_model(spec, dtype="float64") for _ in range(2))
    read = ZooSource.trace.__wrapped__(ZooSource(spec, Options(dtype=torch.float64)))  # type: ignore[attr-defined]
    assert kept.graph == read.graph and kept.graph.hash == read.graph.hash
    losses = [model.reference_loss(model.example_inputs, model.parameters, TileContext(3, 1, model.buffers)) for model in (kept, read)]
    assert losses[0] == losses[1]
    for own, tensor in read.parameters.items():
        assert torch.equal(kept.parameters[own], tensor) and kept.parameters[own].requires_grad == tensor.requires_grad
        assert kept.parameters[own].data_ptr() != other.parameters[own].data_ptr()  # whoever trains one changes nobody's
    resized = kept.resized([(4, *tensor.shape[1:]) for tensor in kept.example_inputs])
    assert resized.graph.hash == read.resized([(4, *tensor.shape[1:]) for tensor in read.example_inputs]).graph.hash


def test_for_planning_it_is_read_once_and_without_values() -> None:
    keep_zoo_models()
    one, other = (load_model("zoo:rnnlm:tiny", plan_only=True) for _ in range(2))
    assert one.graph is other.graph
    assert {tensor.device.type for tensor in one.parameters.values()} == {"meta"}


def test_a_file_is_made_once_and_one_that_could_not_be_made_is_not_there() -> None:
    made: list[str] = []

    def export(name: str, path: Path) -> None:
        made.append(name)
        if made.count(name) == 1:
            path.write_text("half of it")
            raise ValueError(name)
        path.write_text(name)

    group = f"test-{uuid.uuid4()}"
    with pytest.raises(ValueError, match="a"):
        ModelFiles(group, export)["a"]
    files = [ModelFiles(group, export) for _ in range(2)]
    assert files[0]["a"] == files[1]["a"] == files[0]["a"] and made == ["a", "a"]
    assert Path(files[0]["a"]).read_text() == "a"
    assert made_once(f"{group}/a.pt2", lambda path: made.append("again")) == Path(files[0]["a"]) and len(made) == 2
