"""What an engine's compiled code asks for as it goes on: variants, geometries of parameters with prices, sets of devices, and
templates of synchronizations."""

from __future__ import annotations

from typing import NamedTuple, cast

from soap.simulator.compiled.groups import DeviceGroups
from soap.simulator.compiled.lists import missing_entry
from soap.simulator.compiled.shards import Geometries
from soap.simulator.compiled.state import Groups, ShardTables, SyncTemplates
from soap.simulator.compiled.templates import Templates
from soap.simulator.compiled.variants import Variants, VariantTables
from soap.simulator.draws import Draws
from soap.simulator.shared import Shared


class Tables(NamedTuple):
    """Parts of the world (``compiled.world``)."""

    variants: VariantTables
    shards: ShardTables
    groups: Groups
    templates: SyncTemplates


class EngineTables:
    """The tables of one engine."""

    def __init__(self, shared: Shared, draws: Draws | None) -> None:
        cuts, topology = shared.cuts, shared.topology
        self.variants = Variants(cuts, Geometries(shared.graph, topology, cuts.types, shared.costs, shared.training, shared.codes), draws)
        self._groups = DeviceGroups(shared.communication, shared.cluster_tables)
        self._templates = Templates(shared.graph, shared.communication, shared.codes, self._groups)
        self._given = cast(Tables, (None,) * len(Tables._fields))
        self._known = -1

    def groups(self) -> Groups:
        """The sets of devices."""
        return self._groups.arrays()

    def has_new_variants(self) -> bool:
        """Whether some were made since ``renewed`` was called."""
        return len(self.variants.made) > self._known

    def renewed(self) -> dict[str, NamedTuple]:
        """Name -> part of the world, of those that are others than when this was called before."""
        self._known = len(self.variants.made)
        tables = self.variants.arrays(), self.variants.geometries.arrays(), self._groups.arrays(), self._templates.arrays()
        before, self._given = self._given, Tables(*tables)
        names = [name for name, known, own in zip(Tables._fields, before, self._given, strict=True) if own is not known]
        return {name: getattr(self._given, name) for name in names}

    def find_missing(self) -> None:
        """Make what compiled code has not found."""
        _, shards, groups, templates = self._given
        if groups.sets.missing[0]:
            self._groups.add(missing_entry(groups.sets))
        elif templates.known.missing[0]:
            self._templates.add(missing_entry(templates.known))
        elif shards.tied.missing[0]:
            self.variants.tie(missing_entry(shards.tied))
        elif shards.price.missing[0]:
            self.variants.geometries.price(missing_entry(shards.price))
        elif shards.compressed.missing[0]:
            self.variants.geometries.compress(missing_entry(shards.compressed))
