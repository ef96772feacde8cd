"""Joining the world of ranks, and choosing device and backend; the same for scripts under ``torchrun`` and for our own launcher."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from soap.cluster.topology import DeviceKind
from soap.errors import RuntimeFailure
from soap.runtime.comm.failures import tell_before_leaving
from soap.runtime.system.malloc import keep_freed_memory

Backend = Literal["auto", "gloo", "nccl"]
BACKENDS: tuple[Backend, ...] = ("auto", "gloo", "nccl")

TIMEOUT_S = 300.0
"""How long a rank waits for the others before it gives up."""


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks. ``opened``: ``open_world`` has joined the process group, and ``close_world`` leaves it."""

    rank: int
    size: int
    device: torch.device
    backend: str
    timeout: timedelta
    opened: bool


def choose_backend(backend: str, kind: DeviceKind, local_world_size: int) -> str:
    """The backend: ``auto`` is NCCL if every rank of this host has a GPU of its own, else gloo. RuntimeFailure if it cannot work here."""
    if backend not in BACKENDS:
        raise RuntimeFailure(f"backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise RuntimeFailure("the cluster's devices are GPUs but this machine has none that torch can use; take a topology of CPUs")
    enough = kind == "cuda" and torch.cuda.device_count() >= local_world_size
    if backend == "nccl" and not enough:
        gpus = torch.cuda.device_count() if kind == "cuda" else 0
        raise RuntimeFailure(f"backend 'nccl' needs one GPU per rank: {local_world_size} ranks, {gpus} GPUs here; use backend gloo")
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

    RuntimeFailure if there are fewer processes than devices. From then on the process keeps memory that it frees (``system.malloc``)."""
    keep_freed_memory()
    timeout = timedelta(seconds=timeout_s)
    size = dist.get_world_size() if dist.is_initialized() else world_size(os.environ)
    if size < device_count:
        raise RuntimeFailure(
            f"{size} process{'es' if size > 1 else ''} for a strategy of {device_count} devices: expected one process per device; "
            f"start with torchrun --nproc-per-node {device_count} or soap-run"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    if dist.is_initialized():
        return World(dist.get_rank(), size, choose_device(kind, local_rank), dist.get_backend(), timeout, False)
    chosen = choose_backend(backend, kind, local_size)
    device = choose_device(kind, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if under_launcher(os.environ):
        dist.init_process_group(chosen, timeout=timeout)
    else:
        dist.init_process_group(chosen, timeout=timeout, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    return World(dist.get_rank(), size, device, chosen, timeout, True)


def close_world(world: World) -> None:
    """Leave the ranks if ``open_world`` joined them. If an error is the reason, it is reported first."""
    tell_before_leaving()
    if world.opened and dist.is_initialized():
        dist.destroy_process_group()


def under_launcher(environment: Mapping[str, str]) -> bool:
    """Whether torchrun, or a launcher with the same environment variables, has started this process."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def world_size(environment: Mapping[str, str]) -> int:
    """Number of processes that the environment announces."""
    return int(environment["WORLD_SIZE"]) if under_launcher(environment) else 1


def own_address() -> str:
    """The address by which this machine reaches the one where ranks meet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        return str(probe.getsockname()[0])
