"""Addresses of this machine at which other ranks reach it."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import torch.distributed as dist

SIOCGIFADDR = 0x8915
"""Linux's question for an interface's IPv4 address."""
LINK_LOCAL = 0x20
"""IPv6 addresses that mean nothing without an interface."""


def own_address() -> str:
    """The address at which other ranks reach this one, loopback if all are on this machine; called on all ranks at once. It is that of the
    interface that gloo was told to use, else of the one by which this rank reaches the place where ranks meet. There itself the host's name
    may stand for loopback (Debian: 127.0.1.1): then by which it reaches another rank."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    found = _address_of(interface) or ("127.0.0.1" if dist.get_world_size() == 1 else _address_towards(os.environ.get("MASTER_ADDR", "")))
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, found)
    others = [address for address in told if not ip_address(address).is_loopback]
    return _address_towards(others[0]) if others and ip_address(found).is_loopback else found


def _address_of(interface: str) -> str:
    """An address of an interface, by IPv4 if it has one; empty if it has none."""
    if not interface or sys.platform != "linux":
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and int(scope, 16) != LINK_LOCAL:
                return str(ip_address(bytes.fromhex(digits)))
    return ""


def _address_towards(host: str) -> str:
    """The address from which this machine sends to another one; loopback if it does not know that one."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, suppress(OSError):
                probe.connect(address)
                return str(probe.getsockname()[0])
    return "127.0.0.1"
