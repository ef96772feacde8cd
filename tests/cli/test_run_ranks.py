"""``soap-run`` with real processes: its ranks are, and where its own start or end matters, the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import soap
from soap import zoo
from soap.cli.compare import main as compare_main
from soap.cli.run import main
from soap.cli.search import main as search_main
from soap.cli.simulate import main as simulate_main
from tests.cli import faults
from tests.extent import often
from tests.runtime.state_modules import Codebook

ROOT = Path(__file__).parent.parent.parent
MODEL = "zoo:gpt:tiny"
LR = "torch.optim.lr_scheduler"
CLUSTER = """
name: pair
device_types: {core: {kind: cpu, flops: {float32: 50 GFLOP/s}, memory_bandwidth: 10 GB/s, memory: 4 GiB, kernel_overhead: 5 us}}
hosts:
  - {name: box, devices: {type: core, count: 2}, cpu_cores: 2, memory: 8 GiB, links: {intra: {bandwidth: 1 GB/s, latency: 50 us}}}
"""
DATA = """
import os
from pathlib import Path
import torch

def batches():
    generator = torch.Generator().manual_seed(0)
    Path(f"rank-{os.getpid()}").touch()
    for _ in range(3):
        yield SHAPES(generator)


def ragged():
    for batch in batches():
        yield batch
    yield [tensor[:3] for tensor in batch]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with cluster.yaml, a strategy that splits parameters and samples over two devices, and a module of data."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    model = soap.load(MODEL, plan_only=True)
    cluster = soap.load_cluster(tmp_path / "cluster.yaml")
    soap.save_strategy(tmp_path / "s.json", soap.api.classical("megatron", model.graph, cluster), model, cluster)
    shapes = [tuple(model.graph.tensors[name].shape) for name in model.input_names]
    make = f"[torch.randint(8, shape, generator=generator) for shape in {shapes}]"
    (tmp_path / "mydata.py").write_text(DATA.replace("SHAPES(generator)", make))
    return tmp_path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """As ``folder``, with a model in a file, ``words.pt2``: ranks that are to be ended need not export it first."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    torch.manual_seed(0)
    soap.export(faults.Words(), (torch.zeros(faults.SHAPE, dtype=torch.int64),) * 2, path=tmp_path / "words.pt2", verify=False)
    model, cluster = soap.load(tmp_path / "words.pt2", plan_only=True), soap.load_cluster(tmp_path / "cluster.yaml")
    soap.save_strategy(tmp_path / "s.json", soap.api.classical("megatron", model.graph, cluster), model, cluster)
    make = f"[torch.randint(8, {faults.SHAPE}, generator=generator) for _ in range(2)]"
    (tmp_path / "mydata.py").write_text(DATA.replace("SHAPES(generator)", make))
    return tmp_path


COMMON = ("--model", MODEL, "--cluster", "cluster.yaml")


def command(*arguments: str, model: str = MODEL) -> list[str]:
    return [sys.executable, "-m", "soap.cli.run", "s.json", "--model", model, *COMMON[2:], *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Done(NamedTuple):
    """What a command has left."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept_ranks: None) -> Run:
    """``soap-run`` in this process, which need not start Python and torch once more, and on ranks that are there."""
    monkeypatch.chdir(folder)

    def run(*arguments: str, strategy: str = "s.json") -> Done:
        code = main([strategy, *COMMON, *arguments])
        return Done(code, *capsys.readouterr())

    return run


