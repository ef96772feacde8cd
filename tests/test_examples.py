"""Scripts of ``examples`` that pages include run as they stand."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import soap
from examples import plain_loop, quickstart, step_loggers
from tests import example_ranks
from tests.runtime.pool import FirstOf, Pool

ROOT = Path(__file__).parent.parent
CLUSTER = """
hosts:
  - name: box
    count: 2
    devices: {type: cpu-core, count: 1}
    cpu_cores: 1
    links:
      intra: {bandwidth: 5 GB/s, latency: 20 us}
network: {bandwidth: 10 Gbit/s, latency: 20 us}
"""


@pytest.fixture(scope="module")
def planned_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart's model, a strategy for two hosts with one device each, and these hosts' description."""
    folder = tmp_path_factory.mktemp("classifier")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        quickstart.export()
    (folder / "cluster.yaml").write_text(CLUSTER)
    model, cluster = soap.load(folder / "model.pt2"), soap.load_cluster(str(folder / "cluster.yaml"))
    soap.save_strategy(folder / "strategy.json", soap.classical("model_parallel", model, cluster), model, cluster)
    return folder


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.slow
def test_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    quickstart.export()
    quickstart.search("p100-4x4")
    assert capsys.readouterr().out.startswith("predicted: ")
    assert soap.load_strategy("strategy.json", "model.pt2", "p100-4x4").operators.keys() == soap.load("model.pt2").graph.index.keys()


def test_a_plain_loop_and_the_same_by_a_plan(planned_classifier: Path, four: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    module, same = quickstart.Classifier(), quickstart.Classifier()
    same.load_state_dict(module.state_dict())
    expected = plain_loop.plain(module, 4)
    (losses, trained), (others, untrained) = FirstOf(four, 2).run(example_ranks.plain_loop, planned_classifier, same.state_dict())
    assert losses == others == pytest.approx(expected, rel=1e-5)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(untrained[name], same.state_dict()[name])


SRUN = """#!/bin/bash
# What srun does with one task on each of two hosts
[ "$1" = --kill-on-bad-exit=1 ] && shift
SLURM_NODEID=0 SLURM_PROCID=0 "$@" & first=$!
SLURM_NODEID=1 SLURM_PROCID=1 "$@" & second=$!
wait $first && wait $second
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames box[0-1]" ] && printf '127.0.0.1\\nbox1\\n'
"""


@pytest.mark.long
def test_slurm_starts_ranks_on_two_hosts(planned_classifier: Path, tmp_path: Path) -> None:
    """Two torchruns of one rank each, which meet over loopback; ``soap-run --check`` compares with one process."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", f'#!/bin/bash\nexec {sys.executable} "$@"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "box[0-1]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "17", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **slurm, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["strategy.json", "--model", "model.pt2", "--cluster", "cluster.yaml", "--steps", "3", "--check", "--json"]
    script = ["bash", str(ROOT / "examples" / "slurm.sbatch"), "-m", "soap.cli.run", *command]
    done = subprocess.run(script, cwd=planned_classifier, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["check"]["passed"] and len(report["strategies"]["strategy"]["losses"]) == 3


def test_slurm_jobs_end_with_the_first_line_that_fails(tmp_path: Path) -> None:
    """Without scontrol nobody knows where ranks meet."""
    environment = {**os.environ, "SLURM_JOB_NODELIST": "box[0-1]", "SLURM_JOB_ID": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", str(ROOT / "examples" / "slurm.sbatch"), "train.py"], env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "scontrol" in done.stderr and "srun" not in done.stderr


def test_tensorboard_has_each_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = step_loggers.tensorboard(str(tmp_path))
    for step in (1, 2):
        log(soap.StepMetrics(step, 3.0 / step, 0.5, (0.125,)))
    written = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in written.Scalars("train/loss")] == [(1, 3.0), (2, 1.5)]
    assert written.Tags()["scalars"] == ["train/loss", "train/seconds", "train/learning_rate"]


def test_weights_and_biases_is_told_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stand-in: the service needs an account."""
    told: list[tuple[dict[str, float], int]] = []

    class Run:
        def log(self, data: dict[str, float], step: int) -> None:
            told.append((data, step))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project: Run()))
    step_loggers.wandb()(soap.StepMetrics(4, 3.0, 0.5, gradient_norm=2.0))
    assert told == [({"train/loss": 3.0, "train/seconds": 0.5, "train/gradient_norm": 2.0}, 4)]


