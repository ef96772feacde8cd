"""A model cut in two: look-ups in sparse layers, which servers compute, and the rest, which a worker computes.

A sparse layer is a table whose rows a batch's inputs name: an embedding, a bag of one, a dense layer of sparse features (which is a bag
with values). Each use becomes one list of bags for the table's owners, whose sums come back; the rest of the program takes these sums as
inputs beside the batch, and gives their gradients beside those of all other parameters, the dense variables. What is computed from the
batch alone to say which rows are meant (slices, products with constants) the worker computes first.

Averages leave the worker as sums and are divided by the bags' lengths in the rest. So servers know sums alone, and need no values for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from soap.elastic.faults import ElasticError
from soap.elastic.layout import Lookups, means
from soap.tracing.calls import BufferRef, Call, Program, Ref, TileContext, argument, is_random, needed, results_of, walk
from soap.tracing.execute import TracedModel
from soap.tracing.rules.index import MEAN, MODES, SUM

EMBEDDING, BAG, EQUAL_BAGS = "embedding", "embedding_bag", "equal_bags"


@dataclass(frozen=True, slots=True)
class _Use:
    """One call that looks rows up; ``shape``: of its result. ``padding``: the row of an embedding that is read but takes no gradient."""

    call: Call
    table: str
    mode: str
    shape: tuple[int, ...]
    padding: int | None = None

    @property
    def bags(self) -> int:
        """How many bags it looks up."""
        return prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class Gradients:
    """What one batch gives. ``sums``: by table, for all its bags (bags, columns). ``dense``: by parameter."""

    loss: float
    sums: dict[str, torch.Tensor]
    dense: dict[str, torch.Tensor]


class Cut:
    """A model for batches of one shape. ``tables``: parameters that servers compute with, all that can be unless some are ``wanted``;
    ``dense``: all others that are trained; ``frozen``: those that are not. ``refused``: by sparse parameter that stays dense, why.

    ElasticError if the model has no sparse layer that can be cut out, or not those that are wanted, or keeps state in buffers.
    """

    def __init__(self, model: TracedModel, wanted: Collection[str] | None = None) -> None:
        program = model.program
        if program.state or program.end_step or program.buffers:
            kept = ", ".join(sorted({*program.state.values(), *program.buffers})) or "step counters"
            raise ElasticError(f"the model keeps {kept} from step to step; workers hold no state: leave batch norm and the like out")
        self.refused: dict[str, str] = {}
        self._uses = _find_uses(model, self.refused)
        for table in wanted or ():
            if table not in self._uses:
                reason = self.refused.get(table, "it is no parameter that ids of the batch alone look up")
                raise ElasticError(f"table {table!r} cannot be computed at servers: {reason}; plan it as a dense variable")
        if wanted is not None:
            self._uses = {table: uses for table, uses in self._uses.items() if table in wanted}
        self.tables: tuple[str, ...] = tuple(self._uses)
        if not self.tables:
            why = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items()) or "no parameter is looked up by ids of the batch"
            raise ElasticError(f"no sparse layer can be computed at servers ({why}); expected an embedding, or a bag of one")
        rest = [tensor for tensor in model.graph.parameters if tensor.name not in self._uses]
        self.dense = tuple(tensor.name for tensor in rest if tensor.requires_grad)
        self.frozen = tuple(tensor.name for tensor in rest if not tensor.requires_grad)
        self.input_names = tuple(program.inputs)
        self._front, self._rest = _divide(program, [use for uses in self._uses.values() for use in uses])
        self._constants = program.constants
        self._model = replace(model, program=self._rest)

    @property
    def shapes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """(tables, dense variables): shapes by name."""
        tables, dense = ({name: self._model.graph.tensors[name].shape for name in names} for names in (self.tables, self.dense))
        return tables, dense

    def look_ups(self, inputs: Sequence[torch.Tensor]) -> dict[str, Lookups]:
        """By table, the bags of all its uses, one after the other, since a lease pushes to a table once. ``inputs``: a batch, in order."""
        values: dict[str, torch.Tensor] = {**self._constants, **dict(zip(self.input_names, inputs, strict=True))}
        with torch.no_grad():
            for call in self._front:
                values.update(zip(call.outputs, results_of(call, values), strict=False))
            return {table: _joined([_lookups(use, values) for use in uses]) for table, uses in self._uses.items()}

    def gradients(
        self,
        inputs: Sequence[torch.Tensor],
        lookups: Mapping[str, Lookups],
        sums: Mapping[str, torch.Tensor],
        dense: Mapping[str, torch.Tensor],
        *,
        seed: int = 0,
        step: int = 0,
    ) -> Gradients:
        """Loss and gradients of a batch. ``sums``: what servers have answered to ``lookups``, (bags, columns). ``dense``: values of all
        other parameters. ``seed`` and ``step`` decide what the model draws (dropout): the same for the same lease, whoever computes it."""
        leaves = {table: value.detach().requires_grad_() for table, value in sums.items()}
        weights = {name: dense[name].detach().requires_grad_(name in self.dense) for name in (*self.dense, *self.frozen)}
        given = [*inputs, *self._results(lookups, leaves)]
        loss = self._model.reference_loss(given, weights, TileContext(seed=seed, step=step, update_buffers=False))
        wanted = {**{("sums", table): leaf for table, leaf in leaves.items()}, **{("dense", name): weights[name] for name in self.dense}}
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        result = Gradients(float(loss.detach()), {}, {})
        for ((kind, name), leaf), gradient in zip(wanted.items(), found, strict=True):
            own = result.sums if kind == "sums" else result.dense
            own[name] = torch.zeros_like(leaf) if gradient is None else gradient
        for table, uses in self._uses.items():
            result.sums[table] = _without_padding(uses, lookups[table], result.sums[table])
        return result

    def _results(self, lookups: Mapping[str, Lookups], sums: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What the calls that were cut out would have returned, use by use."""
        found = []
        for table, uses in self._uses.items():
            averages = means(sums[table], lookups[table]) if any(use.mode == MEAN for use in uses) else sums[table]
            first = 0
            for use in uses:
                last = first + use.bags
                found.append((averages if use.mode == MEAN else sums[table])[first:last].reshape(use.shape))
                first = last
        return found


