from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.topology import Topology
from soap.errors import StrategyError
from soap.model.graph import OperatorGraph
from soap.strategy.classical import CLASSICAL, data_parallel, random_strategy
from soap.strategy.config import OpConfig, Strategy
from soap.strategy.json_file import StrategyHeader, compact_devices, dumps, expand_devices, load_header, loads
from soap.strategy.sync import parameter_server
from tests.extent import MANY
from tests.graph_builder import GraphBuilder, mlp
from tests.strategies import cases, cluster

GRAPH, CLUSTER = mlp(), cluster([2, 2])
RECORD = {"seed": 1, "budget": 200, "predicted": {"iteration_ns": 12345, "speedup": 1.5}, "note": "größer"}
SERVED = {"owner": "servers"}


def document() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(dumps(data_parallel(GRAPH, CLUSTER), GRAPH, CLUSTER, RECORD))
    return data


def refused(text: str, graph: OperatorGraph = GRAPH, topology: Topology = CLUSTER) -> str:
    """The message with which the text is refused."""
    with pytest.raises(StrategyError) as caught:
        loads(text, graph, topology)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500
    return message


def changed(edit: Callable[[dict[str, Any]], object]) -> str:
    data = document()
    edit(data)
    return refused(json.dumps(data))


@given(cases(max_moves=4, servers=True, stale=True))
def test_what_is_written_is_read_back(case: tuple[OperatorGraph, Topology, Strategy]) -> None:
    graph, topology, strategy = case
    text = dumps(strategy, graph, topology, {"seed": 1})
    assert loads(text, graph, topology) == (strategy, {"seed": 1})
    assert dumps(*(loads(text, graph, topology)[0], graph, topology, {"seed": 1})) == text


@given(st.lists(st.integers(0, 9), max_size=24))
@MANY
def test_compact_devices_round_trip(devices: list[int]) -> None:
    assert expand_devices(compact_devices(devices), {}, 24) == tuple(devices)


def test_compact_devices_reads_well() -> None:
    assert compact_devices([0, 1, 2, 3]) == ["0-3"]
    assert compact_devices([0, 1, 2, 3, 0, 1, 2, 3]) == ["0-3", "0-3"]
    assert compact_devices([0, 4, 8, 12]) == ["0-12:4"]
    assert compact_devices([2, 2, 2, 2, 5]) == ["2*4", 5]
    assert compact_devices([0, 1]) == [0, 1]
    assert compact_devices([3, 2, 1, 0]) == [3, 2, 1, 0]
    assert compact_devices([]) == []


def test_text_is_golden() -> None:
    g = GraphBuilder("tiny")
    y = g.linear(g.input("x", 4, 3), 2, name="fc")
    graph, topology = g.build(g.mean(y, name="loss")), cluster([2])
    strategy = Strategy({"fc": OpConfig((2, 1, 2), (0, 1, 1, 0)), "loss": OpConfig((1, 1), (0, 1), replicas=2)})
    assert dumps(strategy, graph, topology, {"seed": 7}) == (
        "{\n"
        '  "format": "soap-strategy",\n'
        '  "version": 2,\n'
        f'  "model": {{"name": "tiny", "hash": "{graph.hash}", "operators": 2}},\n'
        f'  "cluster": {{"name": "test", "hash": "{topology.hash}", "devices": ["host0/device0", "host0/device1"]}},\n'
        '  "operators": {\n'
        '    "fc": {"kind": "linear", "sizes": {"b": 4, "k": 3, "n": 2}, "degrees": {"b": 2, "n": 2}, "devices": [0, 1, 1, 0]},\n'
        '    "loss": {"kind": "mean", "sizes": {"b": 4, "d1": 2}, "replicas": 2, "devices": [0, 1]}\n'
        "  },\n"
        '  "parameters": {},\n'
        '  "record": {\n'
        '    "seed": 7\n'
        "  }\n"
        "}\n"
    )


