"""cluster.yaml: the documented example, every wiring, the round trip, and one line for each mistake."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster import yaml_file
from soap.cluster.presets import device_types
from soap.cluster.price import Price
from soap.cluster.topology import Device, DeviceType, Host, Link, Topology
from soap.cluster.yaml_file import load_cluster, parse_cluster
from soap.errors import TopologyError
from tests.cluster_text import dump_cluster


def example() -> str:
    """The example in the module's docstring, so that it stays true."""
    text = (yaml_file.__doc__ or "").split("code-block:: yaml", 1)[1].split("A file may", 1)[0]
    return textwrap.dedent(text)


def described(**changes: object) -> str:
    """A small valid description with some top-level keys replaced; None removes one."""
    base: dict[str, object] = {
        "name": "small",
        "hosts": [
            {
                "name": "a",
                "devices": {"type": "p100", "count": 2},
                "cpu_cores": 4,
                "memory": "8 GiB",
                "links": {"intra": {"bandwidth": "10 GB/s", "latency": "4 us"}},
            }
        ],
    }
    return yaml.safe_dump({key: value for key, value in {**base, **changes}.items() if value is not None}, sort_keys=False)


def host(**changes: object) -> dict[str, object]:
    base = yaml.safe_load(described())["hosts"][0]
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def names(topology: Topology, source: int, target: int) -> list[str]:
    return [topology.links[i].name for i in topology.route(source, target)]


def seconds(topology: Topology, source: int, target: int) -> float:
    return sum(topology.links[i].latency_seconds for i in topology.route(source, target))


def test_the_documented_example():
    t = parse_cluster(example())
    assert t.name == "two-boxes"
    assert [d.name for d in t.devices] == [f"box{h}/gpu{g}" for h in range(2) for g in range(4)]
    assert [(h.name, h.cpu_cores, h.memory_bytes) for h in t.hosts] == [("box0", 20, 256 * 2**30), ("box1", 20, 256 * 2**30)]
    small = t.devices[0].type
    assert (small.kind, small.memory_bytes, small.kernel_seconds) == ("cuda", 16 * 2**30, 5e-6)
    assert dict(small.flops_per_second) == {"float32": 9.3e12, "bfloat16": 18e12}
    assert small.source == "the vendor's data sheet"
    assert names(t, 0, 1) == ["box0/gpu0->box0/gpu1"]
    assert names(t, 1, 5) == ["box0/gpu1->box0/switch", "box0/switch->network", "network->box1/switch", "box1/switch->box1/gpu1"]
    assert seconds(t, 1, 5) == pytest.approx(2e-6 + 3e-6 + 2e-6)
    assert "spine" in t.switches
    assert t.price == Price(24.5, "EUR")


def test_devices_of_a_host_share_its_network_card():
    two = host(count=2)
    t = parse_cluster(described(hosts=[two], network={"bandwidth": "100 Gbit/s", "latency": "2 us"}))
    first, second = set(t.route(0, 2)), set(t.route(1, 3))
    shared = sorted(t.links[i].name for i in first & second)
    assert shared == ["a0/switch->network", "network->a1/switch"]
    assert {t.links[i].bandwidth_bytes_per_second for i in first & second} == {12.5e9}
    assert not set(t.route(0, 2)) & set(t.route(2, 0))  # full duplex


def test_latency_of_a_switch_is_from_end_to_end():
    t = parse_cluster(described(hosts=[host(count=2)], network={"bandwidth": "1 GB/s", "latency": "2 us"}))
    assert seconds(t, 0, 1) == pytest.approx(4e-6)
    assert seconds(t, 0, 2) == pytest.approx(4e-6 + 2e-6)


