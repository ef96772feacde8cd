"""Process groups, each made by its members alone.

``torch.distributed.new_group`` wants to be called on all ranks, because it counts the groups of a process, and the count is a group's name
in the store. Ranks that make their own groups only have to agree on names in another way. ``use_local_synchronization`` does not help: it
names a group by its members and by how many groups the process is in (torch 2.13), which differs between members as soon as groups
overlap. So the count is set to the group's number among all, which rank 0 has told. No cycle of ranks that wait for each other: members
make their groups by ascending numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from soap.errors import RuntimeFailure

Groups = dict[tuple[int, ...], dist.ProcessGroup | None]
"""Devices, ascending -> their group; None for the group of all. Devices, descending -> a second group of the same: gloo requests a message
on the connection on which it sends, so requests queue behind data, and what goes one way would wait for all that goes the other."""


def all_make_all() -> bool:
    """Whether every rank has to take part in making every group: NCCL splits a communicator that is bound to a GPU, or torch was told to
    wait for all ranks after each."""
    world = dist.group.WORLD
    return (world is not None and world.bound_device_id is not None) or os.environ.get("TORCH_DIST_INIT_BARRIER") == "1"


def needed_by(groups: Sequence[tuple[int, ...]], ranks: int) -> list[dict[int, tuple[int, ...]]]:
    """By rank, the groups that it has to make, by number."""
    if all_make_all():
        return [dict(enumerate(groups))] * ranks
    found: list[dict[int, tuple[int, ...]]] = [{} for _ in range(ranks)]
    for number, devices in enumerate(groups):
        for device in devices:
            found[device][number] = devices
    return found


def make_groups(known: Groups, groups: Mapping[int, tuple[int, ...]], count: int, timeout: timedelta) -> None:
    """Make those that are not known. Called on all ranks at once; each gives at least the groups that it is in, and equal numbers, below
    ``count``."""
    world, rank, all_of_them = distributed_c10d._world, dist.get_rank(), all_make_all()
    if not isinstance(getattr(world, "group_count", None), int):  # torch's own matter, as 2.11 to 2.13 have it
        raise RuntimeFailure(f"torch {torch.__version__} counts process groups in a way that we do not know; expected torch 2.11 to 2.13")
    first = world.group_count
    for number, devices in sorted(groups.items()):
        if devices not in known and (all_of_them or rank in devices):
            world.group_count = first + number
            known[devices] = dist.new_group(list(devices), timeout=timeout)
    world.group_count = first + count
