"""Servers are where their folders are, and a head that is gone is noticed: in one line each."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from soap.elastic import launcher
from soap.elastic.faults import ElasticError
from soap.elastic.launcher import Pulse, hosts, node


def cluster(*addresses: str) -> Any:
    """Ray as seen from the first of these machines; one that is not there any more is listed as well."""
    nodes = [{"NodeManagerAddress": address, "NodeID": f"id of {address}", "Alive": True} for address in addresses]
    gone = {"NodeManagerAddress": "10.0.0.1", "NodeID": "gone", "Alive": False}
    own = SimpleNamespace(get_node_id=lambda: f"id of {addresses[0]}")
    return SimpleNamespace(nodes=lambda: [gone, *nodes], get_runtime_context=lambda: own)


def test_servers_are_dealt_out_by_address_and_stay_where_they_were() -> None:
    ray = cluster("10.0.0.12", "10.0.0.3")
    assert hosts(ray, 3) == ["10.0.0.3", "10.0.0.12", "10.0.0.3"]
    assert hosts(cluster("10.0.0.2", "10.0.0.3", "10.0.0.12"), 2, ["10.0.0.12", "10.0.0.3"]) == ["10.0.0.12", "10.0.0.3"]
    assert node(ray, "10.0.0.3") == "id of 10.0.0.3"
    with pytest.raises(
        ElasticError, match=r"^server 1 has its folder on 10\.0\.0\.1, which is not in the cluster \(10\.0\.0\.3, 10\.0\.0\.12\)"
    ):
        hosts(ray, 2, ["10.0.0.3", "10.0.0.1"])


def test_what_a_session_of_our_own_has_kept_is_on_this_machine() -> None:
    ray = cluster("10.0.0.12", "10.0.0.3")
    assert hosts(ray, 1, ["127.0.0.1"]) == ["127.0.0.1"] and node(ray, "127.0.0.1") == "id of 10.0.0.12"


def test_a_head_that_is_gone_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        found = Pulse(f"127.0.0.1:{head.getsockname()[1]}")
        found.check()
        assert not found.gone
    with pytest.raises(ElasticError, match=r"^Ray's head at 127\.0\.0\.1:\d+ is gone; start it again"):
        found.check()
    assert found.gone

    def silent(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    found = Pulse("10.0.0.1:6379")
    found.check()
    monkeypatch.setattr(launcher, "SILENT_S", -1.0)
    with pytest.raises(ElasticError, match="is gone"):
        found.check()