@pytest.mark.parametrize(
    ("kind", "count", "links", "route"),
    [
        ("switch", 4, 8, ["a/gpu0->a/switch", "a/switch->a/gpu2"]),
        ("full", 4, 12, ["a/gpu0->a/gpu2"]),
        ("ring", 4, 8, ["a/gpu0->a/gpu1", "a/gpu1->a/gpu2"]),
        ("ring", 2, 2, ["a/gpu0->a/gpu1"]),
        ("pairs", 4, 12, ["a/gpu0->a/switch0", "a/switch0->a/switch", "a/switch->a/switch1", "a/switch1->a/gpu2"]),
        ("pairs", 3, 10, ["a/gpu0->a/switch0", "a/switch0->a/switch", "a/switch->a/switch1", "a/switch1->a/gpu2"]),
    ],
)
def test_wirings_inside_a_host(kind, count, links, route):
    one = host(devices={"type": "p100", "count": count}, links={"intra": {"bandwidth": "1 GB/s", "latency": "1 us", "kind": kind}})
    t = parse_cluster(described(hosts=[one]))
    assert len(t.links) == links
    assert names(t, 0, min(2, count - 1)) == route


def test_neighbours_of_a_pair_leave_the_hosts_switch_alone():
    one = host(devices={"type": "k80", "count": 4}, links={"intra": {"bandwidth": "1 GB/s", "latency": "1 us", "kind": "pairs"}})
    assert names(parse_cluster(described(hosts=[one])), 2, 3) == ["a/gpu2->a/switch1", "a/switch1->a/gpu3"]


def test_single_devices_sit_at_the_network_card():
    t = parse_cluster(
        described(hosts=[host(count=2, devices={"type": "p100"}, links=None)], network={"bandwidth": "1 GB/s", "latency": "2 us"})
    )
    assert names(t, 0, 1) == ["a0/gpu0->network", "network->a1/gpu0"]


def test_free_links_and_named_devices():
    hosts = [host(devices=[{"name": "left", "type": "p100"}, {"name": "right", "type": "k80"}], links=None)]
    wires = [
        {"from": "left", "to": "middle", "bandwidth": "1 GB/s", "latency": "1 us"},
        {"name": "cable", "from": "middle", "to": "right", "bandwidth": "1 GB/s", "latency": "1 us"},
        {"from": "left", "to": "right", "bandwidth": "5 GB/s", "latency": "1 us", "duplex": False},
    ]
    t = parse_cluster(described(hosts=hosts, switches=["middle"], links=wires))
    assert names(t, 0, 1) == ["left->right"]
    assert names(t, 1, 0) == ["cable back", "middle->left"]
    assert [d.type.name for d in t.devices] == ["p100", "k80"]


def test_own_types_come_before_known_ones():
    own = {
        "p100": {
            "kind": "cuda",
            "flops": {"float32": "1 TFLOP/s"},
            "memory_bandwidth": "1 GB/s",
            "memory": "1 GiB",
            "kernel_overhead": "0 us",
        }
    }
    t = parse_cluster(described(device_types=own))
    assert t.devices[0].type.flops("float32") == 1e12


def test_a_file_and_a_preset_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.yaml").write_text(described())
    (tmp_path / "plain").write_text(described())
    monkeypatch.chdir(tmp_path)
    assert load_cluster("mine.yaml").name == load_cluster(tmp_path / "mine.yaml").name == load_cluster("plain").name == "small"
    assert load_cluster("local:2").name == "local:2"
    with pytest.raises(TopologyError) as refused:
        load_cluster("other.yaml")
    assert str(refused.value) == "cluster file 'other.yaml' cannot be read: no such file or directory; check the path"


@pytest.mark.parametrize("spec", ["local:2", "p100-4x4", "k80-16x4", "titanxp-8x6", "h200-8"])
def test_dump_reads_back_to_the_same_cluster(spec):
    t = replace(load_cluster(spec), measured=False)  # written down, figures are what the file says they are
    back = parse_cluster(dump_cluster(t))
    assert back.hash == t.hash and back == t


