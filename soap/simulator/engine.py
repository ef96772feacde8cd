"""The compiled simulator: the same plans, tasks and times as ``lowering`` and ``reference``, from arrays of integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from soap.errors import ModelError
from soap.plan.pass_order import PassOrder
from soap.plan.scheduling import Orders
from soap.simulator.communication.offloading import names_behind_links
from soap.simulator.compiled.change import KEEP, PREFETCH, REPLACED_OPERATORS, Edit, make_edit, make_undo
from soap.simulator.compiled.communication import MISSING
from soap.simulator.compiled.draws import NO_DRAWING, Drawing
from soap.simulator.compiled.evaluate import confirm, evaluate, take_back
from soap.simulator.compiled.events import NO_BOUND, STOPPED, keep_order, simulate_all
from soap.simulator.compiled.fetches import UNCOVERED
from soap.simulator.compiled.graph_arrays import Ints, Longs
from soap.simulator.compiled.groups import DeviceGroups
from soap.simulator.compiled.handles import handle
from soap.simulator.compiled.history import complete, make_history, retrace
from soap.simulator.compiled.lists import missing_entry
from soap.simulator.compiled.pass_order import pass_tables, repeated
from soap.simulator.compiled.played import held_resources
from soap.simulator.compiled.rebuild import STEPS, Held
from soap.simulator.compiled.scratch import FULL, make_scratch
from soap.simulator.compiled.shards import Geometries
from soap.simulator.compiled.state import ARENA, SLOTS, Groups, ShardTables, State, SyncTemplates, make_state
from soap.simulator.compiled.task_keys import STATE_FULL
from soap.simulator.compiled.templates import Templates
from soap.simulator.compiled.trial import TAKEN, Trial, make_trial
from soap.simulator.compiled.variants import Variants, VariantTables
from soap.simulator.compiled.waits import Waits, note_waits
from soap.simulator.compiled.world import World
from soap.simulator.draws import Draws
from soap.simulator.shared import Shared
from soap.simulator.tasks import UNNUMBERED, unnumbered
from soap.strategy.config import NOTHING, OpConfig, Strategy, SyncConfig, check_config, check_parts
from soap.strategy.marks import mark_of, require_allowed, with_mark
from soap.strategy.shares import Shares
from soap.strategy.stages import require_stages


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


def read_config(held: OpConfig, split: tuple[tuple[int, ...], Shares], devices: Ints, replicas: int, mark: int) -> OpConfig:
    """The configuration that arrays hold: ``held``, but for ``split`` (degrees, shares), replicas, mark (unless ``KEEP``) and ``devices``,
    of one micro-batch or of all."""
    degrees, shares = split
    own = devices.reshape(replicas, -1, prod(degrees))[:, 0].ravel().tolist()
    placed = held.placed(degrees, tuple(own), replicas, shares)
    return placed if mark == KEEP else with_mark(placed, mark)


def write_edit(
    edit: Edit,
    positions: Sequence[int],
    variants: Sequence[int],
    configs: Sequence[OpConfig],
    numbers: Sequence[int],
    codes: Sequence[int],
    prefetch: int,
) -> None:
    """Make ``edit``, which has room for it, an edit of the operators at ``positions``, the parameters ``numbers`` and the prefetch."""
    devices = [device for config in configs for device in config.devices]
    count = len(positions)
    edit.count[:REPLACED_OPERATORS] = count, len(devices), len(numbers)
    edit.count[PREFETCH] = prefetch
    edit.operator[:count], edit.variant[:count] = positions, variants
    edit.replicas[:count] = [config.replicas for config in configs]
    edit.marked[:count] = [mark_of(config) for config in configs]
    edit.dev_ptr[1 : count + 1] = np.cumsum([len(config.devices) for config in configs])
    edit.dev[: len(devices)] = devices
    edit.parameter[: len(numbers)], edit.sync[: len(numbers)] = numbers, codes


def held_arrays(variants: Variants, configs: Sequence[OpConfig]) -> tuple[Ints, Ints, Ints, Ints]:
    """All operators' configurations as ``STEPS`` take them: variants, replicas, devices of all tiles, and marks."""
    numbers = [variants.number(i, config.degrees, config.shares) for i, config in enumerate(configs)]
    replicas, marked = [config.replicas for config in configs], [mark_of(config) for config in configs]
    parts = variants.micro_batches.parts
    devices = [device for i, config in enumerate(configs) for device in repeated(config, parts(i))]
    return np.array(numbers, np.int32), np.array(replicas, np.int32), np.array(devices, np.int32), np.array(marked, np.int32)