@pytest.mark.slow
def test_cells_of_a_notebook_show_tables_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bokeh", reason="reports need bokeh: pip install '.[report]'")
    from examples import notebook_cells

    shown: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebook_cells, "display", shown.append)
    found = notebook_cells.cells()
    notebook_cells.report(found)
    *tables, frame = (value._repr_html_() for value in shown)
    assert len(tables) == 3 and all("<table>" in table for table in tables)
    assert "report.html" in frame and (tmp_path / "report.html").stat().st_size > 100_000


@pytest.mark.long
@pytest.mark.timeout(600)
def test_hugging_face_s_trainer_trains_by_a_plan_as_by_itself(tmp_path: Path) -> None:
    """Losses, the gradients' norms, learning rates and the saved model, beside Trainer's own in one process with the whole batch."""
    pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[huggingface]'")
    from transformers import GPT2LMHeadModel, Trainer

    from examples import hugging_face

    steps = 6
    module = hugging_face.language_model()
    alone = Trainer(module, hugging_face.arguments(str(tmp_path / "alone"), 8, steps), train_dataset=hugging_face.texts())
    alone.model_accepts_loss_kwargs = False  # else it divides GPT-2's loss by one label more for each sample than the model counts
    alone.train()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    script = ["-m", "examples.hugging_face", "--steps", str(steps), "--output", str(tmp_path / "planned")]
    done = subprocess.run([*launcher, *script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    history = json.loads((tmp_path / "planned" / "trainer_state.json").read_text())["log_history"]
    for name in ("loss", "grad_norm", "learning_rate"):
        found, expected = ([line[name] for line in lines if name in line] for lines in (history, alone.state.log_history))
        assert len(found) == steps and found == pytest.approx(expected, rel=1e-3)
    trained = GPT2LMHeadModel.from_pretrained(tmp_path / "planned").state_dict()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_loop_with_accelerate_trains_by_a_plan_as_a_plain_one(tmp_path: Path) -> None:
    """Losses and values, beside one process with whole batches."""
    pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[huggingface]'")
    from examples import accelerate_loop

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    script = ["-m", "examples.accelerate_loop", "--output", str(tmp_path / "trained.pt")]
    done = subprocess.run([*launcher, *script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    planned = torch.load(tmp_path / "trained.pt", weights_only=True)

    torch.manual_seed(0)
    module, losses = quickstart.Classifier(), []
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.001)
    for inputs, labels in [*torch.utils.data.DataLoader(accelerate_loop.samples(), batch_size=32)] * 2:
        loss = module(inputs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == 8 and planned["losses"] == pytest.approx(losses, rel=1e-4)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(planned["state"][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("option", "message"), [
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps 2: a plan does not know it; expected 1"),
    ({"optim": "sgd"}, "expected 'adamw_torch'"),
    ({"save_strategy": "steps"}, "expected save_only_model=True"),
])  # fmt: skip
def test_options_of_hugging_face_s_trainer_that_would_be_ignored_are_refused(option: dict[str, Any], message: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install '.[huggingface]'")
    from examples import hugging_face

    arguments = hugging_face.arguments(str(tmp_path), 4, 2)
    with pytest.raises(soap.SoapError, match=message):
        hugging_face.PlannedTrainer(hugging_face.language_model(), replace(arguments, **option), train_dataset=hugging_face.texts())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_lightning_trains_by_a_plan_as_by_itself(tmp_path: Path) -> None:
    """The last batch's loss, that of validation, and all weights, beside Lightning alone in one process with whole batches."""
    pytest.importorskip("lightning", reason="needs lightning: pip install '.[lightning]'")
    from examples import lightning_strategy

    torch.manual_seed(0)
    module = lightning_strategy.Classifier()
    alone = lightning_strategy.fit(module, 16, devices=1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    script = ["-m", "examples.lightning_strategy", "--output", str(tmp_path / "planned.pt")]
    done = subprocess.run([*launcher, *script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    planned = torch.load(tmp_path / "planned.pt", weights_only=True)
    assert planned["metrics"]["validation_loss"] == pytest.approx(float(alone.callback_metrics["validation_loss"]), rel=1e-4)
    assert planned["metrics"]["train_loss"] == pytest.approx(float(alone.callback_metrics["own_loss"]), rel=1e-4)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(planned["state"][name], value, rtol=1e-4, atol=1e-5)