@pytest.mark.slow
def test_trains_checks_compares_and_traces(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are started for it, and say nothing."""
    monkeypatch.chdir(folder)
    options = ["--check", "--compare-data-parallel", "--timeline", "t.json", "--memory", "--json", "--dtype", "float64"]
    assert main(["s.json", *COMMON, "--steps", "4", *options]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    report = json.loads(out)
    own, usual = report["strategies"]["strategy"], report["strategies"]["data_parallel"]
    assert (report["processes"], report["backend"], report["steps"]) == (2, "gloo", 4)
    assert len(own["losses"]) == 4 and len(own["steps_ns"]) == 2
    assert own["losses"] == pytest.approx(usual["losses"], rel=1e-9)  # the same training, however it is spread
    assert own["measured_ns"] > 0 and usual["measured_ns"] > 0
    for entry in (own, usual):
        rates, seconds = entry["throughput"]["measured"], entry["measured_ns"] / 1e9
        assert (rates["samples_per_second"], rates["tokens_per_second"]) == pytest.approx((8 / seconds, 8 * 12 / seconds))
        assert rates["arithmetic"] == "float64" and rates["mfu"] > 0
    assert report["check"]["passed"] is True
    assert report["check"]["worst"]["error"] <= report["check"]["tolerance"] == 1e-9
    assert report["check"]["compared_with_eager"] is None and "of the zoo" in report["check"]["eager"]
    events = [event for event in json.loads((folder / "t.json").read_text())["traceEvents"] if event["ph"] == "X"]
    names = {pid: {event["name"] for event in events if event["pid"] == pid} for pid in (0, 1)}
    assert names[1] and names[1] <= names[0]  # every measured task has its predicted one
    assert any(name.startswith("forward ") for name in names[1]) and any(name.startswith("sync ") for name in names[1])
    _expect_comparison(folder, own, capfd)
    for held in report["memory"]:
        assert held["predicted_bytes"] / 1.4 <= held["measured_bytes"] <= 1.25 * held["predicted_bytes"]
    assert len(report["memory"]) == 2


def _expect_comparison(folder: Path, strategy: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """soap-compare of what soap-run wrote says what soap-run said, and counts every task of the plan."""
    assert compare_main([str(folder / "t.json"), "--json", "-o", str(folder / "both.json")]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["predicted"]["iteration_ns"], found["measured"]["iteration_ns"]) == (strategy["predicted_ns"], strategy["measured_ns"])
    assert found["measured"]["iterations"] == 5 and found["measured"]["shown_ns"] > 0
    assert found["not_measured"] == {} and found["not_predicted"] == {}
    counts = {group["name"]: group["tasks"] for group in found["task_kinds"]}
    assert counts["forward"] == counts["backward"] > 0 and counts["update"] == 2 and counts["sync"] > 0 and counts["reduce"] > 0
    assert {group["name"] for group in found["operator_kinds"]} >= {"linear", "layer_norm", "embedding"}
    assert len(found["links"]) == 4 and all(link["measured_ns"] > 0 and link["bytes"] > 0 for link in found["links"])
    assert len(found["worst"]) == 10
    sides = json.loads((folder / "both.json").read_text())["otherData"]["timelines"]
    assert [side["origin"] for side in sides] == ["predicted", "measured"]


@pytest.mark.long
def test_prints_a_table_and_takes_data(run: Run, folder: Path) -> None:
    done = run("--steps", "3", "--data", "mydata:batches", "--optimizer", "adam", "--lr", "0.001")
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout and "measured" in done.stdout and "not measured" in done.stdout
    assert "zoo:gpt:tiny on pair: 2 processes, gloo, 3 steps" in done.stdout
    assert len(list(folder.glob("rank-*"))) == 2


@pytest.mark.long
def test_streams_with_a_smaller_last_batch(run: Run) -> None:
    options = ["--data", "mydata:ragged", "--dtype", "float64", "--steps", "5", "--check", "--json", "--compare-data-parallel"]
    done = run(*options, "--accumulate", "2", "--clip-norm", "0.5", "--timeline", "t.json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    own, usual = report["strategies"]["strategy"], report["strategies"]["data_parallel"]
    assert len(own["losses"]) == 5 and own["losses"] == pytest.approx(usual["losses"], rel=1e-9)
    assert report["check"]["passed"] is True  # of the steps that are checked, the second holds the smaller batch


@pytest.mark.long
def test_autocast_trains_and_is_checked(run: Run, folder: Path) -> None:
    assert run("--autocast", "bfloat16", "--steps", "2").returncode == 5  # the strategy is for another model
    model, cluster = soap.load(MODEL, plan_only=True, autocast="bfloat16"), soap.load_cluster(folder / "cluster.yaml")
    soap.save_strategy(folder / "s.json", soap.api.classical("megatron", model.graph, cluster), model, cluster)
    done = run("--autocast", "bfloat16", "--steps", "2", "--check", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["check"]["tolerance"] == 5e-2


@pytest.mark.long
def test_goes_on_from_a_checkpoint_under_another_strategy(run: Run, folder: Path) -> None:
    """Six steps at once, and four and two with a restart in between: the same losses, on the user's data and with Adam."""
    model, cluster = soap.load(MODEL, plan_only=True), soap.load_cluster(folder / "cluster.yaml")
    soap.save_strategy(folder / "dp.json", soap.api.classical("data_parallel", model.graph, cluster), model, cluster)
    common = ["--data", "mydata:batches", "--optimizer", "adam", "--dtype", "float64", "--json"]
    straight = run("--steps", "6", "--lr", "0.003", "--seed", "4", *common)
    first = run("--steps", "4", "--lr", "0.003", "--seed", "4", "--save", "out", "--save-every", "2", "--keep", "1", *common)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["checkpoint"] == str(Path("out", "step-00000004"))
    assert [path.name for path in (folder / "out").iterdir()] == ["step-00000004"]
    second = run("--steps", "2", "--resume", "out", "--save", "out", *common, strategy="dp.json")
    assert second.returncode == 0, second.stderr
    reports = [json.loads(done.stdout) for done in (first, second, straight)]
    assert [report["resumed_at"] for report in reports] == [0, 4, 0]
    losses = [report["strategies"]["strategy"]["losses"] for report in reports]
    assert losses[0] + losses[1] == pytest.approx(losses[2], rel=1e-9)
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["step-00000004", "step-00000006"]
    again = run("--steps", "1", "--save", "out")
    assert (again.returncode, again.stdout) == (8, "")
    assert "step 6, later than step 0 of this run; resume from it, or save to another folder" in again.stderr


@pytest.mark.long
def test_groups_and_schedules_go_on_from_a_checkpoint(run: Run, folder: Path) -> None:
    """The same command with --resume behind it goes on as if it had never ended; another schedule, or other rates, are refused."""
    model, cluster = soap.load(MODEL, plan_only=True), soap.load_cluster(folder / "cluster.yaml")
    soap.save_strategy(folder / "dp.json", soap.api.classical("data_parallel", model.graph, cluster), model, cluster)
    schedules = ["--schedule", f"{LR}.LinearLR:start_factor=0.1,total_iters=2@2", "--schedule", f"{LR}.CosineAnnealingLR:T_max=4"]
    common = ["--data", "mydata:batches", "--optimizer", "adamw:betas=(0.8,0.99)", "--weight-decay", "0.1", "--lr", "0.003"]
    common += ["--dtype", "float64", "--json", "--seed", "4"]
    straight = run("--steps", "6", "--check", *common, *schedules)
    assert straight.returncode == 0, straight.stderr
    assert json.loads(straight.stdout)["check"]["passed"] is True
    first = run("--steps", "3", "--save", "out", *common, *schedules)
    second = run("--steps", "3", "--resume", "out", *common, *schedules, strategy="dp.json")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    reports = [json.loads(done.stdout) for done in (first, second, straight)]
    losses = [report["strategies"]["strategy"]["losses"] for report in reports]
    assert losses[0] + losses[1] == pytest.approx(losses[2], rel=1e-9)
    other = run("--steps", "1", "--resume", "out", *common)
    assert other.returncode == 8 and "was saved with schedule SequentialLR, this run has none; use the same schedule" in other.stderr
    common[common.index("0.003")] = "0.001"
    faster = run("--steps", "1", "--resume", "out", *common, *schedules)
    assert faster.returncode == 8 and "the checkpoint's schedule began at other learning rates, [" in faster.stderr


@pytest.mark.long
def test_works_under_torchrun(folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *command("--steps", "2", "--json")[1:]]
    done = subprocess.run(torchrun, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["processes"] == 2  # one document, from rank 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "words"), [pytest.param("mydata:nothing", "mydata", marks=pytest.mark.long), ("os:getcwd", "a batch holds str")]
)
def test_bad_data_is_one_line(spec: str, words: str, run: Run) -> None:
    done = run("--steps", "1", "--data", spec)
    assert done.returncode == 8
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("soap-run: error: rank ") and words in last
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("everybody", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.long)])
def test_interrupt_ends_all_ranks(everybody: bool, small: Path) -> None:
    """Ctrl-C in a terminal reaches every process; ``kill -INT`` only the command itself."""
    arguments = command("--steps", "100000000", "--data", "mydata:batches", "--timeline", "t.json", model="words.pt2")
    with subprocess.Popen(
        arguments, cwd=small, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 120
        while len(list(small.glob("rank-*"))) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        (os.killpg if everybody else os.kill)(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert stderr == "soap-run: interrupted\n"
    ranks = [int(path.name.removeprefix("rank-")) for path in small.glob("rank-*")]
    assert len(ranks) == 2
    assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []
    assert not (small / "t.json").exists()
    assert list(small.glob("*.tmp")) == []


@pytest.mark.skipif(not hasattr(signal, "sigtimedwait"), reason="signals are taken by a thread")
@pytest.mark.parametrize(
    "after_s",
    [pytest.param(0.0, marks=pytest.mark.long), pytest.param(1.0, marks=pytest.mark.long), pytest.param(3.0, marks=pytest.mark.long)],
)
def test_interrupt_while_ranks_start_is_one_line(after_s: float, folder: Path) -> None:
    arguments = command("--steps", "100000000", "--data", "mydata:batches")
    with subprocess.Popen(
        arguments, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 120
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while process.poll() is None and not children.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout, stderr) == (130, "", "soap-run: interrupted\n")


@pytest.mark.parametrize("by", often(["soap", "torch"], ["soap"], pytest.mark.slow))
def test_a_check_says_whether_the_program_was_held_against_eager(
    by: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept_ranks: None
) -> None:
    monkeypatch.chdir(folder)
    module, inputs = zoo.build(MODEL).module, zoo.build(MODEL).args
    if by == "soap":
        soap.export(module, inputs, path="m.pt2")
    else:
        torch.export.save(torch.export.export(module, inputs, strict=False), "m.pt2")
    model, cluster = soap.load("m.pt2", plan_only=True), soap.load_cluster("cluster.yaml")
    soap.save_strategy("own.json", soap.api.classical("data_parallel", model.graph, cluster), model, cluster)
    assert main(["own.json", "--model", "m.pt2", "--cluster", "cluster.yaml", "--steps", "1", "--check"]) == 0
    said = {
        "soap": "; the program was compared with eager PyTorch when it was exported",
        "torch": "; the program was never compared with eager PyTorch: exported by torch.export.save",
    }
    assert said[by] in capsys.readouterr().out


SHOP = """
import torch

@torch.library.custom_op("rankshop::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by

scaled.register_fake(lambda x, by: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, gradient: (gradient * ctx.by, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1])
)
"""
EXPORTS = """
import soap, torch, rank_shop
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(rank_shop.scaled(self.first(x), 2.0)).square().mean()

soap.export(Net(), (torch.randn(8, 6),), path="m.pt2", imports=("rank_shop",))
"""


@pytest.mark.long
def test_custom_operators_are_imported_on_every_rank(folder: Path) -> None:
    (folder / "rank_shop.py").write_text(SHOP)
    own: dict[str, Any] = {"cwd": folder, "env": environment(), "capture_output": True, "text": True}
    assert subprocess.run([sys.executable, "-c", EXPORTS], **own).returncode == 0
    strategy = "import sys, soap; sys.path.insert(0, '.'); m = soap.load('m.pt2', plan_only=True, imports=['rank_shop'])"
    saved = "c = soap.load_cluster('cluster.yaml'); soap.save_strategy('own.json', soap.api.classical('data_parallel', m.graph, c), m, c)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", f"{strategy}; {saved}"], **own).returncode == 0
    run = [sys.executable, "-m", "soap.cli.run", "own.json", "--model", "m.pt2", "--cluster", "cluster.yaml", "--steps", "2", "--check"]
    done = subprocess.run([*run, "--json", "--dtype", "float64", "--import", "rank_shop"], **own)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["check"]["passed"] is True
    refused = subprocess.run(run, **own)
    assert refused.returncode == 3 and "calls the operator rankshop::scaled" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.slow
