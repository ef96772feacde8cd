"""How a search's budget of proposals is divided and spent."""

from __future__ import annotations

from dataclasses import dataclass


def chain_budgets(budget: int, chains: int) -> list[int]:
    """Number of proposals of each chain: the first gets half of the budget, the others share the rest."""
    if chains == 1:
        return [budget]
    rest = budget // 2
    others = [rest // (chains - 1) + (i < rest % (chains - 1)) for i in range(chains - 1)]
    return [budget - rest, *others]


@dataclass
class Allowance:
    """The proposals that chains may still spend. ``patience``: the share of ``budget`` that may bring no improvement."""

    budget: int
    patience: float | None
    used: int = 0
    last_improvement: int = 0

    def use(self, *, improved: bool, count: int = 1) -> None:
        """Count proposals."""
        self.used += count
        if improved:
            self.last_improvement = self.used

    @property
    def spent(self) -> bool:
        """Whether budget or patience is exhausted."""
        idle = self.used - self.last_improvement
        impatient = self.patience is not None and idle >= self.patience * self.budget
        return self.used >= self.budget or impatient