def _find_uses(model: TracedModel, refused: dict[str, str]) -> dict[str, list[_Use]]:
    """By table, the calls that look up its rows. What cannot be cut out is noted in ``refused``."""
    program = model.program
    ready = _from_inputs(program)
    names: dict[str, list[str]] = {}
    for value, parameter in program.parameters.items():
        names.setdefault(parameter, []).append(value)
    found: dict[str, list[_Use]] = {}
    for parameter in model.graph.sparse:
        calls = [call for call in program.calls if not {*call.operands}.isdisjoint(names.get(parameter, ()))]
        reasons = [reason for call in calls if (reason := _obstacle(call, ready)) is not None]
        if reasons or not calls:
            refused[parameter] = reasons[0] if reasons else "nothing looks it up"
            continue
        shapes = [tuple(program.values[call.outputs[0]].shape) for call in calls]
        found[parameter] = [_Use(call, parameter, _mode(call), shape, _padding(call)) for call, shape in zip(calls, shapes, strict=True)]
    return found


def _from_inputs(program: Program) -> set[str]:
    """Values that follow from the batch and constants alone."""
    ready = {*program.inputs, *program.constants}
    for call in program.calls:
        leaves = walk((call.args, dict(call.kwargs)))
        if ready.issuperset(call.operands) and not is_random(call) and not any(isinstance(leaf, BufferRef) for leaf in leaves):
            ready.update(call.outputs)
    return ready