def test_buffers_that_the_forward_pass_moves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept_ranks: None
) -> None:
    """Searched, simulated, trained, checked, saved and resumed by the commands; every task of the plan is measured."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(CLUSTER)
    soap.export(Codebook().train(), (torch.randn(8, 6),), path="model.pt2")
    where = ["--cluster", "cluster.yaml"]
    assert search_main(["model.pt2", *where, "-o", "s.json", "--budget", "20"]) == 0
    assert simulate_main(["model.pt2", *where, "--strategy", "s.json"]) == 0
    capsys.readouterr()
    common = ["s.json", "--model", "model.pt2", *where, "--check", "--json"]
    assert main([*common, "--steps", "4", "--save", "saved", "--timeline", "t.json"]) == 0
    assert json.loads(capsys.readouterr().out)["check"]["passed"] is True
    events = [event for event in json.loads(Path("t.json").read_text())["traceEvents"] if event["ph"] == "X"]
    names = {pid: {event["name"] for event in events if event["pid"] == pid} for pid in (0, 1)}
    assert {f"forward keep_state[{tile}]" for tile in (0, 1)} <= names[1] & names[0]
    assert main([*common, "--steps", "2", "--resume", "saved"]) == 0
    assert json.loads(capsys.readouterr().out)["check"]["passed"] is True
