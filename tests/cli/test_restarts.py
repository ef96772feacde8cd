"""``soap-run --restarts``: training goes on where ranks are lost, on fewer devices where one stays away, with the losses of a run that
nothing has disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import soap
from soap.cli import checkpoints, spare_plans
from soap.cli.checkpoints import Checkpoints
from soap.cli.command import UsageError
from soap.cli.options import Reading
from soap.cli.restarting import Prepared, Restarting, _visible
from soap.cli.run import make_parser
from soap.cli.search import main as search_main
from soap.cli.training import Job, Outcome
from soap.cluster.fewer import without
from soap.cluster.presets import preset
from soap.cluster.topology import Topology
from soap.elastic.processes import descendants, lives, name_of
from soap.errors import RuntimeFailure, TopologyError
from soap.measure.iteration import StepTimes
from soap.runtime.comm.failures import RankLost
from tests.launcher_variables import as_rank

ROOT = Path(__file__).parent.parent.parent
MODEL, STEPS = "zoo:gpt:tiny", 30


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring this machine for each number of processes that may be left takes ten seconds."""
    monkeypatch.setattr("soap.cli.spare_plans.api.load_cluster", preset)


def test_a_cluster_without_devices(unmeasured: None) -> None:
    local = without(preset("local:4"), [1])
    assert (local.name, local.hash) == ("local:3", preset("local:3").hash)
    hosts = preset("emulated:2x2@1Gbit/s")
    left = without(hosts, [1])
    assert [device.name for device in left.devices] == [hosts.devices[i].name for i in (0, 2, 3)]
    assert [device.host for device in left.devices] == [0, 1, 1] and [device.index for device in left.devices] == [0, 1, 2]
    assert left.route_latency_seconds(0, 1) == hosts.route_latency_seconds(0, 2)
    assert [left.links[n].bandwidth_bytes_per_second for n in left.stated] == [
        hosts.links[n].bandwidth_bytes_per_second for n in hosts.stated
    ]
    assert hosts.devices[1].name in left.name
    with pytest.raises(TopologyError, match="has lost all of its 2 devices"):
        without(preset("local:2"), [0, 1])
    assert [own.name for own in spare_plans.topologies(preset("local:4"))] == ["local:3"]
    assert len(spare_plans.topologies(hosts)) == 4 and not spare_plans.topologies(preset("local:1"))