@pytest.mark.parametrize("name", CLASSICAL)
def test_classical_strategies_round_trip_with_their_record(name: str) -> None:
    strategy = CLASSICAL[name](GRAPH, CLUSTER)
    text = dumps(strategy, GRAPH, CLUSTER, RECORD)
    assert text == dumps(strategy, GRAPH, CLUSTER, RECORD)
    assert loads(text, GRAPH, CLUSTER) == (strategy, RECORD)
    assert max(map(len, text.splitlines())) < 250


def test_header_is_read_without_a_model() -> None:
    names = ("host0/device0", "host0/device1", "host1/device0", "host1/device1")
    assert load_header(json.dumps(document())) == StrategyHeader("mlp", GRAPH.hash, 6, "test", CLUSTER.hash, names)
    with pytest.raises(StrategyError, match="not valid JSON"):
        load_header("{")


def test_illegal_strategy_is_not_written() -> None:
    with pytest.raises(StrategyError, match="device 2 does not exist"):
        dumps(data_parallel(GRAPH, CLUSTER), GRAPH, cluster([2]))
    with pytest.raises(StrategyError, match="record cannot be written as JSON"):
        dumps(data_parallel(GRAPH, CLUSTER), GRAPH, CLUSTER, {"time": float("nan")})
    with pytest.raises(StrategyError, match="record cannot be written as JSON"):
        dumps(data_parallel(GRAPH, CLUSTER), GRAPH, CLUSTER, {"object": object()})


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2", "{'a': 1}", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, '{"a": ' * 5000, "9" * 5000]
)
def test_text_that_is_not_json(text: str) -> None:
    assert refused(text).startswith("strategy file is not valid JSON")


@pytest.mark.parametrize("text", ["[]", "null", "3", '"soap-strategy"', "{}", '{"format": "other"}', '{"format": ["soap-strategy"]}'])
def test_other_files(text: str) -> None:
    message = refused(text)
    assert message.startswith("not a strategy file: format is ")
    assert message.endswith("expected 'soap-strategy'; give a file that soap-search wrote")


def test_other_versions() -> None:
    expected = "strategy file has version {}; this program reads versions 1 to 2: search again with it"
    assert changed(lambda d: d.update(version=3)) == expected.format(3)
    assert changed(lambda d: d.update(version="1")) == expected.format("'1'")
    assert changed(lambda d: d.update(version=True)) == expected.format("True")
    assert changed(lambda d: d.pop("version")) == expected.format("None")


@pytest.mark.parametrize(
    ("edit", "place"),
    [
        (lambda d: d.pop("operators"), "at top level: key 'operators' is missing"),
        (lambda d: d.update(more=1), "at top level: unknown key 'more'; expected one of format, version, "),
        (lambda d: d["operators"]["fc0"].update(devices=[]), "at operators/fc0/devices"),
        (lambda d: d["operators"]["fc0"].update(devices=[1.5]), "at operators/fc0/devices/0: 1.5; expected a whole number from 0 to"),
        (lambda d: d["operators"]["fc0"].update(devices=[-1]), "at operators/fc0/devices/0"),
        (lambda d: d["operators"]["fc0"].update(degrees={"b": 0}), "at operators/fc0/degrees/b: 0; expected a whole number from 1"),
        (lambda d: d["operators"]["fc0"].update(degrees={"b": True}), "at operators/fc0/degrees/b: True; expected a whole number"),
        (lambda d: d["operators"]["fc0"].update(degrees={"b": 1e300}), "at operators/fc0/degrees/b"),
        (lambda d: d["operators"]["fc0"].update(replicas=0), "at operators/fc0/replicas"),
        (lambda d: d["operators"]["fc0"].pop("kind"), "at operators/fc0: key 'kind' is missing"),
        (lambda d: d.update(parameters={"fc0.weight": {"owner": "gossip"}}), "at parameters/fc0.weight/owner: 'gossip'; expected one of"),
        (lambda d: d.update(parameters={"fc0.weight": {**SERVED, "partitions": 0}}), "at parameters/fc0.weight/partitions: 0; expected"),
        (lambda d: d.update(parameters={"fc0.weight": {**SERVED, "partitions": 10**9}}), "at parameters/fc0.weight/partitions: 10000"),
        (lambda d: d["cluster"].update(devices="all"), "at cluster/devices: 'all'; expected a list"),
        (lambda d: d.update(record=[]), "at record: a list; expected an object"),
    ],
)
def test_malformed_documents(edit: Callable[[dict[str, Any]], object], place: str) -> None:
    assert changed(edit).startswith(f"strategy file is malformed {place}")


