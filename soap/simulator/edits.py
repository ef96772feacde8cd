"""Edits of an engine's strategy as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soap.simulator.compiled.change import REPLACED_OPERATORS, Edit
from soap.strategy.config import OpConfig


def write_edit(
    edit: Edit,
    positions: Sequence[int],
    variants: Sequence[int],
    configs: Sequence[OpConfig],
    numbers: Sequence[int],
    codes: Sequence[int],
) -> None:
    """Make ``edit``, which has room for it, an edit of the operators at ``positions`` and the parameters ``numbers``."""
    devices = [device for config in configs for device in config.devices]
    count = len(positions)
    edit.count[:REPLACED_OPERATORS] = count, len(devices), len(numbers)
    edit.operator[:count], edit.variant[:count] = positions, variants
    edit.replicas[:count] = [config.replicas for config in configs]
    edit.marked[:count] = [config.recompute for config in configs]
    edit.dev_ptr[1 : count + 1] = np.cumsum([len(config.devices) for config in configs])
    edit.dev[: len(devices)] = devices
    edit.parameter[: len(numbers)], edit.sync[: len(numbers)] = numbers, codes
