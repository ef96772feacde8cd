"""Measuring a link: a real run between two processes, and what happens if it fails."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from soap.cluster.presets import local_topology
from soap.errors import ProfileError
from soap.measure.link_probe import LinkRates, measure_link
from soap.measure.link_probes import Operation, probes_for, quick_probes, with_measured_links


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_two_processes_measure_and_leave_nothing_behind(temporary_folder: Path) -> None:
    before = dict(os.environ)
    rates, timings = measure_link()
    assert rates.bandwidth_bytes_per_second > 1e6
    assert 0 < rates.latency_seconds < 1
    assert timings == ()
    assert list(temporary_folder.iterdir()) == []
    assert dict(os.environ) == before


@pytest.mark.long
def test_three_processes_measure_what_training_has(temporary_folder: Path) -> None:
    topology = local_topology(3)
    rates, timings = measure_link(3)
    assert [timing.probe for timing in timings] == quick_probes(topology)
    assert rates.latency_seconds < 1 and all(len(timing.seconds) == 1 for timing in timings)
    assert with_measured_links(topology, timings).cpu_overhead.of_exchange(3).fixed_ns > 0
    assert list(temporary_folder.iterdir()) == []


@pytest.mark.parametrize("cores", [2, 8])
def test_quick_probes_are_some_of_all_and_say_what_predictions_need(cores: int) -> None:
    for count in (2, 3, 4, 8):
        topology = local_topology(count)
        topology = replace(topology, hosts=(replace(topology.hosts[0], cpu_cores=cores),))
        quick = quick_probes(topology)
        assert set(quick) < set(probes_for(topology)) and len(quick) <= 18
        left = {probe.operation for probe in probes_for(topology)} - {probe.operation for probe in quick}
        among_two = {Operation.ALL_TO_ALL} if count == 2 else set()
        assert left == among_two | ({Operation.STEP_COLD_PENALTY, Operation.STEP_WAIT} if count > cores else set())
        assert max(len(probe.devices) for probe in quick) == count
    assert quick_probes(local_topology(1)) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('no gloo here')", "measuring links between 2 processes failed: no gloo here; check that torch has gloo"),
        ("print('hello')", "expected a JSON record"),
        ("print('[1]')", "expected a JSON record"),
        ('print(\'{"bandwidth_bytes_per_second": -1, "latency_seconds": 1}\')', "expected finite numbers above 0"),
    ],
)
def test_a_run_that_fails_says_why_in_one_line(code: str, message: str, temporary_folder: Path) -> None:
    with pytest.raises(ProfileError) as caught:
        measure_link(command=("-c", code))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(temporary_folder.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_hangs_is_ended(temporary_folder: Path) -> None:
    code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"
    pids = temporary_folder / "pids"
    pids.mkdir()
    with pytest.raises(ProfileError, match="took too long"):
        measure_link(timeout_seconds=1.0, command=("-c", f"import sys; sys.argv[1] = {str(pids)!r}; {code}"))
    numbers = [int(path.name) for path in pids.iterdir()]
    assert len(numbers) <= 2  # a busy machine may not even have started them
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_without_a_python_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "missing"))
    with pytest.raises(ProfileError, match="cannot start a process to measure links"):
        measure_link()


@pytest.mark.parametrize(("bandwidth", "latency"), [(0.0, 1.0), (1.0, float("nan")), ("fast", 1.0)])
def test_rates_are_positive_numbers(bandwidth: float, latency: float) -> None:
    with pytest.raises(ProfileError, match="expected finite numbers above 0"):
        LinkRates(bandwidth, latency)