def test_deeply_nested_values_are_refused_in_one_line() -> None:
    nested: list[Any] = []
    for _ in range(400):
        nested = [nested]
    assert changed(lambda d: d["operators"].update(fc0=nested)).startswith("strategy file is malformed")


def test_another_model_is_refused_with_the_differences() -> None:
    text = json.dumps(document())
    batch = refused(text, mlp(batch=6))
    assert batch.startswith(f"strategy was made for another model: 'mlp' ({GRAPH.hash}, 6 operators) instead of 'mlp' (")
    assert "different: fc0 has b of size 8 instead of 6, act0 has b of size 8 instead of 6" in batch
    assert batch.endswith("and 2 more; search again for this model and cluster")
    deeper = refused(text, mlp(widths=(16, 32, 16, 8)))
    assert "not in the file: 'fc2', 'act2', 'cross_entropy7'; only in the file: 'cross_entropy5'" in deeper
    assert "head has k of size 16 instead of 8" in deeper


def test_same_operators_connected_otherwise_are_another_model() -> None:
    g = GraphBuilder("mlp")
    y = g.input("y", 8, dtype="int64")
    x = g.input("x", 8, 16)
    for i, width in enumerate((32, 16)):
        x = g.elementwise(g.linear(x, width, name=f"fc{i}"), name=f"act{i}")
    graph = g.build(g.cross_entropy(g.linear(x, 4, name="head"), y))
    assert "operators and factor sizes agree, their connections, types or parameters differ" in refused(json.dumps(document()), graph)


def test_another_cluster_is_refused_with_the_differences() -> None:
    text = json.dumps(document())
    smaller = refused(text, topology=cluster([2]))
    assert smaller.startswith(f"strategy was made for another cluster: 'test' ({CLUSTER.hash}, 4 devices) instead of 'test' (")
    assert "2 devices); devices not here: 'host1/device0', 'host1/device1'; search again" in smaller
    assert "devices not in the file: 'host1/device2'" in refused(text, topology=cluster([2, 3]))
    slower = refused(text, topology=cluster([2, 2], bandwidth_bytes_per_second=1e8))
    assert "the devices' names agree, their order, types or links differ" in slower
    both = refused(text, mlp(batch=6), cluster([2]))
    assert "another model" in both
    assert "another cluster" in both


def test_operator_names_changed_by_hand() -> None:
    message = changed(lambda d: d["operators"].update(fc9=d["operators"].pop("fc0")))
    assert message.startswith("strategy file was changed by hand: it is for this model, 'mlp' (")
    assert "not in the file: 'fc0'; only in the file: 'fc9'" in message


