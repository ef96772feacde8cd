"""What memory is held for. Each byte that a device holds is of one of these kinds; reports say how much of a peak each of them is."""

from __future__ import annotations

from enum import StrEnum


class MemoryKind(StrEnum):
    """``VALUES``: of parameters, copies and assembled regions included. ``GRADIENTS``: of parameters. ``STATES``: of the optimizer, and
    residuals. ``BATCH``: the batch, constants and state that the step makes. ``KEPT``: what the forward pass leaves for the backward pass.
    ``WORKSPACE``: what passes and updates take while they go on, gradients between operators included. ``BUFFERS``: what is on its way
    between devices."""

    VALUES = "values"
    GRADIENTS = "gradients"
    STATES = "states"
    BATCH = "batch"
    KEPT = "kept"
    WORKSPACE = "workspace"
    BUFFERS = "buffers"


ALLOWANCE = "allowance"
"""In reports beside the kinds: what a device may hold more than the simulated order of tasks does (``simulator.memory.sweep``)."""
