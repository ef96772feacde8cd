"""Prices of a folded strategy: what sums over all copies cost on the small topology (``folding``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soap.cluster.topology import Topology
from soap.plan.syncs.represented import Represented
from soap.simulator.communication.options import AllReduceOption
from soap.simulator.communication.prices import Communication


@dataclass(frozen=True)
class CommonSums:
    """Sums over all copies. ``devices``: those of the cluster, ascending. ``options``: of all-reduces, with the cluster's links. ``small``:
    with the links of the small topology that represent these. ``parted``: the same of collectives of equal parts; none if there are none.
    """

    devices: tuple[int, ...]
    options: tuple[AllReduceOption, ...]
    small: tuple[AllReduceOption, ...]
    parted: tuple[AllReduceOption, ...] = ()


class FoldedCommunication(Communication):
    """Prices of communication on the small topology. A sum over both copies costs what the sum over all copies does.

    ``common``: devices of the small topology -> the sum over all copies. ``represented``: the devices for which those of the small
    topology stand.
    """

    def __init__(
        self,
        topology: Topology,
        common: Mapping[tuple[int, ...], CommonSums],
        groups: Sequence[tuple[int, ...]],
        represented: Represented,
    ) -> None:
        super().__init__(topology)
        self.common, self.groups, self.represented = common, groups, represented

    def allreduce_options(self, devices: tuple[int, ...]) -> tuple[AllReduceOption, ...]:
        """The options for an all-reduce over these devices of the small topology."""
        common = self.common.get(devices)
        return super().allreduce_options(devices) if common is None else common.small

    def parted_options(self, devices: tuple[int, ...]) -> tuple[AllReduceOption, ...]:
        """The options for a collective of equal parts over these devices of the small topology."""
        common = self.common.get(devices)
        return super().parted_options(devices) if common is None else common.parted

    def members(self, devices: tuple[int, ...]) -> int:
        """How many devices of all copies sum where these do."""
        common = self.common.get(devices)
        return len(devices if common is None else common.devices)

    def places(self, sharing: tuple[int, ...]) -> Sequence[Sequence[int]]:
        """For each of the devices that share what they own in parts, the places of those for which it stands among all that do."""
        return [own.tolist() for own in self.represented.places(sharing)] if sharing in self.common else super().places(sharing)