def test_gpus_that_are_left_are_seen_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with _visible([0, 1]):
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    with _visible([0, 2, 3]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,2,3"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    with _visible([0, 2, 3]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6,7"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


class Ranks:
    """What ranks do, without ranks: note each step's loss, leave checkpoints, and are lost as ``losses`` says: (steps done since the last
    start, the rank) for each start; then they finish."""

    def __init__(self, losses: list[tuple[int, int | None]]) -> None:
        self._losses = iter(losses)
        self.jobs: list[Job] = []
        self.planned: list[tuple[str, Path | None]] = []

    def start(self, job: Job) -> Outcome:
        self.jobs.append(job)
        first = job.checkpoints.resumed_at
        steps, rank = next(self._losses, (job.steps, -1))
        assert job.journal is not None and job.checkpoints.save is not None and job.checkpoints.save_every is not None
        for step in range(first, first + steps):
            checkpoints.note_step(job.journal, step, step / 7)
            if (step + 1) % job.checkpoints.save_every == 0 or step + 1 == first + job.steps:
                folder = Path(job.checkpoints.save) / f"step-{step + 1:08}"
                folder.mkdir(parents=True)
                (folder / "soap.json").touch()
        if rank != -1:
            raise RankLost(f"rank {rank} failed: killed by SIGKILL", rank)
        return Outcome("gloo", {job.main: StepTimes((1,), ())}, None, (), saved=str(folder))

    def replan(self, topology: Topology, plan: Path | None, new: Path) -> Prepared:
        self.planned.append((topology.name, plan))
        return Prepared(replace(self.jobs[0], topology=topology, seed=1), {}, {})


def restarting(ranks: Ranks, most: int, said: list[str], save: Path | None = None, spare: Path | None = None) -> Restarting:
    strategies: Any = {"strategy": ((), ())}
    own = Checkpoints("before", 5, 3, str(save) if save else None)
    job = Job(MODEL, Reading(), preset("local:4"), strategies, STEPS, 3, "sgd", checkpoints=own)
    return Restarting(Prepared(job, {}, {}), most, ranks.start, ranks.replan, said.append, str(spare) if spare else None)


def test_training_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """Lost before the first checkpoint, behind it, and behind the last step, which is done again."""
    ranks, said = Ranks([(3, 1), (18, 1), (0, None), (15, 2)]), list[str]()
    run = restarting(ranks, 4, said, tmp_path)
    outcome = run.train()
    assert [(job.checkpoints.resumed_at, job.steps) for job in ranks.jobs] == [(5, 30), (5, 30), (20, 15), (20, 15), (30, 5)]
    assert [job.checkpoints.resume for job in ranks.jobs[:3]] == ["before", "before", str(tmp_path / "step-00000020")]
    assert outcome is not None and outcome.measured["strategy"].losses == tuple(step / 7 for step in range(5, 35))
    assert outcome.saved == str(tmp_path / "step-00000035")
    assert said[1] == "rank 1 failed: killed by SIGKILL; restart 2 of 4: training goes on after step 20 on 4 devices"
    assert [(one.step, one.devices) for one in run.restarts] == [(5, 4), (20, 4), (20, 4), (30, 4)] and not ranks.planned


def test_a_rank_that_dies_at_once_again_is_left_out(unmeasured: None, tmp_path: Path) -> None:
    """By the plan that was prepared for what is left, if there is one."""
    soap.save_strategy(tmp_path / "a.json", soap.api.classical("data_parallel", *gpt("local:4")), *gpt("local:4"))
    soap.save_strategy(tmp_path / "b.json", soap.api.classical("data_parallel", *gpt("local:3")), *gpt("local:3"))
    (tmp_path / "c.json").write_text("no plan")
    ranks, said = Ranks([(12, 2), (0, 2), (0, 2), (0, 0), (0, 2), (0, 2)]), list[str]()
    run = restarting(ranks, 6, said, spare=tmp_path)
    outcome = run.train()
    assert [job.topology.name for job in ranks.jobs] == ["local:4"] * 3 + ["local:3"] * 3 + ["local:2"]
    assert ranks.planned == [("local:3", tmp_path / "b.json"), ("local:2", None)]
    assert {job.seed for job in ranks.jobs} == {3} and ranks.jobs[-1].checkpoints.resumed_at == 10
    left_out = f"without {preset('local:4').devices[2].name}"
    assert said[2].endswith(f"training goes on after step 10 on 3 devices, {left_out}") and "without" not in said[1]
    assert said[5].endswith(f"on 2 devices, {left_out}, {preset('local:4').devices[3].name}")
    assert outcome is not None and outcome.saved is None, "its folder is gone"
    assert not Path(str(ranks.jobs[0].checkpoints.save)).exists()


def test_beyond_the_restarts_it_ends_in_one_line(tmp_path: Path) -> None:
    ranks, said = Ranks([(12, 0), (0, 1), (0, 1)]), list[str]()
    told = r"^rank 1 failed: killed by SIGKILL; that was after 2 restarts, and is the end: --resume .* goes on from there$"
    with pytest.raises(RuntimeFailure, match=told):
        restarting(ranks, 2, said, tmp_path).train()
    assert len(said) == 2 and (tmp_path / "step-00000010").exists()


def gpt(cluster: str) -> tuple[Any, Any]:
    return soap.load(MODEL, plan_only=True).graph, preset(cluster)


def test_a_line_that_was_not_finished_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert checkpoints.noted_losses(log) == {}
    for step, loss in ((0, 0.1), (1, 1 / 3), (0, 0.2)):
        checkpoints.note_step(str(log), step, loss)
    with log.open("a") as stream:
        stream.write("2 0.")
    assert checkpoints.noted_losses(log) == {0: 0.2, 1: 1 / 3}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--spare-plans", "."], "--spare-plans without --restarts"),
        (["--restarts", "2", "--compare-data-parallel"], "--restarts with --compare-data-parallel"),
        (["--restarts", "2", "--spare-plans", "nowhere"], "--spare-plans 'nowhere' is no folder"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], said: str) -> None:
    from soap.cli.restarting import check_possible

    with pytest.raises(UsageError, match=said):
        check_possible(make_parser().parse_args(["s.json", "--model", MODEL, *options]))


def test_torchrun_restarts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from soap.cli.restarting import check_possible

    as_rank(monkeypatch, 0, 2)
    with pytest.raises(UsageError, match="under torchrun, which starts ranks itself"):
        check_possible(make_parser().parse_args(["s.json", "--model", MODEL, "--restarts", "1"]))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_spare_plans_fit_what_is_left(tmp_path: Path) -> None:
    options = ["--cluster", "local:3", "--profile", "0", "--verify", "0", "--budget", "20", "-o", str(tmp_path / "s.json")]
    assert search_main([MODEL, *options, "--spare-plans", str(tmp_path / "spare")]) == 0
    (path,) = (tmp_path / "spare").iterdir()
    soap.load_strategy(path, *gpt("local:2"))
    run = restarting(Ranks([]), 1, [], spare=tmp_path / "spare")
    assert run._prepared_plan(preset("local:2")) == path and run._prepared_plan(preset("local:3")) is None


