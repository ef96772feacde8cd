"""Runs several strategies in the same processes, one after the other, again and again. So whatever slows the machine down for a while
does not hit one of them alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from soap.plan.running.order import ExecutionOrder
from soap.simulator.reference import execution_order
from soap.simulator.simulate import Simulation
from soap.strategy.config import Strategy

if TYPE_CHECKING:
    from soap.measure.iteration import StepTimes  # torch


def in_turns(
    strategies: Mapping[str, Strategy], simulations: Mapping[str, Simulation], turns: int
) -> dict[str, tuple[Strategy, ExecutionOrder]]:
    """A job's strategies: each once per turn, under a name of its own, with the order of its tiles. ``simulations``: of each strategy."""
    orders = {name: execution_order(own.tasks, own.schedule) for name, own in simulations.items()}
    return {_name(name, turn): (strategies[name], orders[name]) for turn in range(turns) for name in strategies}


def turns_of(measured: Mapping[str, StepTimes], name: str) -> list[StepTimes]:
    """What was measured of a strategy, turn by turn."""
    found: list[StepTimes] = []
    while (own := _name(name, len(found))) in measured:
        found.append(measured[own])
    return found


def _name(name: str, turn: int) -> str:
    return f"{name}, {turn}"
