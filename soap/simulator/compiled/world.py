"""Everything that compiled functions read and write, apart from trials, as one structure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from soap.simulator.compiled.graph_arrays import ClusterTables, GraphTables
from soap.simulator.compiled.scratch import Scratch
from soap.simulator.compiled.state import Groups, ShardTables, State, SyncTemplates
from soap.simulator.compiled.variants import VariantTables

if TYPE_CHECKING:
    from soap.simulator.compiled.change import Undo
    from soap.simulator.compiled.history import History
    from soap.simulator.compiled.pass_order import PassTables


class World(NamedTuple):
    """What is simulated (``graph`` on ``cluster``), in which order devices run micro-batches' passes (``order``), tables that grow on
    demand (``variants``, ``groups``, ``shards``, ``templates``), the held strategy (``state``), what its last change has overwritten
    (``undo``), snapshots of its simulation (``history``), and working memory (``scratch``). Trials are not in it, because they change
    places when a proposal is accepted.

    Compiled functions that need three of these or more take a world, and read from it what they use, each under one letter:
    ``G, V, K, R, D, Y = W.graph, W.variants, W.cluster, W.groups, W.shards, W.templates``; ``C, S, U, H = W.state, W.scratch, W.undo,
    W.history``.
    """

    graph: GraphTables
    order: PassTables
    variants: VariantTables
    cluster: ClusterTables
    groups: Groups
    shards: ShardTables
    templates: SyncTemplates
    state: State
    scratch: Scratch
    undo: Undo
    history: History
