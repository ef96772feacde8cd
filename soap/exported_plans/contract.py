"""What a target is: another trainer that a plan is written for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from soap.cluster.topology import Topology
from soap.exported_plans.configuration import Base, Configuration, Recompute, Sharing
from soap.exported_plans.layers import Layers
from soap.model.graph import OperatorGraph
from soap.strategy.wrapped import USUAL, Wrapped


@dataclass(frozen=True)
class Written:
    """Values that a file is made of. ``autocast``: the type of mixed precision, None without. ``devices_each``: of a host. ``gathered``,
    ``summed``: elements of a group of values, and of a bucket of gradients, that are not those of one module. ``facts``: lines about the
    plan, for the head of the file."""

    configuration: Configuration
    graph: OperatorGraph
    topology: Topology
    layers: Layers
    dtype: str
    autocast: str | None
    sequence: int | None
    devices_each: int
    gathered: int
    summed: int
    facts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """Another trainer. ``version``: of it, whose names of fields these are. ``bases``, ``sharing``, ``recompute``: what it can be told, the
    usual one first. ``schedules``: of pipelines, by our names without numbers, and its names; empty: its configuration has no pipelines.
    ``schedule_rule``: why a schedule with so many stages, chunks on each and micro-batches is refused; empty if it is not. ``allows``:
    why it refuses a combination; empty if it does not. ``write``: the text of its file. ``notes``: what its configuration leaves to the
    model's code. ``wraps``: how it brings parameters together by a configuration. ``depths``: values of ``Configuration.prefetch`` that it
    can be told, the usual one first. ``maps_experts``: whether it can be told how experts lie beside all else."""

    name: str
    title: str
    version: str
    suffix: str
    bases: tuple[Base, ...]
    sharing: tuple[Sharing, ...]
    recompute: tuple[Recompute, ...]
    offloads: bool
    write: Callable[[Written], str]
    allows: Callable[[Configuration], str]
    schedules: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    wraps: Callable[[Configuration, Layers], Wrapped] = lambda configuration, layers: USUAL
    depths: tuple[int, ...] = (1,)
    maps_experts: bool = False
