"""What is released: a source distribution that has all that its wheel needs, a wheel that has every package and data file and works where
nothing else of the source tree is, and types that a consumer's checker sees."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BESIDE = ("MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "constraints.txt")
"""What the source distribution has beside the package."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it; without network, and away from the source tree, which
    must stay as it is."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("released")
    files = f"soap simulator search profiles tests/test_*.py pyproject.toml {' '.join(BESIDE)}"
    subprocess.run(f"tar --exclude=__pycache__ -cf - {files} | tar -xf - -C {source}", shell=True, cwd=ROOT, check=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(released: Path) -> Path:
    (path,) = released.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_source_distribution_has_the_package_alone(released: Path) -> None:
    (path,) = released.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [Path(*Path(own.name).parts[1:]).as_posix() for own in archive.getmembers() if own.isfile()]
    rest = {name for name in names if not name.startswith(("soap/", "soap_search.egg-info/"))}
    assert rest == {*BESIDE, "pyproject.toml", "PKG-INFO", "setup.cfg"}


def test_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (path for path in (ROOT / "soap").rglob("*") if path.is_file() and not {"__pycache__", ".mypy_cache"} & set(path.parts))
    assert names == {path.relative_to(ROOT).as_posix() for path in files}


def test_wheel_declares_commands_and_license(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    text = archive.read(entry_points).decode()
    for command in ("search", "run", "simulate", "diff"):
        assert f"soap-{command} = soap.cli.start:{command}" in text
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


@pytest.mark.slow
def test_wheel_works_alone(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:  # a pure wheel: what pip does, without asking for its dependencies
        archive.extractall(target)
    program = f"""
import sys; sys.path.insert(0, {str(target)!r})
import json, soap
cluster = soap.load_cluster("p100-4x4")
print(json.dumps([soap.__file__, cluster.device_count, "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [str(target / "soap" / "__init__.py"), 16, False]


CONSUMER = """
from collections.abc import Iterable
from typing import assert_type

import soap


def plan(path: str) -> soap.Strategy:
    graph = soap.load(path, plan_only=True).graph
    assert_type(graph, soap.OperatorGraph)
    cluster = soap.load_cluster("p100-4x4")
    assert_type(cluster, soap.Topology)
    outcome = soap.find(graph, cluster, soap.SearchOptions(budget=100))
    assert_type(outcome, soap.SearchOutcome)
    assert_type(soap.simulate(graph, cluster, outcome.strategy).makespan_ns, int)
    assert_type(soap.fits(graph, cluster).fits, bool)
    soap.save_strategy("strategy.json", outcome.strategy, graph, cluster)
    return outcome.strategy


def train(path: str, strategy: soap.Strategy, cluster: soap.Topology, batches: Iterable[soap.PartBatch]) -> None:
    trainer = soap.Trainer(soap.load(path), (strategy, cluster), accumulate=2)
    for batch in batches:
        trainer.step(batch)
    trainer.save("checkpoints")


def wrong(strategy: soap.Strategy) -> None:
    soap.find("model.pt2", "p100-4x4", budget=100)
    soap.simulate("model.pt2", "p100-4x4", 4)
    strategy.microbatches = 2
    soap.search("model.pt2")
"""
WRONG = (("budget", "call-arg"), ("argument 3", "arg-type"), ("read-only", "misc"), ("not callable", "operator"))
"""Of the last four lines: a word of what the checker says of each, and its name of the error."""


@pytest.mark.long
def test_a_consumer_s_checker_sees_the_types(wheel: Path, tmp_path: Path) -> None:
    """mypy takes types from an installed package alone, so the wheel lies in an environment of its own, above this one's packages."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    (tmp_path / "script.py").write_text(CONSUMER, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(environment / "bin" / "python"), "--cache-dir", "cache"]
    done = subprocess.run([*command, "--config-file", "", "script.py"], cwd=tmp_path, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    first = CONSUMER.splitlines().index("def wrong(strategy: soap.Strategy) -> None:") + 2
    assert len(found) == len(WRONG), done.stdout + done.stderr
    for number, (line, (word, name)) in enumerate(zip(found, WRONG, strict=True), first):
        assert line.startswith(f"script.py:{number}: ") and word in line.lower() and line.endswith(f"[{name}]"), line
