"""Edits of an engine's strategy as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from soap.simulator.compiled.change import KEEP, PREFETCH, REPLACED_OPERATORS, Edit
from soap.simulator.compiled.graph_arrays import Ints
from soap.simulator.compiled.pass_order import repeated
from soap.simulator.compiled.variants import Variants
from soap.strategy.config import OpConfig
from soap.strategy.kept import mark_of, with_mark
from soap.strategy.shares import Shares


def read_config(held: OpConfig, split: tuple[tuple[int, ...], Shares], devices: Ints, replicas: int, mark: int) -> OpConfig:
    """The configuration that arrays hold: ``held``, but for ``split`` (degrees, shares), replicas, mark (unless ``KEEP``) and ``devices``,
    of one micro-batch or of all."""
    degrees, shares = split
    own = devices.reshape(replicas, -1, prod(degrees))[:, 0].ravel().tolist()
    placed = held.placed(degrees, tuple(own), replicas, shares)
    return placed if mark == KEEP else with_mark(placed, mark)


def write_edit(
    edit: Edit,
    positions: Sequence[int],
    variants: Sequence[int],
    configs: Sequence[OpConfig],
    numbers: Sequence[int],
    codes: Sequence[int],
    prefetch: int,
) -> None:
    """Make ``edit``, which has room for it, an edit of the operators at ``positions``, the parameters ``numbers`` and the prefetch."""
    devices = [device for config in configs for device in config.devices]
    count = len(positions)
    edit.count[:REPLACED_OPERATORS] = count, len(devices), len(numbers)
    edit.count[PREFETCH] = prefetch
    edit.operator[:count], edit.variant[:count] = positions, variants
    edit.replicas[:count] = [config.replicas for config in configs]
    edit.marked[:count] = [mark_of(config) for config in configs]
    edit.dev_ptr[1 : count + 1] = np.cumsum([len(config.devices) for config in configs])
    edit.dev[: len(devices)] = devices
    edit.parameter[: len(numbers)], edit.sync[: len(numbers)] = numbers, codes


def held_arrays(variants: Variants, configs: Sequence[OpConfig]) -> tuple[Ints, Ints, Ints, Ints]:
    """All operators' configurations as ``lower_all`` takes them: variants, replicas, devices of all tiles, and marks."""
    numbers = [variants.number(i, config.degrees, config.shares) for i, config in enumerate(configs)]
    replicas, marked = [config.replicas for config in configs], [mark_of(config) for config in configs]
    parts = variants.micro_batches.parts
    devices = [device for i, config in enumerate(configs) for device in repeated(config, parts(i))]
    return np.array(numbers, np.int32), np.array(replicas, np.int32), np.array(devices, np.int32), np.array(marked, np.int32)
