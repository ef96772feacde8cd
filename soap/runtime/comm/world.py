"""Joining the world of ranks, and choosing device and backend; the same for scripts under ``torchrun`` and for our own launcher."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from soap.cluster.topology import DeviceKind
from soap.errors import RuntimeFailure, asked
from soap.runtime.comm import signs
from soap.runtime.comm.failures import tell_before_leaving
from soap.runtime.comm.launched import all_here, local_numbers, loopback, under_launcher, world_size
from soap.runtime.system.process import keep_freed_memory

Backend = Literal["auto", "gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = ("auto", "gloo", "nccl")

TIMEOUT_S = 300.0
"""How long a rank waits for the others before it gives up."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks. ``opened``: ``open_world`` has joined the group. ``set_here``: variables set for that."""

    rank: int
    size: int
    device: torch.device
    backend: str
    timeout: timedelta
    opened: bool
    set_here: tuple[str, ...] = ()


def choose_backend(backend: str, kind: DeviceKind, local_world_size: int) -> str:
    """The backend: ``auto`` is NCCL if every rank of this host has a GPU of its own, else gloo. RuntimeFailure if it cannot work here."""
    if backend not in BACKENDS:
        raise RuntimeFailure(f"backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise RuntimeFailure("the cluster's devices are GPUs but this machine has none that torch can use; take a topology of CPUs")
    enough = kind == "cuda" and torch.cuda.device_count() >= local_world_size
    if backend == "nccl" and not enough:
        gpus = torch.cuda.device_count() if kind == "cuda" else 0
        found = f"{local_world_size} ranks, {gpus} GPUs here"
        raise RuntimeFailure(f"backend 'nccl' needs one GPU per rank: {found}; use {asked('backend')} gloo")
    if backend == "auto":
        return "nccl" if enough else "gloo"
    return backend


def choose_device(kind: DeviceKind, local_rank: int) -> torch.device:
    """The rank's own GPU (shared if there are more ranks than GPUs), or the CPU."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def open_world(device_count: int, kind: DeviceKind = "cpu", backend: str = "auto", timeout_s: float = TIMEOUT_S) -> World:
    """Join the ranks: those of an existing process group, those that the environment names, or this process alone.

    RuntimeFailure if there are fewer processes than devices. From then on the process keeps memory that it frees
    (``process.keep_freed_memory``)."""
    keep_freed_memory()
    timeout, joined = timedelta(seconds=timeout_s), dist.is_initialized()
    size = dist.get_world_size() if joined else world_size(os.environ)
    if size < device_count:
        raise RuntimeFailure(
            f"{size} process{'es' if size > 1 else ''} for a strategy of {device_count} devices: expected one process per device; "
            f"start with torchrun --nproc-per-node {device_count} or soap-run"
        )
    if joined:
        return _joined(kind, timeout)
    local_rank, local_size = local_numbers(os.environ, size)
    chosen, device = choose_backend(backend, kind, local_size), choose_device(kind, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    added = _keep_to(loopback()) if all_here(os.environ) else ()
    if under_launcher(os.environ):
        dist.init_process_group(chosen, timeout=timeout)
    else:
        dist.init_process_group(chosen, timeout=timeout, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    signs.begin(timeout_s)
    return World(dist.get_rank(), size, device, chosen, timeout, True, added)


def _joined(kind: DeviceKind, timeout: timedelta) -> World:
    """The world of a process group that is there already. Its rank's GPU is that of ``LOCAL_RANK``, else the one that was chosen before."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    number = int(local_rank) if local_rank.isdecimal() else torch.cuda.current_device() if kind == "cuda" else 0
    device = choose_device(kind, number)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else collectives of all ranks would use the first one
    signs.begin(timeout.total_seconds())
    return World(dist.get_rank(), dist.get_world_size(), device, dist.get_backend(), timeout, False)


def close_world(world: World) -> None:
    """Leave the ranks if ``open_world`` joined them. If an error is the reason, it is reported first."""
    tell_before_leaving()
    if world.opened and dist.is_initialized():
        signs.end(sys.exception())
        dist.destroy_process_group()
        for name in world.set_here:
            os.environ.pop(name, None)


def _keep_to(wanted: dict[str, str]) -> tuple[str, ...]:
    """Set environment variables that the user has not set. Returns their names."""
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    return tuple(added)


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
