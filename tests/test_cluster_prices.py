"""Prices in cluster files: they add up, and say nothing of the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soap.cluster.price import Price
from soap.cluster.yaml_file import load_cluster, parse_cluster
from soap.errors import TopologyError
from tests.cluster_text import dump_cluster
from tests.test_cluster_yaml import described, host


def test_prices_of_hosts_add_up_to_the_cluster_s() -> None:
    hosts = [host(count=3, price_per_hour=12.5), host(name="b", price_per_hour=0)]
    wired = {"network": {"bandwidth": "1 GB/s", "latency": "1 us"}}
    assert parse_cluster(described(hosts=hosts, currency="EUR", **wired)).price == Price(37.5, "EUR")
    assert parse_cluster(described(price_per_hour=3, **wired)).price == Price(3.0)
    assert parse_cluster(described(**wired)).price is None


def test_a_price_is_no_part_of_the_identity_and_is_written_down() -> None:
    plain, priced = parse_cluster(described()), parse_cluster(described(price_per_hour=2.25, currency="EUR"))
    assert plain.hash == priced.hash and plain != priced
    assert parse_cluster(dump_cluster(priced)) == priced
    assert parse_cluster(described(hosts=[host(price_per_hour=9)])).hash == plain.hash


def test_a_preset_with_a_price() -> None:
    found = parse_cluster("preset: h200-8\nprice_per_hour: 24.5\n")
    assert found == replace(load_cluster("h200-8"), price=Price(24.5))
    assert parse_cluster("preset: h200-8") == load_cluster("h200-8")
    with pytest.raises(TopologyError) as refused:
        parse_cluster("preset: h20")
    assert str(refused.value).startswith("cluster.yaml: preset: unknown cluster 'h20'; expected one of ")
