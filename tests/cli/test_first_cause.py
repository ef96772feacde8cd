"""``soap-run`` with a rank that fails: one line says what went wrong there first, however the others notice, and nothing is left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import soap
from soap.cli.run import main
from tests.cli import faults

CLUSTER = """
name: some
device_types: {{core: {{kind: cpu, flops: {{float32: 50 GFLOP/s}}, memory_bandwidth: 10 GB/s, memory: 4 GiB, kernel_overhead: 5 us}}}}
hosts:
  - name: box
    devices: {{type: core, count: {ranks}}}
    cpu_cores: 2
    memory: 8 GiB
    links: {{intra: {{bandwidth: 1 GB/s, latency: 50 us}}}}
"""
ROOT = Path(__file__).parents[2]
ROUNDS = 50
QUICK = [("killed", 2)]
"""A process that is ended; in ``test_launch`` a rank fails, crashes and hangs without ``soap-run``."""
CASES = [(kind, ranks) for ranks in (2, 4) for kind in faults.CAUSES]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, and a cluster and a strategy for each number of ranks, which splits parameters and samples."""
    folder = tmp_path_factory.mktemp("words")
    torch.manual_seed(0)
    soap.export(faults.Words(), (torch.zeros(faults.SHAPE, dtype=torch.int64),) * 2, path=folder / "words.pt2")
    model = soap.load(folder / "words.pt2", plan_only=True)
    for ranks in (2, 4):
        (folder / f"{ranks}.yaml").write_text(CLUSTER.format(ranks=ranks))
        cluster = soap.load_cluster(folder / f"{ranks}.yaml")
        soap.save_strategy(folder / f"{ranks}.json", soap.api.classical("megatron", model.graph, cluster), model, cluster)
    return folder


def command(kind: str, ranks: int, place: Path) -> list[str]:
    strategy, model, cluster = (str(place / name) for name in (f"{ranks}.json", "words.pt2", f"{ranks}.yaml"))
    return [strategy, "--model", model, "--cluster", cluster, "--steps", "4", "--data", f"tests.cli.faults:{kind}"]


def expect_first_cause(kind: str, ranks: int, place: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Run, and look at what is told."""
    code = main(command(kind, ranks, place))
    told = capfd.readouterr()
    cause = faults.CAUSES[kind].replace("LAST", str(ranks - 1))
    assert re.fullmatch(rf"soap-run: error: rank {ranks - 1} failed: {cause}\n", told.err), told.err
    assert (code, told.out) == (8, "")
    started = [int(path.name.removeprefix("rank-")) for path in folder.glob("rank-*")]
    assert len(started) == ranks
    if sys.platform == "linux":
        assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.long
def test_a_run_that_succeeds_says_nothing_on_standard_error(place: Path, tmp_path: Path) -> None:
    soap_run = [sys.executable, "-m", "soap.cli.run", *command("sound", 2, place), "--check", "--memory", "--compare-data-parallel"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(soap_run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("kind", "ranks"), QUICK)
def test_first_cause_is_told(
    kind: str, ranks: int, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expect_first_cause(kind, ranks, place, tmp_path, capfd)


@pytest.mark.long
def test_under_torchrun_each_rank_tells_its_own(place: Path, tmp_path: Path) -> None:
    """Whoever only noticed either is ended before it says anything, or says so."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "soap.cli.run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *command("after_closing", 2, place)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == ""
    told = [line for line in done.stderr.splitlines() if line.startswith("soap-run: ")]
    own = [line for line in told if re.fullmatch(rf"soap-run: error: rank 1 failed: {faults.CAUSES['after_closing']}", line)]
    assert len(own) == 1, done.stderr
    assert all(line.startswith("soap-run: error: rank 0 ends because another rank has; ") for line in told if line not in own)


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", range(ROUNDS))
def test_first_cause_is_told_every_time(
    number: int, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds on two and four ranks, again and again."""
    monkeypatch.chdir(tmp_path)
    kind, ranks = CASES[number % len(CASES)]
    expect_first_cause(kind, ranks, place, tmp_path, capfd)
