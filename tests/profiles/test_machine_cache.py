"""The cache of measurements: what is saved is loaded, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from soap.files import cache_folder
from soap.measure import machine_cache
from soap.measure.link_probe import LinkRates
from soap.measure.link_probes import LinkTiming, Operation, Probe
from soap.measure.machine_cache import Measurement, cache_path, load, save
from tests.strategies import CPU

KEY = {"cpu": "some processor", "devices": 2}
MESSAGE = LinkTiming(Probe(Operation.MESSAGE, (0, 1), 1024), (5e-5,), 2e-5)
SUM = LinkTiming(Probe(Operation.STEP_SUM, (0, 1), 4), (1e-3,), 0.0)
MEASURED = Measurement(CPU, LinkRates(1e9, 5e-5), (MESSAGE, SUM))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "soap"


@pytest.mark.parametrize(
    "measurement", [MEASURED, replace(MEASURED, timings=None, failed_at=1.7e9), replace(MEASURED, timings=None), Measurement(CPU)]
)
def test_what_was_saved_is_loaded(measurement: Measurement, folder: Path) -> None:
    assert load(KEY) is None
    save(KEY, measurement)
    assert load(KEY) == measurement
    assert load({**KEY, "devices": 3}) is None
    assert [path.suffix for path in folder.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\udcff",
        "[" * 100_000,
        '{"version": 1}',
    ],
)
def test_a_corrupt_file_is_ignored_and_replaced(text: str) -> None:
    save(KEY, MEASURED)
    path = cache_path(KEY)
    assert path is not None
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert load(KEY) is None
    save(KEY, MEASURED)
    assert load(KEY) == MEASURED


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", 3), ("memory_bytes", 1.5), ("kernel_seconds", "fast"), ("flops_per_second", {"float32": -1}), ("flops_per_second", [])],
)
def test_a_file_with_wrong_values_is_ignored(field: str, value: object) -> None:
    save(KEY, MEASURED)
    path = cache_path(KEY)
    assert path is not None
    record = json.loads(path.read_text())
    record["measurement"]["device"][field] = value
    path.write_text(json.dumps(record))
    assert load(KEY) is None


def test_timings_of_another_kind_are_absent_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    save(KEY, MEASURED)
    monkeypatch.setattr(machine_cache, "TIMINGS_VERSION", machine_cache.TIMINGS_VERSION + 1)
    assert load(KEY) == replace(MEASURED, timings=None)


@pytest.mark.parametrize("timings", [{}, [1], [{"operation": "message"}]])
def test_a_file_with_wrong_timings_is_ignored(timings: object) -> None:
    save(KEY, MEASURED)
    path = cache_path(KEY)
    assert path is not None
    record = json.loads(path.read_text())
    record["measurement"]["timings"] = timings
    path.write_text(json.dumps(record))
    assert load(KEY) is None


def test_another_version_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    save(KEY, MEASURED)
    monkeypatch.setattr(machine_cache, "VERSION", machine_cache.VERSION + 1)
    assert load(KEY) is None


def test_an_unusable_folder_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="is not kept"):
        save(KEY, MEASURED)
    assert load(KEY) is None


def test_relative_cache_homes_are_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: tmp_path))
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "soap"


def test_no_home_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(cls: type[Path]) -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(homeless))
    save(KEY, MEASURED)
    assert load(KEY) is None