@given(st.floats(1.0, 1e15), st.floats(0.0, 10.0), st.integers(1, 2**50), st.floats(1.0, 1e15), st.booleans(), st.booleans())
def test_any_figures_survive_the_round_trip(bandwidth, latency, memory, rate, two_hosts, known):
    device_type = DeviceType("x: #y", "cpu", {"float32": rate}, bandwidth, memory, latency, "it's a 'test'")
    devices = (Device(0, "a", 0, device_type), Device(1, "b", int(two_hosts), device_type))
    hosts = tuple(Host(f"h{i}", 3, memory if known else None) for i in range(1 + two_hosts))
    links = (Link(0, "there", "a", "b", bandwidth, latency), Link(1, "back", "b", "a", bandwidth, latency))
    t = Topology("no: yes", devices, hosts, links)
    assert parse_cluster(dump_cluster(t)) == t


def test_what_yaml_cannot_say_is_not_dumped():
    one = DeviceType("x", "cpu", {"float32": 1.0}, 1.0, 1, 0.0, "s")
    links = (Link(0, "there", "a", "b", 1.0, 0.0), Link(1, "back", "b", "a", 1.0, 0.0))
    swapped = Topology("t", (Device(0, "a", 1, one), Device(1, "b", 0, one)), (Host("h", 1, 1), Host("i", 1, 1)), links)
    with pytest.raises(TopologyError) as refused:
        dump_cluster(swapped)
    assert str(refused.value) == "cluster 't': its devices are not in the order of its hosts; list them host by host"