Result = TypeVar("Result")
Handles = tuple[World, Trial, Trial, Edit]
"""What compiled functions need for a change: the world, the trial of the held strategy, a second trial to fill, and the edit."""

ROOM = 4
"""Arrays that were full with accepted changes are made this many times as large as the strategy needs."""


class Engine:
    """Simulates strategies of one graph on one cluster. Holds one strategy at a time."""

    state: State
    trial: Trial
    other: Trial
    edit: Edit
    _edit: Edit
    _trial: Trial
    _other: Trial
    _read: Ints
    """``State.dev_ptr`` when ``settle`` last read configurations."""

    drawing: Drawing = NO_DRAWING
    """For compiled code: what plays the strategy under draws of the costs (``drawn_engine``)."""

    def __init__(self, shared: Shared, draws: Draws | None = None) -> None:
        """``shared``: graph, cluster and costs, with what other engines of these have. ``draws``: for ``DrawnEngine``."""
        graph, topology = shared.graph, shared.topology
        self.shared, self.graph, self.topology, self._orders = shared, graph, topology, Orders(graph)
        self.choices: Mapping[str, Sequence[SyncConfig]] = {}
        """Parameter -> the synchronizations that compiled code chooses from."""
        self._parts: dict[str, Any] = {}
        self._world: World | None = None
        self._graph, cluster = shared.graph_tables, shared.cluster_tables
        self._tables = EngineTables(shared, draws)
        self.variants = self._tables.variants
        self._order: PassOrder | None = None
        self._renew(graph=self._graph, order=pass_tables(None, len(graph.operators)), cluster=cluster)
        self._size, self._slots, self._arena = 4096, 4096, 65536
        self._make_scratch()
        self._resources = topology.device_count + len(topology.links) + len(names_behind_links(topology))
        self._parameters = {tensor.name: position for position, tensor in enumerate(graph.parameters)}
        self._proposed: tuple[dict[int, OpConfig], dict[str, SyncConfig], dict[int, int], int] = {}, {}, {}, 0
        self._proposed_ns: int | None = None
        self._make_edit(4 * topology.device_count)
        self.makespan_ns = 0
        self._renew(**self._tables.renewed())
        self._make_state()

    def load(self, strategy: Strategy) -> None:
        """Hold a strategy, and lower it. StrategyError if it is stale, or does not fit the graph or the cluster."""
        strategy.require_exact()
        strategy.validate(self.graph, self.topology.device_count)
        self._loaded = strategy
        self._set_order(strategy)
        self._configs = [strategy.operators[op.name] for op in self.graph.operators]
        self._syncs, self._codes = dict(strategy.parameters), self.shared.codes.of_parameters(self.graph, strategy)
        self._make_room(strategy.microbatches)
        held = held_arrays(self.variants, self._configs)
        if self._tables.has_new_variants():
            self._renew(**self._tables.renewed())
        self._lower(*held)

    def _set_order(self, strategy: Strategy) -> None:
        """From now on cut operators into the strategy's micro-batches, and let their passes follow its order."""
        order = self._orders.order(strategy)
        if order is not self._order:
            self._renew(order=pass_tables(order, len(self.graph.operators)))
            self._order = order
        self.variants.micro_batches = self._orders.cut(strategy.microbatches)
        self.variants.divided = order.divided if order is not None else frozenset()

    def _make_room(self, microbatches: int) -> None:
        """Grow the arrays to what the loaded strategy needs, about, rather than trying every smaller size: four slots a tile, and two edges
        for each parameter that a tile uses, to a sum and from that."""
        tiles = [microbatches * len(config.devices) for config in self._configs]
        self._grow_to(4 * sum(tiles), 0)
        edges = 2 * sum(count * len(op.parameters) for count, op in zip(tiles, self.graph.operators, strict=True))
        if 4 * self._size < edges:
            self._size = edges // 4 + 1
            self._make_scratch()

    def _grow_to(self, slots: int, arena: int) -> None:
        if self._slots < slots or self._arena < arena:
            while self._slots < slots or self._arena < arena:
                self._slots, self._arena = 2 * self._slots, 2 * self._arena
            self._make_state()

    def _lower(self, *held: Ints) -> None:
        """Lower a strategy from scratch. ``held``: see ``held_arrays``. A step that lacks an entry of a table begins anew, and none before
        it."""
        state, used = None, list[Longs]()

        def lower() -> None:
            nonlocal state
            if state is not self._parts["state"]:
                state = self._parts["state"]
                used[:] = [self.state.used.copy()]
                self.state.sync[: len(self._codes)], self.state.prefetch[0] = self._codes, self._loaded.prefetch
            for step in STEPS[len(used) - 1 :]:
                self.state.used[:] = used[-1]
                step(self.world, handle(Held(*held)))
                used.append(self.state.used.copy())

        self._try(lower)
        self._lowered, self._read = self.state.used.copy(), self.state.dev_ptr.copy()

    def simulate(self) -> int:
        """Makespan in ns of the loaded strategy, from a full simulation, which the next delta simulations start from."""
        self.makespan_ns = self.play()
        self._keep()
        return self.makespan_ns

    def play(self) -> int:
        """The same makespan, without getting ready for delta simulations."""
        graph, state, groups = self._parts["graph"], self._parts["state"], self._parts["groups"]
        return int(simulate_all(graph, state, groups, self._other, self._trial, 0, NO_BOUND))

    def propose(self, operator: str, config: OpConfig, at_most_ns: int = NO_BOUND) -> int | None:
        """Makespan in ns with another configuration of one operator, by a delta simulation; None if it exceeds ``at_most_ns``.

        Call ``accept`` or ``reject`` before the next proposal. A proposal that exceeds the bound can only be rejected.
        """
        return self.propose_changes({operator: config}, at_most_ns=at_most_ns)

    def propose_sync(self, parameter: str, sync: SyncConfig, at_most_ns: int = NO_BOUND) -> int | None:
        """``propose`` with another synchronization of one parameter."""
        return self.propose_changes({}, {parameter: sync}, at_most_ns=at_most_ns)

    def propose_changes(
        self, operators: Mapping[str, OpConfig], parameters: Mapping[str, SyncConfig] = NOTHING, *, prefetch: int | None = None,
        at_most_ns: int = NO_BOUND,
    ) -> int | None:  # fmt: skip
        """``propose`` with other configurations of operators, synchronizations of parameters and prefetch (None: as it is), all at once."""
        prefetch = self._loaded.prefetch if prefetch is None else prefetch
        positions = [self.graph.index[name] for name in operators]
        for position, config in zip(positions, operators.values(), strict=True):
            check_config(self.graph.operators[position], config, self.topology.device_count)
            require_allowed(self.graph, self.graph.operators[position], config)
            check_parts(self.variants.micro_batches, position, config)
        if self._loaded.stages:
            require_stages(self.graph, self._loaded.stages, self._loaded.schedule, {**self.strategy.operators, **operators})
        numbers, codes = [self._parameters[name] for name in parameters], [self.shared.codes.code(sync) for sync in parameters.values()]
        variants = [self.variant(position, own.degrees, own.shares) for position, own in zip(positions, operators.values(), strict=True)]
        self.make_edit_room(sum(len(config.devices) for config in operators.values()))
        write_edit(self.edit, positions, variants, list(operators.values()), numbers, codes, prefetch)
        found = int(self._try(lambda: self._whole(lambda: evaluate(*self.handles(), at_most_ns)), self._renew_state))
        changed = dict(zip(positions, operators.values(), strict=True)), dict(parameters), dict(zip(numbers, codes, strict=True))
        self._proposed = *changed, prefetch
        self._proposed_ns = None if found == STOPPED else found
        return self._proposed_ns

    def accept(self) -> None:
        """Hold the proposed strategy. ValueError if there is no proposal, or it exceeds its bound."""
        if self._proposed_ns is None:
            raise ValueError("nothing to accept: the proposal exceeds its bound, or there is none")
        configs, syncs, codes, prefetch = self._proposed
        for position, config in configs.items():
            self._configs[position] = config
        self._syncs.update(syncs)
        self._codes[[*codes]] = [*codes.values()]
        self._loaded = replace(self._loaded, prefetch=prefetch)
        confirm(self.world, self._trial, self._other)
        self.trial, self.other = self.other, self.trial
        self._trial, self._other = self._other, self._trial
        self._keep()
        self.makespan_ns, self._proposed_ns = self._proposed_ns, None

    def reject(self) -> None:
        """Return to the strategy before the proposal."""
        take_back(self.world)
        self._proposed_ns = None

    def _keep(self) -> None:
        """Make the last simulation the one that delta simulations start from."""
        keep_order(self._trial)
        retrace(self._parts["graph"], self._parts["state"], self._trial, self._parts["history"])

    def handles(self) -> Handles:
        """The arguments of compiled functions."""
        return self.world, self._trial, self._other, self._edit

    @property
    def usual_ns(self) -> int:
        """``makespan_ns``: there is only one set of costs."""
        return self.makespan_ns

    @property
    def world(self) -> World:
        """What compiled functions read and write; made anew after a part of it was renewed."""
        if self._world is None:
            self._world = handle(World(**self._parts))
        return self._world

    def _renew(self, **parts: NamedTuple) -> None:
        """Replace parts of the world, if any are given. Handles are addresses of arrays, so these parts and the world get new handles."""
        if not parts:
            return
        self._parts |= {name: handle(part) for name, part in parts.items()}
        self._world = None

    def _whole(self, work: Callable[[], Result]) -> Result:
        """Do ``work``; if it fails, reject what it has changed, so that all of it is done or nothing."""
        try:
            return work()
        except (MemoryError, LookupError, ValueError):
            self.reject()
            raise

    def attempt(self, work: Callable[[], Result], settle: Callable[[], None]) -> Result:
        """Do compiled work on ``handles()``, all of it or nothing. If a table or room is missing, make it and start again.

        ``settle``: called before the state is renewed; it must call ``Engine.settle``.
        """

        def renew() -> None:
            settle()
            self._renew_state()

        return self._try(lambda: self._whole(work), renew)

    def last_trial(self) -> Trial:
        """The simulation of the proposal, with all its tasks; without one, that of the strategy that is held."""
        if self._proposed_ns is not None:
            complete(self._trial, self._other)
        return self._trial if self._proposed_ns is None else self._other

    def consult(self, work: Callable[[], Result]) -> Result:
        """Do compiled work on ``handles()`` that changes neither the held strategy nor the proposal."""
        return self._try(work)

    def settle(self, *, swapped: bool, makespan_ns: int) -> None:
        """Bring the Python side up to date after compiled steps. ``swapped``: whether the two trials have changed places."""
        if swapped:
            self.trial, self.other = self.other, self.trial
            self._trial, self._other = self._other, self._trial
        self.makespan_ns = makespan_ns
        C, read = self.state, self._read
        self._read = C.dev_ptr.copy()
        for position in np.flatnonzero((read != self._read)[: len(self._configs)]).tolist():  # a change puts devices behind all others
            first, tiles = int(C.dev_ptr[position]), int(C.tiles[position])
            own = C.variant[position], C.dev[first : first + tiles], C.replicas[position], C.marked[position]
            self._configs[position] = self.config(position, *own)
        if not np.array_equal(C.sync[: len(self._codes)], self._codes):
            self._syncs, self._codes = self.syncs(C.sync), C.sync[: len(self._codes)].copy()
        self._loaded = replace(self._loaded, prefetch=int(C.prefetch[0]))

    def config(self, position: int, variant: int, devices: Ints, replicas: int, marked: int = KEEP) -> OpConfig:
        """An operator's configuration with this variant on these devices, of one micro-batch or of all; fields that compiled code does not
        know stay as held. ``marked``: as in ``State``, ``KEEP`` for as held."""
        return read_config(self._configs[position], self.variants.split(variant), devices, int(replicas), int(marked))

    def sync(self, parameter: str, code: int) -> SyncConfig:
        """A parameter's synchronization with this code: as held, as it may be chosen, or as it was first given. What codes do not know
        stays as it is there."""
        own = self._syncs.get(parameter, SyncConfig()), *self.choices.get(parameter, ())
        return next((sync for sync in own if self.shared.codes.code(sync) == code), self.shared.codes.sync(code))

    def syncs(self, codes: Ints) -> dict[str, SyncConfig]:
        """Parameter -> its synchronization, where it differs from the default. ``codes[parameter]``: as in ``SyncCodes``."""
        found = {tensor.name: self.sync(tensor.name, code) for tensor, code in zip(self.graph.parameters, codes.tolist(), strict=False)}
        return {name: sync for name, sync in found.items() if sync != SyncConfig()}

    def variant(self, position: int, degrees: tuple[int, ...], shares: tuple[tuple[int, ...], ...] = ()) -> int:
        """The number of an operator's variant. Compiled work that begins later knows the variant."""
        number = self.variants.number(position, degrees, shares)
        if self._tables.has_new_variants():
            self._renew(**self._tables.renewed())
        return number

    @property
    def strategy(self) -> Strategy:
        """The strategy that is held."""
        configs = zip(self.graph.operators, self._configs, strict=True)
        return replace(self._loaded, operators={op.name: config for op, config in configs}, parameters=self._syncs)

    def taken(self) -> Ints:
        """The slots of the tasks of ``last_trial``, in the order in which they were taken. A proposal that was stopped at its bound has
        none: reject it first."""
        self.last_trial()  # makes all of them
        return self._last.order[: self._last.size[TAKEN]]

    def times(self, slots: Ints) -> tuple[Longs, Longs]:
        """When the tasks in these slots, which were taken, start and end, in ns."""
        return self._last.start[slots], self._last.end[slots]

    @property
    def _last(self) -> Trial:
        return self.trial if self._proposed_ns is None else self.other

    def waits(self, slots: Ints) -> tuple[Longs, Ints]:
        """Pairs (``k``, slot), sorted by ``k``: the task in slot ``slots[k]``, which was taken, waits for the one in that slot."""
        place = np.full(len(self.trial.order), -1, np.int32)
        place[slots] = np.arange(len(slots))
        counts = self.state.waits[slots]
        waits = Waits(place, np.cumsum(counts, dtype=np.int64) - counts, np.zeros(counts.sum(), np.int64))
        note_waits(self._parts["graph"], self._parts["state"], self.last_trial(), handle(waits))
        return np.repeat(np.arange(len(slots)), counts), self._last.order[waits.waits]

    def keys(self, slots: Ints) -> Longs:
        """[task, 2]: the ids of the tasks in these slots as two numbers (``task_keys``)."""
        return np.stack([self.state.key[slots], self.state.subkey[slots]], axis=1)

    def held(self, slots: Ints) -> tuple[Longs, Longs]:
        """``held_resources`` of the tasks in these slots."""
        return held_resources(self.state, slots, self._tables.groups().static)

    def _renew_state(self) -> None:
        """Drop the old blocks of accepted changes; if there are none, grow. Then lower and simulate again, with ``ROOM`` times what that
        needed before."""
        C, count = self.state, len(self.graph.operators)
        tiles = zip(C.dev_ptr[:count].tolist(), C.tiles[:count].tolist(), strict=True)
        devices = np.concatenate([C.dev[first : first + own] for first, own in tiles])
        held = C.variant[:count].copy(), C.replicas[:count].copy(), devices, C.marked[:count].copy()
        if self.state.used[SLOTS] == self._lowered[SLOTS]:
            self._grow()
        self._grow_to(*(ROOM * self._lowered[[SLOTS, ARENA]]).tolist())
        self._lower(*held)
        self.simulate()

    def _grow(self) -> None:
        self._slots, self._arena = 2 * self._slots, 2 * self._arena
        self._make_state()

    def _try(self, work: Callable[[], Result], make_room: Callable[[], None] | None = None) -> Result:
        """Do compiled work. If a table or room is missing, make it and start again. ``make_room``: called if the state is full."""
        while True:
            try:
                return work()
            except MemoryError as error:
                if str(error) == FULL:
                    self._size *= 4
                    self._make_scratch()
                elif str(error) == STATE_FULL:
                    (make_room or self._grow)()
                else:
                    raise
            except LookupError as error:
                if str(error) != MISSING:
                    raise
                self._tables.find_missing()
                self._renew(**self._tables.renewed())
            except ValueError as error:
                if str(error) == UNNUMBERED:
                    raise unnumbered() from None
                if str(error) != UNCOVERED:
                    raise
                raise ModelError(
                    f"{UNCOVERED} of model {self.graph.name!r}; expected its producer's tiles to cover it: this is a defect of that "
                    "operator's rule, please report it"
                ) from None

    def _make_scratch(self) -> None:
        self._renew(scratch=make_scratch(self._size, self.topology.device_count, len(self.topology.links)))

    def make_edit_room(self, devices: int) -> None:
        """Make room for edits with this many devices in all."""
        if devices >= len(self.edit.dev):
            self._make_edit(2 * devices)

    def _make_edit(self, devices: int) -> None:
        self.edit = make_edit(len(self.graph.operators), len(self.graph.parameters), devices)
        self._edit = handle(self.edit)

    def _make_state(self) -> None:
        readers, parameters = len(self._graph.reader), len(self.graph.parameters)
        self.state = make_state(len(self.graph.operators), readers, parameters, self.topology.device_count, self._slots, self._arena)
        self.trial = make_trial(self._slots + 1, self._resources, self.topology.device_count)
        self.other = make_trial(self._slots + 1, self._resources, self.topology.device_count)
        undo = make_undo(len(self.graph.operators), readers, parameters, self.topology.device_count, self._slots)
        history = make_history(self._slots + 1, self._resources, self.topology.device_count)
        self._renew(state=self.state, undo=undo, history=history)
        self._trial, self._other = handle(self.trial), handle(self.other)
