"""What ``import soap`` offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import soap

EXPECTED = {
    "export", "load", "load_cluster", "load_strategy", "measure_rows", "save_strategy", "search", "simulate",
    "get_runner", "partitioner", "shard", "tune", "RunnerConfig",
    "SearchOutcome", "Trainer", "OperatorGraph", "OpConfig", "Strategy", "SyncConfig", "Topology",
    "SoapError", "InfeasibleError", "ModelError", "ProfileError", "RuntimeFailure", "StrategyError", "TopologyError",
    "__version__",
}  # fmt: skip


def test_public_names_are_these() -> None:
    assert set(soap.__all__) == EXPECTED
    assert len(soap.__all__) == len(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(soap, name)
    assert name in dir(soap)
    if name != "__version__":
        assert value.__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'soap' has no attribute 'searhc'"):
        soap.searhc  # noqa: B018


def test_all_can_be_imported_by_star() -> None:
    names: dict[str, object] = {}
    exec("from soap import *", names)
    assert set(soap.__all__) <= names.keys()


@pytest.mark.parametrize("first", ["import soap", "import soap.search", "from soap.search.space import *", "import soap.api"])
def test_search_is_a_package_and_the_verb(first: str) -> None:
    program = f"{first}; import soap, soap.search as package; assert soap.search is package and callable(soap.search), soap.search"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_search_forwards_to_the_composition_root(monkeypatch: pytest.MonkeyPatch) -> None:
    import soap.api

    monkeypatch.setattr(soap.api, "search", lambda *args, **kwargs: (args, kwargs))
    assert soap.search("model", "cluster", budget=3) == (("model", "cluster"), {"budget": 3})


def test_version_is_the_distribution_s() -> None:
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert soap.__version__ == project["version"]
