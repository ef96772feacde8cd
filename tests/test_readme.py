"""What the README and the pages on using SOAP show works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import soap
from soap.cluster.yaml_file import parse_cluster
from soap.runtime.updates.trial import Scope, try_optimizer

ROOT = Path(__file__).parent.parent
HOWTO = ("pipelines", "training_loop", "runner", "optimizers", "weights", "cluster_file")
PAGES = ("README.md", "docs/usage.md", *(f"docs/howto/{name}.md" for name in HOWTO))
TEXT = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)


def blocks(language: str) -> list[str]:
    """Those that stand on the pages; what these include from ``examples`` is run by ``test_examples`` and ``test_notebook``."""
    return [block for block in re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL) if not block.startswith("--8<--")]


def test_cluster_description() -> None:
    cluster = parse_cluster(blocks("yaml")[0])
    assert cluster.device_count == 8
    assert [host.name for host in cluster.hosts] == ["box0", "box1"]


def test_cluster_description_with_rails() -> None:
    (text,) = (text for text in blocks("yaml") if "rails" in text)
    cluster = parse_cluster(text)
    assert [cluster.links[i].name for i in cluster.route(7, 15)] == ["dgx0/gpu7->network/rail7", "network/rail7->dgx1/gpu7"]


def test_python_from_export_to_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export, use = blocks("python")[:2]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("soap.api.models.load_cluster", lambda spec: parse_cluster(blocks("yaml")[0]))  # local:4 would measure this machine
    monkeypatch.setitem(vars(soap), "load_cluster", soap.api.models.load_cluster)
    names: dict[str, object] = {}
    exec(export, names)
    exec("import soap\n" + use.replace("budget=500", "budget=20"), names)
    assert soap.load_strategy("strategy.json", "model.pt2", parse_cluster(blocks("yaml")[0])) == names["found"].strategy  # type: ignore[attr-defined]


def test_optimizers_of_a_runner() -> None:
    names: dict[str, object] = {}
    exec(next(block for block in blocks("python") if "RunnerConfig(\n" in block or "groups" in block), names)
    config = names["config"]
    assert isinstance(config, soap.RunnerConfig)
    shapes = {"fc.weight": (3, 2), "fc.bias": (3,), "norm.weight": (3,)}
    layout = config.recipe.layout(shapes)
    assert [group.names for member in layout.members for group in member.groups] == [("fc.bias",), ("fc.weight",), ("norm.weight",)]
    assert set(try_optimizer(layout, shapes).scopes.values()) == {Scope.ELEMENT}


@pytest.mark.slow
def test_classical_strategy_trainer_and_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export, _, pipeline, classical, train, _, hugging_face, _, _ = blocks("python")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipeline = pipeline.replace("local:4", "local:2")  # which is measured already
    monkeypatch.chdir(tmp_path)
    exec(export + classical + hugging_face + pipeline, {})
    (tmp_path / "train.py").write_text(train)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(launcher, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "trained.pt").exists() and (tmp_path / "gpt2.pt2").exists()
    assert float(done.stdout) > 0
