"""Names and addresses of what an emulation makes. All follow from its number, so that another process can find and remove them.

The longest interface name that Linux accepts has 15 characters.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

NUMBERS = range(512)
"""Numbers of emulations: one subnet each of 198.18.0.0/15, which is reserved for measuring networks."""
NETWORKS = IPv4Network("198.18.0.0/15")
INTERFACE = "eth0"
"""Name of a host's network card, within its namespace."""
NAMESPACES = Path("/run/netns")
INTERFACES = Path("/sys/class/net")
_NAMED = re.compile(r"soap(\d+)-(\d+|br)")
_GROUP = re.compile(r"soap-emulation-(\d+)")


def host_name(number: int, host: int) -> str:
    """Name of a host's namespace, and of its cable's end at the bridge."""
    return f"soap{number}-{host}"


def bridge_name(number: int) -> str:
    """Name of the namespace with the bridge between all hosts, and of the box's end of the cable that leads there."""
    return f"soap{number}-br"


def group_name(number: int) -> str:
    """Name of the CPU control group that holds those of all hosts."""
    return f"soap-emulation-{number}"


def number_of(name: str) -> int | None:
    """Number of the emulation that something belongs to, by its name; None if it belongs to none."""
    found = _NAMED.fullmatch(name) or _GROUP.fullmatch(name)
    return int(found[1]) if found and int(found[1]) in NUMBERS else None


def subnet(number: int) -> IPv4Network:
    """The addresses of one emulation."""
    return IPv4Network((int(NETWORKS.network_address) + number * 256, 24))


def host_address(number: int, host: int) -> IPv4Address:
    """Address of a host within its namespace."""
    return subnet(number)[host + 1]


def box_address(number: int) -> IPv4Address:
    """Address of the box itself, by which the ranks reach the launcher."""
    return subnet(number)[254]


def names_in(folder: Path, number: int | None = None) -> list[str]:
    """Entries of a folder that belong to this emulation, or to any, sorted; empty if there is no such folder."""
    try:
        entries = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
    return [name for name in entries if (of := number_of(name)) is not None and number in (None, of)]
