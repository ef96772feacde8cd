"""Which leases make one step of all workers together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Steps:
    """An epoch of so many ``leases``, of which as many as there are ``workers`` are a step, one after the other; the last step of an epoch
    may have fewer."""

    leases: int
    workers: int

    @property
    def of_epoch(self) -> int:
        """How many steps an epoch has."""
        return -(-self.leases // self.workers)

    def of(self, lease: int) -> int:
        """The step to which a lease belongs."""
        epoch, place = divmod(lease, self.leases)
        return epoch * self.of_epoch + place // self.workers

    def members(self, step: int) -> range:
        """The leases of a step."""
        epoch, place = divmod(step, self.of_epoch)
        first = epoch * self.leases + place * self.workers
        return range(first, min(first + self.workers, (epoch + 1) * self.leases))
