"""Hosts as network namespaces, each with one cable to a bridge, and a token bucket at both ends of it.

The bridge has a namespace of its own, so that the box's firewall, which may forward nothing (Docker's does so), does not apply there.
One more cable leads from it to the box, on which the launcher is reached.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ipaddress import IPv4Interface

from soap.emulation.hosts import HostLimits
from soap.emulation.names import (
    INTERFACE,
    INTERFACES,
    NAMESPACES,
    box_address,
    bridge_name,
    host_address,
    host_name,
    names_in,
    subnet,
)
from soap.errors import RuntimeFailure

LIMIT_S = 30
REMEDIES = (
    ("qdisc kind is unknown", "the kernel has no token buckets: load them with 'modprobe sch_tbf'"),
    ("Unknown device type", "the kernel lacks this kind of network device: load it with 'modprobe veth bridge'"),
    ("Operation not supported", "the kernel lacks bridges, veth pairs or token buckets: 'modprobe bridge veth sch_tbf'"),
    ("not permitted", "even root may not do so here: start the container with the capabilities NET_ADMIN and SYS_ADMIN"),
    ("Permission denied", "even root may not do so here: start the container with the capabilities NET_ADMIN and SYS_ADMIN"),
    ("mount --make-shared", "namespaces need mounts, which are not allowed here: start the container with the capability SYS_ADMIN"),
)
"""Words in the commands' errors -> what to do."""


