"""Proposals of descents and of polishing: another strategy, and what it changes. Compiled chains have their own
(``soap.search.compiled.moves``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from soap.strategy.config import OpConfig, Strategy


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed strategy; ``operators`` names what was changed (operators, or parameters if their synchronization changes; for the
    prefetch the first gathered parameter stands)."""

    strategy: Strategy
    move: str
    operators: tuple[str, ...]


def changed(strategy: Strategy, placements: Mapping[str, OpConfig]) -> dict[str, OpConfig]:
    """The operators that ``placements`` splits or places anew, as changed. Every move ends here: it chooses how operators are split and
    where they run, and the rest of a configuration stays."""
    old = strategy.operators
    new = {name: old[name].placed_like(config) for name, config in placements.items()}
    return {name: config for name, config in new.items() if config is not old[name]}
