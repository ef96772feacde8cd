"""Collectives of equal parts, by which plans gather and scatter between GPUs (``soap.runtime.comm.packing``): NCCL alone, in plans."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.ranks import run_all
from soap.runtime.comm.parcels import all_gather_parts, reduce_scatter_parts
from soap.runtime.comm.redistribute import Communicator

TYPES = (torch.float32, torch.bfloat16)
SIZES = (2**20, 2**26)
REPEATS = 10
CLUSTER = """
name: gpus
hosts:
  - name: box
    devices: {type: h200, count: 2}
    cpu_cores: 16
    links:
      intra: {bandwidth: 450 GB/s, latency: 5 us, interconnect: nvlink4}
"""
"""Two GPUs: plans for them use collectives. What they are is not measured here."""


def alone(device: str, tiny: bool) -> list[dict[str, Any]]:
    """A world of one rank: both collectives leave what they got. What a call takes of it."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        comm = Communicator(torch.device(device), [(0,)], timedelta(seconds=60))
        return [_both(comm, kind, size // 1024 if tiny else size) for kind in TYPES for size in SIZES]
    finally:
        dist.destroy_process_group()


def _both(comm: Communicator, kind: torch.dtype, size: int) -> dict[str, Any]:
    given = torch.arange(size, device=comm.device).remainder(251).to(kind)
    gathered, summed = given.clone(), torch.empty_like(given)
    begin = time.perf_counter_ns()
    for _ in range(REPEATS):
        all_gather_parts(comm, gathered, (0,)).wait()
        reduce_scatter_parts(comm, given, summed, (0,)).wait()
    comm.barrier()
    taken_ns = (time.perf_counter_ns() - begin) // (2 * REPEATS)
    equal = torch.equal(gathered, given) and torch.equal(summed, given)
    return {"type": str(kind), "elements": size, "equal": equal, "ns": taken_ns}


def plans(device: str, tiny: bool) -> list[dict[str, Any]]:
    """``soap-run --check`` of two ranks with sharded states and parameters: over gloo on one device, and over NCCL where there are two."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    ways = [["--device", device, "--backend", "gloo"], *([["--backend", "nccl"]] if gpus > 1 else [])]
    cluster = Path(os.environ["XDG_CACHE_HOME"], "gpus.yaml")
    cluster.write_text(CLUSTER)
    names = ["fsdp"] if tiny else ["zero1", "fsdp", "fsdp+recompute"]
    more = [[]] if tiny else [[], ["--dtype", "bfloat16"], ["--accumulate", "2", "--clip-norm", "1", "--optimizer", "adam"]]
    return run_all([("zoo:gpt:tiny", name, 2, [*way, *options]) for way in ways for name in names for options in more], str(cluster))