def run(*command: str, lines: Iterable[str] = ()) -> str:
    """Run a command; its output. ``lines``: its input, for ``-batch -``. RuntimeFailure in one line if it fails or is missing. Ctrl-C
    does not reach the command: half-done work would be hard to undo."""
    try:
        done = subprocess.run(
            command, input="".join(f"{line}\n" for line in lines), capture_output=True, text=True, timeout=LIMIT_S, process_group=0
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        raise RuntimeFailure(f"--emulate: {' '.join(command)}: {cause}; expected iproute2's commands to work") from None
    if done.returncode:
        raise RuntimeFailure(f"--emulate: {' '.join(command)}: {explain(done.stderr)}")
    return done.stdout


def explain(said: str) -> str:
    """A command's error in one line, with what to do about it where that is known."""
    text = " ".join(said.split()) or "it failed without saying why"
    remedies = [remedy for mark, remedy in REMEDIES if mark in text]
    return f"{text}; {remedies[0]}" if remedies else text


BRIDGE, BOX = "bridge", "box"
"""Names of the bridge, and of the end of the box's cable, within their namespace."""
MTU_BYTES = 9000
"""Jumbo frames, as clusters have them: headers are 0.7% of a full frame. A token bucket counts them, too."""
HEADER_BYTES = 66
"""Headers of a frame: Ethernet, IP, and TCP with its time stamps."""
SEGMENTS_BYTES = 2 * MTU_BYTES
"""Bytes that a host hands over at once: the usual 64 KiB would need larger buckets."""
LEAST_BURST_BYTES, MOST_BURST_BYTES = 20 * 1024, 48 * 1024
LATE_SECONDS = 1.5e-3
"""Limits of a bucket: at least what is handed over at once, which would otherwise have to be cut up, and what arrives while a busy box
is late for the bucket. Whatever a bucket holds passes at any rate: with buckets of 128 KiB a message of that size took no longer than
an empty one, and a sum of a few hundred KiB over four hosts at 1 Gbit/s a quarter less than its bytes take. 48 KiB are 8 ms of 6 MB/s,
by which each message would be early."""
QUEUE_MS = 100
"""Milliseconds that data may wait before a bucket."""
CONGESTION_CONTROL = "reno"
"""TCP's congestion control within the cluster, whatever the box's is; every kernel has reno. Only losses slow it down, and buckets lose
nothing. BBR, which some boxes have, sends nearly nothing for 0.2 s every few seconds to see how quick the network is without it, and
now and then less than a link carries: a sum of 8 MiB over four hosts at 200 Mbit/s took 510 to 630 ms with it, and takes 508."""


def build(number: int, hosts: Sequence[HostLimits]) -> None:
    """Make bridge, namespaces, cables and buckets. RuntimeFailure if a part cannot be made; ``remove`` removes the rest."""
    switch = bridge_name(number)
    names = [host_name(number, host) for host in range(len(hosts))]
    root = [
        *(f"netns add {name}" for name in (switch, *names)),
        f"link add {switch} mtu {MTU_BYTES} type veth peer name {BOX} netns {switch} mtu {MTU_BYTES}",
        f"link set dev {switch} addrgenmode none",  # otherwise the kernel sends messages about IPv6 addresses, which would be counted
        f"addr add {box_address(number)}/24 dev {switch}",
        f"link set dev {switch} up",
    ]
    run("ip", "-batch", "-", lines=root)
    inside = [f"link add {BRIDGE} mtu {MTU_BYTES} type bridge mcast_snooping 0"]
    inside += [f"link add {name} mtu {MTU_BYTES} type veth peer name {INTERFACE} netns {name} mtu {MTU_BYTES}" for name in names]
    inside += [f"link set dev {name} addrgenmode none" for name in (BRIDGE, BOX, *names)]
    inside += [f"link set dev {name} master {BRIDGE} up" for name in (BOX, *names)]
    run("ip", "-n", switch, "-batch", "-", lines=[*inside, f"link set dev {BRIDGE} up"])
    for host, limits in enumerate(hosts):
        _set_up_host(number, host, limits)
    receiving = [_bucket(host_name(number, i), limits.receiving.bytes_per_second) for i, limits in enumerate(hosts) if limits.receiving]
    run("tc", "-n", switch, "-batch", "-", lines=receiving)


def _set_up_host(number: int, host: int, limits: HostLimits) -> None:
    """Commands for the inside of a namespace."""
    name, address = host_name(number, host), host_address(number, host)
    route = f"scope {{}} src {address} congctl {CONGESTION_CONTROL}"
    commands = [
        "link set dev lo up",
        f"link set dev {INTERFACE} addrgenmode none",
        f"link set dev {INTERFACE} gso_max_size {SEGMENTS_BYTES}",
        f"link set dev lo mtu {MTU_BYTES} gso_max_size {SEGMENTS_BYTES}",  # a bucket drops what it cannot hold
        f"addr add {address}/24 dev {INTERFACE}",
        f"link set dev {INTERFACE} up",
        f"route replace {subnet(number)} dev {INTERFACE} proto kernel {route.format('link')}",
        f"route replace local {address} dev {INTERFACE} table local proto kernel {route.format('host')}",
    ]
    run("ip", "-n", name, "-batch", "-", lines=commands)
    buckets = [_bucket(INTERFACE, limits.sending.bytes_per_second)] if limits.sending else []
    if limits.local_bytes_per_second is not None:
        buckets.append(_bucket("lo", limits.local_bytes_per_second))
    if buckets:
        run("tc", "-n", name, "-batch", "-", lines=buckets)


def _bucket(interface: str, bytes_per_second: float) -> str:
    bits_per_second = max(8, round(8 * bytes_per_second))
    return f"qdisc add dev {interface} root tbf rate {bits_per_second}bit burst {burst_bytes(bytes_per_second)}b latency {QUEUE_MS}ms"


def burst_bytes(bytes_per_second: float) -> int:
    """Bytes that a bucket of this rate holds."""
    return min(MOST_BURST_BYTES, max(LEAST_BURST_BYTES, round(LATE_SECONDS * bytes_per_second)))


def remove(number: int) -> list[str]:
    """Remove all network devices and namespaces of this emulation. Returns what could not be removed, with reasons."""
    for name in names_in(NAMESPACES, number):
        with suppress(RuntimeFailure):
            run("ip", "netns", "del", name)
    for name in names_in(INTERFACES, number):  # removing one end of a cable removes the other, wherever it is
        with suppress(RuntimeFailure):
            run("ip", "link", "del", name)
    left = [f"namespace {name}" for name in names_in(NAMESPACES, number)]
    return left + [f"network device {name}" for name in names_in(INTERFACES, number)]


def is_subnet_free(number: int) -> bool:
    """Whether no network device of this box has an address in the emulation's subnet."""
    for device in json.loads(run("ip", "-j", "-4", "addr", "show") or "[]"):
        for address in device.get("addr_info", ()):
            if IPv4Interface(f"{address['local']}/{address['prefixlen']}").network.overlaps(subnet(number)):
                return False
    return True