DATA = """
import os, signal, time
import torch

def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        time.sleep(0.05)
        yield [torch.randint(8, shape, generator=generator) for shape in {shapes}]

def deadly():
    if os.environ["RANK"] == "1" and os.environ["WORLD_SIZE"] == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    yield from batches()
"""
COMMON = ("--model", MODEL, "--dtype", "float64", "--steps", str(STEPS), "--optimizer", "adam", "--lr", "0.003", "--json")


CLUSTER = """
name: box of three
device_types: {core: {kind: cpu, flops: {float32: 50 GFLOP/s}, memory_bandwidth: 10 GB/s, memory: 4 GiB, kernel_overhead: 5 us}}
hosts:
  - {name: box, devices: {type: core, count: 3}, cpu_cores: 3, memory: 8 GiB, links: {intra: {bandwidth: 1 GB/s, latency: 50 us}}}
"""
Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a strategy for three devices, and data."""
    found = tmp_path_factory.mktemp("restarts")
    (found / "cluster.yaml").write_text(CLUSTER)
    graph, cluster = soap.load(MODEL, plan_only=True).graph, soap.load_cluster(found / "cluster.yaml")
    soap.save_strategy(found / "s.json", soap.api.classical("data_parallel", graph, cluster), graph, cluster)
    names = soap.load(MODEL, plan_only=True).input_names
    (found / "mydata.py").write_text(DATA.format(shapes=[tuple(graph.tensors[name].shape) for name in names]))
    return found


@pytest.fixture(scope="module")
def begin(folder: Path) -> Iterator[Begin]:
    """Starts the command."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str, data: str = "mydata:batches") -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "soap.cli.run", "s.json", "--cluster", "cluster.yaml", *COMMON, "--data", data, *options]
        own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(words, cwd=folder, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


@pytest.fixture(scope="module")
def straight(begin: Begin) -> list[float]:
    """The losses of a run that nothing disturbs."""
    return losses(begin())[0]


def losses(run: subprocess.Popen[str]) -> tuple[list[float], dict[str, Any], str]:
    """What a run says at its end: losses, report, and what it told on its way."""
    out, told = run.communicate(timeout=500)
    assert run.returncode == 0, told
    report = json.loads(out)
    return report["strategies"]["strategy"]["losses"], report, told


def kill_a_rank(run: subprocess.Popen[str], draw: random.Random, saves: Path, least: int) -> None:
    """At a random moment behind so many steps."""
    end_s = time.monotonic() + 300
    while latest(saves) < least:
        assert time.monotonic() < end_s and run.poll() is None, "no steps are done"
        time.sleep(0.02)
    time.sleep(draw.random() * 0.3)
    server = next(one for one in descendants(run.pid) if "forkserver" in name_of(one))  # ranks are forked from it
    os.kill(draw.choice([one for one in descendants(server) if lives(one)]), signal.SIGKILL)


def latest(saves: Path) -> int:
    return max((int(path.name[5:13]) for path in saves.glob("step-*")), default=0)


def at_work_in(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(process / "cwd") == str(folder) and lives(int(process.name)):
                found.append(name_of(int(process.name)))
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("restarts", [2, 1])
def test_killed_ranks_leave_the_curve_as_it_was(begin: Begin, folder: Path, straight: list[float], restarts: int) -> None:
    """Two ranks at random moments; with one restart that is one too many."""
    draw, saves = random.Random(), folder / f"out-{restarts}"
    run = begin("--restarts", str(restarts), "--save", saves.name, "--save-every", "4")
    for kill in range(2):
        kill_a_rank(run, draw, saves, 4 * (2 * kill + 1))
    if restarts == 2:
        found, report, told = losses(run)
        assert found == pytest.approx(straight, rel=1e-9) and len(report["restarts"]) == 2
        assert told.count("training goes on after step") == 2 and report["checkpoint"] == f"{saves.name}/step-{STEPS:08}"
    else:
        out, told = run.communicate(timeout=300)
        lines = [line for line in told.splitlines() if line.startswith("soap-run: ")]
        assert run.returncode == 8 and not out and len(lines) == 2, told
        assert f"that was after 1 restarts, and is the end: --resume {saves.name} goes on from there" in lines[-1]
    assert not at_work_in(folder)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_device_that_stays_away_is_left_out(begin: Begin, folder: Path, straight: list[float], prepared: bool) -> None:
    spare = []
    if prepared:
        graph, cluster = soap.load(MODEL, plan_only=True).graph, without(soap.load_cluster(folder / "cluster.yaml"), [1])
        (folder / "spare").mkdir()
        soap.save_strategy(folder / "spare" / "two.json", soap.api.classical("data_parallel", graph, cluster), graph, cluster)
        spare = ["--spare-plans", "spare"]
    found, report, told = losses(begin("--restarts", "3", *spare, data="mydata:deadly"))
    assert found == pytest.approx(straight, rel=1e-9)
    assert report["processes"] == 2 and [one["devices"] for one in report["restarts"]] == [3, 2]
    assert ("searching a plan for 2 devices" in told) is not prepared
    assert not at_work_in(folder)