def test_impossible_degrees_and_devices() -> None:
    def fc0(**entry: Any) -> str:
        return changed(lambda d: d["operators"]["fc0"].update(entry))

    assert fc0(degrees={"b": 9}) == "operator 'fc0': degree 9 of factor 'b' exceeds its size 8; lower the degree"
    assert fc0(degrees={"z": 2}) == "operator 'fc0' has no factor 'z'; expected one of b, k, n"
    assert fc0(degrees={"b": 2}) == "operator 'fc0': more than 2 devices listed; expected one per tile"
    assert fc0(degrees={"b": 8}).startswith("operator 'fc0': 4 devices for degrees (8, 1, 1) and 1 replicas: expected 8")
    assert fc0(devices=["0-2", 4]) == "operator 'fc0': device 4 does not exist; expected 0 to 3 on this cluster"
    assert fc0(devices=["0-999999999"]) == "operator 'fc0': more than 4 devices listed; expected one per tile"
    assert fc0(devices=["0*999999999"]) == "operator 'fc0': more than 4 devices listed; expected one per tile"
    assert fc0(replicas=2**31).endswith("tiles; expected at most 4194304 in the whole strategy; lower the degrees")
    names = "host0/device0, host0/device1, host1/device0, …"
    unknown = "operator 'fc0': unknown device {}; expected a number, a run such as '0-3', or one of " + names
    for item in ("gpu7", "3-0", "0-3:0", "-1", "1e3", "٣-٤"):
        assert fc0(devices=[item]) == unknown.format(repr(item))


def test_operators_that_must_not_repeat() -> None:
    g = GraphBuilder()
    x = g.embedding(g.input("ids", 4, 1, dtype="int64"), 8, 4, weight=g.parameter("table", 8, 4), name="rows")
    graph = g.build(g.mean(g.linear(x, 4)))
    data = json.loads(dumps(data_parallel(graph, CLUSTER), graph, CLUSTER))
    data["operators"]["rows"]["recompute"] = True
    assert refused(json.dumps(data), graph) == (
        "operator 'rows' is marked to be recomputed, but it looks rows up in the sparse parameter 'table', which are brought for one use; "
        "expected recompute false"
    )


def test_parameter_servers_are_written_and_read() -> None:
    syncs = {"fc0.weight": parameter_server(4), "fc1.weight": parameter_server(1, "host")}
    data = json.loads(dumps(replace(data_parallel(GRAPH, CLUSTER), parameters=syncs), GRAPH, CLUSTER))
    assert data["parameters"] == {"fc0.weight": {**SERVED, "partitions": 4}, "fc1.weight": {**SERVED, "within": "host"}}
    assert loads(json.dumps(data), GRAPH, CLUSTER)[0].parameters == syncs
    data["parameters"]["fc0.weight"]["owner"] = "readers"
    expected = "parameter 'fc0.weight': synchronization by allreduce in 4 partitions: expected 1"
    assert refused(json.dumps(data)) == expected


def test_unknown_parameters_are_refused() -> None:
    message = changed(lambda d: d.update(parameters={"nothing": {}}))
    assert message == "strategy names parameter 'nothing', which model 'mlp' does not have"


def test_devices_may_be_given_by_name_and_parts_left_out() -> None:
    data = document()
    del data["parameters"], data["record"]
    data["operators"]["fc0"]["devices"] = ["host0/device1", 0, "2-3"]
    strategy, record = loads(json.dumps(data), GRAPH, CLUSTER)
    assert strategy.operators["fc0"].devices == (1, 0, 2, 3)
    assert record == {}


def test_for_any_cluster_devices_are_those_of_the_file_by_number() -> None:
    data, other = document(), cluster([4])
    data["operators"]["fc0"]["devices"] = ["host1/device1", 0, "host0/device1", 2]  # names of the file's cluster
    assert [device.name for device in other.devices] != data["cluster"]["devices"]
    strategy, _ = loads(json.dumps(data), GRAPH, other, any_cluster=True)
    assert strategy.operators["fc0"].devices == (3, 0, 1, 2)
    with pytest.raises(StrategyError, match="another cluster"):
        loads(json.dumps(data), GRAPH, cluster([2]), any_cluster=True)


@given(st.data())
def test_damaged_text_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    text = dumps(random_strategy(GRAPH, CLUSTER, random.Random(3)), GRAPH, CLUSTER, RECORD)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 9)))
    damaged = text[:start] + data.draw(st.text(alphabet='0123456789-*:"[]{},ab\n\\', max_size=4)) + text[stop:]
    try:
        loads(damaged, GRAPH, CLUSTER)[0].validate(GRAPH, 4)
    except StrategyError as error:
        assert "\n" not in str(error)