MISTAKES = [
    ("", "cluster.yaml: the file is empty; expected a cluster description with name and hosts"),
    ("- 1", "cluster.yaml: a list of 1 elements; expected a mapping with the keys name, device_types, hosts, network, switches, "
     "links, price_per_hour, currency"),
    ("a: [", "cluster.yaml: no valid YAML at line 1 (expected the node content, but found '<stream end>'); mend it there"),
    ("name: a\nname: b\n", "cluster.yaml: no valid YAML at line 2 (key 'name' occurs twice); mend it there"),
    (
        "!!python/object/apply:os.system [ls]",
        "cluster.yaml: no valid YAML at line 1 (could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.system'); mend it there",
    ),
    (
        described(host=1),
        "cluster.yaml: host: unknown key; expected one of name, device_types, hosts, network, switches, links, "
        "price_per_hour, currency: did you mean 'hosts'?",
    ),
    (described(hosts=None), "cluster.yaml: hosts: missing; expected a value: add 'hosts'"),
    (described(hosts=[]), "cluster.yaml: hosts: a list of 0 elements; expected a list with at least one element"),
    (described(name=5), "cluster.yaml: name: 5; expected text: write a name"),
    (
        described(hosts=[host(memory="8")]),
        "cluster.yaml: hosts[0].memory: '8' has no unit; expected a size such as '16 GiB': add the unit",
    ),
    (described(hosts=[host(memory="0 GiB")]), "cluster.yaml: hosts[0].memory: '0 GiB'; expected more than 0: write the figure"),
    (described(hosts=[host(cpu_cores=2.5)]), "cluster.yaml: hosts[0].cpu_cores: 2.5; expected a whole number from 1 to 2147483648"),
    (described(hosts=[host(cpu_cores=True)]), "cluster.yaml: hosts[0].cpu_cores: True; expected a whole number from 1 to 2147483648"),
    (described(hosts=[host(count=0)]), "cluster.yaml: hosts[0].count: 0; expected a whole number from 1 to 65536"),
    (
        described(hosts=[host(count=65536, devices={"type": "p100", "count": 65536})]),
        "cluster.yaml: hosts[0].devices: more than 65536 devices in all; lower the counts",
    ),
    (
        described(hosts=[host(devices={"type": "v100"})]),
        "cluster.yaml: hosts[0].devices.type: unknown device type 'v100'; "
        f"expected one of {', '.join(sorted(device_types()))}: did you mean 'v100-32gb'? Else add it to device_types",
    ),
    (
        described(hosts=[host(links={"intra": {"bandwidth": "10 GB", "latency": "1 us"}})]),
        "cluster.yaml: hosts[0].links.intra.bandwidth: '10 GB' has unit 'GB'; expected a bandwidth such as '100 Gbit/s' or '900 GB/s': "
        "use one of B/s, kB/s, MB/s, GB/s, TB/s, PB/s, KiB/s, MiB/s, GiB/s, TiB/s, PiB/s, bit/s",
    ),
    (
        described(hosts=[host(links={"intra": {"bandwidth": "1 GB/s", "latency": "1 us", "kind": "web"}})]),
        "cluster.yaml: hosts[0].links.intra.kind: 'web'; expected one of switch, full, ring, pairs, mesh",
    ),
    (
        described(hosts=[host(links={"intra": {"bandwidth": "1 GB/s", "latency": "1 us"}, "host": {}})]),
        "cluster.yaml: hosts[0].links.host: not used with kind 'switch', whose switch has the network card; remove it",
    ),
    (
        described(
            hosts=[
                host(devices={"type": "p100", "count": 300}, links={"intra": {"bandwidth": "1 GB/s", "latency": "1 us", "kind": "full"}})
            ]
        ),
        "cluster.yaml: hosts[0].links.intra.kind: a full mesh of 300 devices; expected at most 256: use switch",
    ),
    (
        described(hosts=[host(links=None)], network={"bandwidth": "1 GB/s", "latency": "1 us"}),
        "cluster.yaml: hosts[0].links: missing; expected links.intra, by which 2 devices reach the network",
    ),
    (
        described(hosts=[host(count=2)]),
        "cluster.yaml: no route from 'a0/gpu0' to 'a1/gpu0' on cluster 'small'; add links that connect them",
    ),
    (
        described(network={"bandwidth": "1 GB/s", "latency": "1 us", "kind": "torus"}),
        "cluster.yaml: network.kind: 'torus'; expected one of switch",
    ),
    (
        described(links=[{"from": "a/gpu0", "to": "spine", "bandwidth": "1 GB/s", "latency": "1 us"}]),
        "cluster.yaml: links[0].to: unknown node 'spine'; expected a device or a listed switch",
    ),
    (
        described(links=[{"from": "a/gpu0", "to": "a/gpu0", "bandwidth": "1 GB/s", "latency": "1 us"}]),
        "cluster.yaml: link 'a/gpu0->a/gpu0' leads from 'a/gpu0' to itself; expected two different nodes",
    ),
    (
        described(links=[{"from": "a/gpu0", "to": "a/gpu1", "bandwidth": "1 GB/s", "latency": "1 us", "duplex": 2}]),
        "cluster.yaml: links[0].duplex: 2; expected true or false",
    ),
    (
        described(switches=["a/switch"]),
        "cluster.yaml: switches[0]: 'a/switch'; expected the name of a further switch, used by nothing else",
    ),
    (described(hosts=[host(), host()]), "cluster.yaml: host name 'a' occurs twice; expected unique names"),
    (
        described(price_per_hour="25 EUR"),
        "cluster.yaml: price_per_hour: '25 EUR'; expected a number from 0 to 1e+12, such as 2.5: write it without a unit",
    ),
    (
        described(price_per_hour=-1),
        "cluster.yaml: price_per_hour: -1; expected a number from 0 to 1e+12, such as 2.5: write it without a unit",
    ),
    (
        "price_per_hour: 1" + 400 * "0" + described().replace("name: small", "", 1),
        "cluster.yaml: price_per_hour: 1" + 56 * "0" + "...; expected a number from 0 to 1e+12, such as 2.5: write it without a unit",
    ),
    (
        described(price_per_hour=float("inf")),
        "cluster.yaml: price_per_hour: inf; expected a number from 0 to 1e+12, such as 2.5: write it without a unit",
    ),
    (
        described(price_per_hour=2, hosts=[host(price_per_hour=2)]),
        "cluster.yaml: hosts[0].price_per_hour: the whole cluster has a price as well; expected one of the two: remove one",
    ),
    (
        described(hosts=[host(price_per_hour=2), host(name="b")], network={"bandwidth": "1 GB/s", "latency": "1 us"}),
        "cluster.yaml: hosts[1].price_per_hour: missing, while other hosts have one; expected a price of every host: write it, if it is 0",
    ),
    (
        described(currency="EUR"),
        "cluster.yaml: currency: a currency without a price; expected price_per_hour of the cluster or of its hosts",
    ),
    (described(price_per_hour=2, currency=978), "cluster.yaml: currency: 978; expected text: write a name"),
    (
        described(price_per_hour=2, currency="per\nhour"),
        "cluster.yaml: currency: 'per\\nhour'; expected at most 12 characters, such as EUR",
    ),
    (
        "preset: h200-8\nhosts: []\n",
        "cluster.yaml: hosts: unknown key; expected one of preset, price_per_hour, currency: remove it",
    ),
    ("preset: local:4\n", "cluster.yaml: preset: 'local:4' is this machine, measured when it is named; expected another preset's name"),
    ("preset: [h200-8]\n", "cluster.yaml: preset: a list of 1 elements; expected text: write a name"),
    (
        described(device_types={"x": {"kind": "cuda", "flops": {"fp32": "1 TFLOP/s"}}}),
        "cluster.yaml: device_types.x.flops.fp32: unknown key; expected torch's name of the type: write 'float32'",
    ),
    (
        described(device_types={"x": {"kind": "cuda", "flops": {"float32": "1 TFLOP/s", "fp8": "1 TFLOP/s"}}}),
        "cluster.yaml: device_types.x.flops.fp8: unknown key; expected torch's name of the type: write 'float8_e4m3fn'",
    ),
    (
        described(device_types={"x": {"kind": "cuda", "flops": {"decimal": "1 TFLOP/s"}}}),
        "cluster.yaml: device_types.x.flops.decimal: unknown key; expected one of float64, float32, tf32, float16, bfloat16, "
        "float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, complex64, complex128, int64, int32, int16, int8, uint8, bool: remove it",
    ),
    (
        described(device_types={"x": {"kind": "cuda", "flops": {"float64": "1 TFLOP/s"}}}),
        "cluster.yaml: device_types.x.flops.float32: missing; expected a compute rate such as '9.3 TFLOP/s': other dtypes fall back to it",
    ),
]


