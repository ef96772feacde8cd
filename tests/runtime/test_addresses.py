"""At which address ranks say that they listen, on machines whose names mean different things."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from soap.elastic.transport import Listener, connect
from soap.runtime.comm import world
from soap.runtime.comm.world import own_address

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="interfaces of Linux")


def asked(monkeypatch: pytest.MonkeyPatch, towards: dict[str, str], others: list[str], master: str = "box0") -> str:
    """``own_address`` on a machine that sends from ``towards[host]`` to a host, beside ranks with these addresses."""

    def gather(told: list[str], own: str) -> None:
        told[:] = [own, *others]

    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setattr(world.dist, "get_world_size", lambda: 1 + len(others))
    monkeypatch.setattr(world.dist, "all_gather_object", gather)
    monkeypatch.setattr(world, "_address_towards", towards.__getitem__)
    return own_address()


def test_where_a_host_s_own_name_means_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    debian = {"box0": "127.0.0.1", "10.0.0.2": "10.0.0.1", "fd00::2": "fd00::1"}
    assert asked(monkeypatch, debian, ["10.0.0.2", "10.0.0.3"]) == "10.0.0.1"
    assert asked(monkeypatch, debian, ["127.0.0.1", "fd00::2"]) == "fd00::1", "another rank of this machine, and one elsewhere"
    assert asked(monkeypatch, debian, ["127.0.0.1"]) == "127.0.0.1", "all are here"
    assert asked(monkeypatch, {"box0": "10.0.0.2"}, ["127.0.0.1"]) == "10.0.0.2", "this is another machine than box0"
    assert asked(monkeypatch, {}, []) == "127.0.0.1", "a rank that is alone, whatever MASTER_ADDR was left behind"


@LINUX
def test_the_interface_that_gloo_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert asked(monkeypatch, {"10.0.0.2": "127.0.0.1"}, ["10.0.0.2"]) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    assert asked(monkeypatch, {"box0": "10.0.0.1"}, ["10.0.0.2"]) == "10.0.0.1"


def test_towards_addresses_of_both_kinds() -> None:
    assert world._address_towards("127.0.0.1") == "127.0.0.1"
    assert world._address_towards("no.such.host.invalid") == "127.0.0.1"


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_servers_listen_and_are_reached_by_ipv6() -> None:
    assert world._address_towards("::1") == "::1"

    def answer(frame: memoryview) -> list[Any]:
        return [bytes(frame)[::-1]]

    listener = Listener(answer, b"secret", "::1")
    peer = connect(listener.host, listener.port, b"secret")
    try:
        assert bytes(peer.ask([b"abc"])) == b"cba"
    finally:
        peer.close()
        listener.close()
