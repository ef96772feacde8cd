"""What ``import soap`` offers."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest
import torch

import soap

EXPECTED = {
    "classical", "export", "find", "fits", "load", "load_cluster", "load_strategy", "measure_rows", "preprocess", "save_strategy",
    "simulate", "simulate_beside", "Job", "find_servers", "simulate_servers", "ServersOutcome",
    "get_runner", "partitioner", "shard", "tune", "without_weights", "PartBatch", "RunnerConfig", "StepMetrics",
    "SearchOptions", "SearchOutcome", "Trainer", "TrainingOptions", "OperatorGraph", "OpConfig", "Strategy", "SyncConfig", "Topology",
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


def test_search_is_a_package_like_any_other() -> None:
    program = "import soap, soap.search, types; assert type(soap) is type(soap.search) is types.ModuleType and not callable(soap.search)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_classical_strategies_take_what_the_other_verbs_take() -> None:
    cluster, graph = soap.load_cluster("local:2"), soap.load("zoo:rnnlm:tiny", plan_only=True).graph
    assert soap.classical("megatron", "zoo:rnnlm:tiny", "local:2") == soap.classical("megatron", graph, cluster)
    with pytest.raises(soap.StrategyError, match="no strategy is named 'megatorn'; expected one of single_device, "):
        soap.classical("megatorn", graph, cluster)


def test_version_is_the_distribution_s() -> None:
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert soap.__version__ == project["version"]


def test_a_module_is_refused_with_what_to_do() -> None:
    for verb in (lambda module, cluster: soap.simulate(module, cluster, "data_parallel"), soap.find):
        with pytest.raises(soap.ModelError, match=r"^a Linear cannot be planned: expected .*; export a module first: soap"):
            verb(torch.nn.Linear(2, 2), "h100-2")


def test_a_field_of_the_options_by_itself_is_refused_with_what_to_write() -> None:
    told = "find takes no budget: write soap.find(model, cluster, soap.SearchOptions(budget=300, seed=1))"
    with pytest.raises(TypeError, match=f"^{re.escape(told)}$"):
        soap.find("zoo:gpt:tiny", "h100-2", budget=300, seed=1)  # type: ignore[call-arg]


def test_help_shows_options_as_they_are_written() -> None:
    assert "options: 'SearchOptions' = SearchOptions()," in str(inspect.signature(soap.find))
    options = soap.SearchOptions(budget=300, pins={"layers.*": "sample:4"}, risk=None)
    assert eval(repr(options), {"SearchOptions": soap.SearchOptions}) == options
    assert repr(options) == "SearchOptions(budget=300, pins=(('layers.*', 'sample:4'),), risk=None)"
