"""How much longer a whole step of processes on one machine takes than its tasks say: fitted to the plans that
``benchmarks.default_command`` has timed with measured costs, and to each model's only by the plans of the others.

An error is ln(measured / middle of the draws). What the draws of a plan vary by itself is known already, so it is taken off its spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median, pvariance
from typing import NamedTuple

from benchmarks.default_cells import USUAL, Cell
from soap.api.deciding import DECIDING_SEED
from soap.cluster.presets import preset
from soap.errors import SoapError
from soap.profiles.roofline import RooflineCosts
from soap.profiles.spreads import KnownSpreads
from soap.simulator.draws import Draws, Error, drawn_ns

MODE = "default"
"""Of the cells that count: elsewhere what is wrong about estimates is larger than this."""
LEAST_MODELS = 4


class StepError(NamedTuple):
    """Mean and spread of ln(step / what its tasks say)."""

    mean: float
    spread: float


def step_error(cells: Iterable[Cell]) -> StepError:
    """Of all cells with measured costs, each of which counts by its data parallelism. SoapError if there are too few models."""
    counted = [cell for cell in cells if cell.mode == MODE]
    if len(models := {cell.model for cell in counted}) < LEAST_MODELS:
        raise SoapError(f"{len(models)} models were timed with measured costs; expected {LEAST_MODELS} or more")
    errors = [math.log(median(cell.times_ns[USUAL]) / median(cell.draws_ns[USUAL])) for cell in counted]
    known = sum(pvariance([math.log(ns) for ns in cell.draws_ns[USUAL]]) for cell in counted) / len(counted)
    return StepError(sum(errors) / len(errors), math.sqrt(max(pvariance(errors) - known, 0.0)))


def judged(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, with draws of whole steps: with the error that the other models have. As they are where these are too few."""
    found = []
    for cell in cells:
        others = [other for other in cells if other.model != cell.model]
        try:
            error = step_error(others)
        except SoapError:
            found.append(cell)
            continue
        topology = preset(cell.cluster)
        draws = Draws(KnownSpreads(RooflineCosts(topology), topology), len(cell.draws_ns[USUAL]), DECIDING_SEED)
        factors = draws.factors([Error(("step",), error.spread, error.mean)])
        drawn = {name: tuple(map(drawn_ns, times, factors.tolist())) for name, times in cell.draws_ns.items()}
        found.append(replace(cell, draws_ns=drawn))
    return found
