"""Predictions and plans are those of ``predictions/*.json``, to the nanosecond, the byte and the region, however the code is laid out.

A change that is meant to move them writes the fixtures anew (``python -m tests.golden.write``), and its diff shows what has moved.
"""

from __future__ import annotations

import copy

import pytest
import torch

from soap import zoo
from tests.extent import often
from tests.golden import adapter, figures
from tests.golden.clusters import cluster_names, golden_cluster
from tests.golden.write import forbidden_change

QUICK = {"dlrm", "gpt", "lm1b"}
"""Models of the quick suite, on 4 devices: matrix chains, tables on servers and as rows."""
USUAL = ("full-mesh", "ports-several", "waiting-cores")
"""Clusters: GPUs, CPUs with ports, CPUs without."""

LARGE = {"inception_v3", "resnet101", "resnet152", "vgg16", "vgg19"}
"""Models that `make test` has on no cluster. It has the quick ones on all usual clusters, and each other one on one of them in turn."""


def marks(count: int, model: str, cluster: str) -> list[pytest.MarkDecorator]:
    """All of it takes minutes: `make quick` and `make test` have parts."""
    name, narrow, turn = model.partition(":")[0], "/" in model, figures.models(count).index(model) % len(USUAL)
    if count != 4 or name in LARGE or cluster not in (USUAL if name in QUICK and not narrow else USUAL[turn : turn + 1]):
        return [pytest.mark.long]
    return [] if name in QUICK and not narrow else [pytest.mark.slow]


CASES = [
    pytest.param(count, model, name, id=f"{count}-{model}-{name}", marks=marks(count, model, name))
    for count in figures.COUNTS
    for model in figures.models(count)
    for name in cluster_names(count)
]


@pytest.mark.parametrize("count", figures.COUNTS)
def test_clusters_and_costs_are_the_same(count: int) -> None:
    stored, found = figures.stored(count), figures.header(count)
    assert found["columns"] == stored["columns"]
    assert found["clusters"] == stored["clusters"]


@pytest.mark.parametrize("count", figures.COUNTS)
def test_every_model_of_the_zoo_has_figures(count: int) -> None:
    stored = figures.stored(count)
    assert sorted(stored["models"]) == figures.models(count)
    assert {model.partition(":")[0] for model in stored["models"]} == set(zoo.names())
    for own in stored["models"].values():
        assert set(own) == {"graph", *stored["clusters"]}
        assert {"data_parallel", "megatron", "parameter_server", "drawn-0", "drawn-1", "drawn-2"} <= set(own["full-mesh"])


@pytest.mark.parametrize(("count", "model", "cluster"), CASES)
def test_predictions_and_plans_are_the_same(count: int, model: str, cluster: str) -> None:
    stored = figures.stored(count)
    part, own = stored["models"][model], golden_cluster(cluster, count)
    found = adapter.graph_of(model).hash
    if found != part["graph"]:
        told = f"{model}: expected graph {part['graph']}, found {found}"
        if torch.__version__.partition("+")[0] == stored["torch"]:
            pytest.fail(told, pytrace=False)
        pytest.skip(f"{told}: torch {torch.__version__} exports another one than torch {stored['torch']}, of which the figures are")
    different = [str(one) for one in figures.differences(model, cluster, own.ports, part[cluster], figures.on_cluster(model, own))]
    if different:
        pytest.fail(f"{len(different)} entries are not as stored; the first:\n{different[0]}", pytrace=False)


def test_a_difference_is_told_with_its_place_and_figures() -> None:
    expected = figures.stored(4)["models"]["gpt:tiny"]["ports-single"]
    found = copy.deepcopy(expected)
    assert not list(figures.differences("gpt:tiny", "ports-single", True, expected, found))
    changed, times = found["megatron"], adapter.COLUMNS.index("times")
    before = changed[0]
    changed[0], changed[times] = before + 7, "another"
    (told,) = figures.differences("gpt:tiny", "ports-single", True, expected, found)
    assert str(told).startswith(f"gpt:tiny on ports-single (with ports), megatron: expected {before} ns, found {before + 7} ns (+")
    assert str(told).endswith("%); different: makespan_ns, times")
    del found["drawn-1"]
    first, _ = figures.differences("gpt:tiny", "full-mesh", False, expected, found)
    assert str(first) == "gpt:tiny on full-mesh (without ports), drawn-1: in the fixture alone"


def test_figures_are_written_anew_only_where_that_is_meant() -> None:
    before = figures.stored(4)
    assert forbidden_change(before, copy.deepcopy(before)) == ""
    with_ports = copy.deepcopy(before)
    with_ports["models"]["gpt:tiny"]["ports-several"]["drawn-1"][0] += 1
    with_ports["clusters"]["ports-several"]["costs"] = "another"
    assert forbidden_change(before, with_ports) == ""
    without = copy.deepcopy(before)
    without["models"]["gpt:tiny"]["pairs"]["drawn-1"][0] += 1
    assert forbidden_change(before, without).startswith("gpt:tiny on pairs (without ports), drawn-1: expected ")
    other = copy.deepcopy(before)
    other["clusters"]["pairs"]["costs"] = "another"
    assert forbidden_change(before, other).startswith("cluster pairs: expected ")
    del without["models"]["nmt:tiny"]
    assert forbidden_change(before, without).endswith("found none")


@pytest.mark.parametrize("searched", often(figures.SEARCHED, figures.SEARCHED[:2], pytest.mark.slow))
def test_searches_find_the_same(searched: tuple[str, str, int]) -> None:
    """Of GPUs, and of CPUs with ports."""
    stored = figures.read(figures.SEARCHES)
    assert len(stored) == len(figures.SEARCHED)
    for name, found in figures.searches([searched]).items():
        if found != stored[name]:
            pytest.fail(f"search of {name}: expected {stored[name]}, found {found}", pytrace=False)