def _obstacle(call: Call, ready: set[str]) -> str | None:
    """Why a call cannot be computed at servers."""
    if call.kind not in (EMBEDDING, BAG, EQUAL_BAGS):
        return f"{call.kind} is no sum of rows"
    if _mode(call) not in (SUM, MEAN):
        return f"a bag's {_mode(call)} is no sum"
    if not ready.issuperset(call.operands[1:]):
        return "its ids or values do not follow from the batch alone"
    if call.kind == BAG and argument(call, "scale_grad_by_freq"):
        return "gradients that depend on how often an id occurs"
    return None


def _padding(call: Call) -> int | None:
    """The padding row of an embedding; bags leave theirs out altogether."""
    row = int(argument(call, "padding_idx", -1)) if call.kind == EMBEDDING else -1
    return row if row >= 0 else None


def _without_padding(uses: Sequence[_Use], lookups: Lookups, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of the sums, with zeros for bags that are a padding row: an embedding's bags have one row each."""
    first = 0
    for use in uses:
        if use.padding is not None:
            begin = int(lookups.offsets[first])
            read = lookups.ids[begin : begin + use.bags] == use.padding
            gradient = gradient.clone()
            gradient[first : first + use.bags][read] = 0
        first += use.bags
    return gradient


def _mode(call: Call) -> str:
    if call.kind == EQUAL_BAGS:
        return str(call.kwargs["mode"])
    return MODES[int(argument(call, "mode") or 0)] if call.kind == BAG else SUM


def _divide(program: Program, uses: Sequence[_Use]) -> tuple[list[Call], Program]:
    """The calls that say which rows are meant, and the program without the look-ups, whose further inputs are their results."""
    cut = {use.call.name for use in uses}
    wanted = {name for use in uses for name in use.call.operands[1:]}
    calls = needed([call for call in program.calls if call.name not in cut], {program.loss})
    tables = {use.table for use in uses}
    parameters = {value: name for value, name in program.parameters.items() if name not in tables}
    inputs = [*program.inputs, *(use.call.outputs[0] for use in uses)]
    return needed(program.calls, wanted), replace(program, calls=calls, inputs=inputs, parameters=parameters)


def _lookups(use: _Use, values: Mapping[str, torch.Tensor]) -> Lookups:
    """What one call looks up."""
    call = use.call
    if call.kind == EMBEDDING:
        return Lookups.padded(values[call.operands[1]].reshape(-1, 1).long())
    if call.kind == EQUAL_BAGS:
        scale = values[call.operands[2]] if len(call.operands) > 2 else None
        found = Lookups.padded(values[call.operands[1]].long(), scale)
    else:
        found = _ragged(call, values)
    padding = argument(call, "padding_idx")
    return found if padding is None or int(padding) < 0 else _without(found, int(padding))


def _ragged(call: Call, values: Mapping[str, torch.Tensor]) -> Lookups:
    """The bags of ``aten.embedding_bag``."""
    ids, offsets = (values[argument(call, name).name].long() for name in ("indices", "offsets"))
    scale = argument(call, "per_sample_weights")
    weights = values[scale.name] if isinstance(scale, Ref) else None
    return Lookups(ids, offsets, weights) if argument(call, "include_last_offset") else Lookups.ragged(ids, offsets, weights)


def _without(lookups: Lookups, padding: int) -> Lookups:
    """The same without one id."""
    kept = lookups.ids != padding
    running = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.long().cumsum(0)])
    return Lookups(lookups.ids[kept], running[lookups.offsets], None if lookups.values is None else lookups.values[kept])


def _joined(parts: Sequence[Lookups]) -> Lookups:
    """Samples one after the other. Where one part has values, all get some."""
    if len(parts) == 1:
        return parts[0]
    offsets, begin = [torch.zeros(1, dtype=torch.int64)], 0
    for part in parts:
        offsets.append(part.offsets[1:] + begin)
        begin += part.entries
    given = [part.values for part in parts if part.values is not None]
    values = None
    if given:
        values = torch.cat([torch.ones(part.entries, dtype=given[0].dtype) if part.values is None else part.values for part in parts])
    return Lookups(torch.cat([part.ids for part in parts]), torch.cat(offsets), values)