@pytest.mark.parametrize(("text", "line"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_each_mistake_gets_one_line_with_its_path(text, line):
    with pytest.raises(TopologyError) as refused:
        parse_cluster(text)
    assert str(refused.value) == line


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["intra", "type", "count", "latency", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.sampled_from(["name", "device_types", "hosts", "network", "switches", "links", "price_per_hour", "currency", "preset"]),
    JUNK,
    st.booleans(),
)
def test_junk_is_refused_in_one_line_or_read(key, junk, in_host):
    text = described(hosts=[host(**{"devices" if in_host else "links": junk})]) if key == "hosts" else described(**{key: junk})
    try:
        parse_cluster(text)
    except TopologyError as refused:
        assert "\n" not in str(refused) and len(str(refused)) < 400


def test_a_cluster_of_thousands_of_devices() -> None:
    text = """hosts:
  - name: node
    count: 2048
    devices: {type: h200, count: 8}
    cpu_cores: 96
    memory: 2 TB
    links: {intra: {bandwidth: 450 GB/s, latency: 2 us}}
network: {bandwidth: 400 Gbit/s, latency: 5 us}
"""
    topology = parse_cluster(text)
    assert topology.device_count == 16384 and topology.is_tree
    names = [[topology.links[link].name for link in topology.route(*pair)] for pair in ((3, 6), (7, 16383))]
    assert names[0] == ["node0/gpu3->node0/switch", "node0/switch->node0/gpu6"]
    assert names[1] == [
        "node0/gpu7->node0/switch", "node0/switch->network", "network->node2047/switch", "node2047/switch->node2047/gpu7",
    ]  # fmt: skip
    around = topology.routes(range(16384), [*range(1, 16384), 0])
    assert [tuple(row[row >= 0].tolist()) for row in around[:9]] == [topology.route(i, i + 1) for i in range(9)]
    assert (around >= 0).sum() == 2048 * (7 * 2 + 4)
