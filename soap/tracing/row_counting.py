"""How many rows of its sparse parameters batches touch: counted from data, so that alpha and the overlap between workers are measured. The
lookups of a batch are put in a row, samples in order, and cut into 2^k pieces, as data parallelism cuts the batch; the number of different
rows of a piece is averaged over all pieces and batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from soap.errors import ModelError
from soap.model.graph import FactorKind
from soap.model.sparse_access import HALVINGS, Lookup, RowAccess, halvings
from soap.tracing.calls import Program, needed, results_of
from soap.tracing.compiled import OperatorProgram, ProgramStep
from soap.tracing.execute import TracedModel


def measure_rows(model: TracedModel, batches: Iterable[Sequence[torch.Tensor]]) -> dict[str, RowAccess]:
    """The sparse parameters with rows counted from these batches, unless look-ups need constants without values. Batches of other shapes
    than the model's are skipped. ModelError if none is left, or indices are out of range."""
    shapes = [list(model.graph.tensors[name].shape) for name in model.input_names]
    counters = {name: _Counter(model, name, access) for name, access in model.graph.sparse.items()}
    known = {name: counter for name, counter in counters.items() if counter.known}
    others: list[list[int]] = []
    counted = 0
    for batch in batches if known else ():
        found = [list(tensor.shape) for tensor in batch]
        if found != shapes:
            others = found
            continue
        values = _values(model, {value for counter in known.values() for value in counter.indices}, batch)
        for counter in known.values():
            counter.add(values)
        counted += 1
    if known and not counted:
        raise ModelError(f"no batch has the shapes {shapes} of the inputs {', '.join(model.input_names)}; the last one has {others}")
    return {name: known[name].result(counted) if name in known else access for name, access in model.graph.sparse.items()}


def measured_by_examples(model: TracedModel) -> dict[str, RowAccess]:
    """The same from the batch with which the model was traced, from which soap-run draws its batches if it is given none. If it looks
    up one row only, again and again, it is taken for a placeholder (``torch.zeros``), and counts stay as assumed. All counts stay if
    there is no such batch, it has no values, or it names rows that do not exist: it may only be there for its shapes."""
    examples = model.example_inputs
    if not examples or any(tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor) for tensor in examples):
        return dict(model.graph.sparse)
    try:
        found = measure_rows(model, [examples])
    except ModelError:
        return dict(model.graph.sparse)
    return {name: found[name] if found[name].touched[0] > 1 else access for name, access in model.graph.sparse.items()}


def columns_read(model: TracedModel, batch: Sequence[torch.Tensor], position: int) -> dict[str, int] | None:
    """By sparse parameter, the column of input ``position`` (samples, columns) whose values are the rows that it looks up. None if any
    parameter is looked up otherwise: several times, or by what is computed from the input."""
    counters = {name: _Counter(model, name, access) for name, access in model.graph.sparse.items()}
    if any(not counter.known or len(counter.indices) != 1 for counter in counters.values()):
        return None
    generator = torch.Generator().manual_seed(0)
    probe = [tensor.clone() for tensor in batch]
    probe[position] = torch.randint(2**62, batch[position].shape, generator=generator)  # no two columns are alike; nothing is looked up
    values = _values(model, {counter.indices[0] for counter in counters.values()}, probe)
    found = {}
    for name, counter in counters.items():
        own = values[counter.indices[0]].flatten()
        column = next((i for i in range(probe[position].shape[1]) if torch.equal(own, probe[position][:, i])), None)
        if column is None:
            return None
        found[name] = column
    return found


class _Counter:
    """Counts for one parameter. ``indices``: the values that hold its lookups' indices."""

    def __init__(self, model: TracedModel, name: str, access: RowAccess) -> None:
        self._name, self._access = name, access
        self._levels = halvings(access.indices)
        self._touched = [0] * len(self._levels)
        self._different = [0] * len(access.lookups)
        steps = [_step(model, lookup) for lookup in access.lookups]
        factors = [model.graph.operators[lookup.operator].factors for lookup in access.lookups]
        self.indices = [step.call.operands[1] for step in steps]
        self._kinds = [step.call.kind for step in steps]
        self._samples = [
            next((d for d, m in enumerate(step.operands[1]) if m.factor is not None and own[m.factor].kind is FactorKind.SAMPLE), 0)
            for step, own in zip(steps, factors, strict=True)
        ]
        self.known = not any(_on_meta(model.program, value) for value in self.indices)

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Count the rows of one batch."""
        rows, pieces = list[torch.Tensor](), list[torch.Tensor]()
        for value, kind, sample in zip(self.indices, self._kinds, self._samples, strict=True):
            own = self._checked(values[value].detach().cpu().long().movedim(sample, 0).flatten(), kind)
            self._different[len(rows)] += len(torch.unique(own)) if len(self._kinds) > 1 else 0
            rows.append(own)
            pieces.append((torch.arange(len(own)) << HALVINGS) // max(1, len(own)))
        places = np.sort(((torch.cat(rows) << HALVINGS) | torch.cat(pieces)).numpy())  # by row, then by the smallest pieces
        apart = places[1:] ^ places[:-1]
        for k in self._levels:  # pieces of pieces, so that two halves make a whole
            self._touched[k] += bool(len(places)) + int(np.count_nonzero(apart >= 1 << (HALVINGS - k)))

    def result(self, batches: int) -> RowAccess:
        """The averages, rounded up, and each lookup's weight beside the others."""
        touched = tuple(-(-total // (batches << k)) for k, total in enumerate(self._touched))
        lookups = self._access.lookups
        if len(lookups) > 1 and all(self._different):  # by whichever repeats its rows the most
            counts = [(own.indices, n) for own, n in zip(lookups, self._different, strict=True)]
            indices, different = max(counts, key=lambda pair: pair[0] / pair[1])
            weights = [max(own, -(-n * indices // different)) for own, n in counts]
            lookups = tuple(replace(own, weight=weight) for own, weight in zip(lookups, weights, strict=True))
        return replace(self._access, lookups=lookups, touched=touched, measured=True)

    def _checked(self, rows: torch.Tensor, kind: str) -> torch.Tensor:
        count = self._access.rows
        if kind == "index":  # the only lookup that also counts from the end
            rows = torch.where(rows < 0, rows + count, rows)
        wrong = rows[(rows < 0) | (rows >= count)]
        if len(wrong):
            raise ModelError(f"a batch looks up row {int(wrong[0])} of {self._name!r}; expected 0 to {count - 1}")
        return rows


def _step(model: TracedModel, lookup: Lookup) -> ProgramStep:
    """The call that looks rows up."""
    program: OperatorProgram = model.programs[model.graph.operators[lookup.operator].name]
    value, maps = program.parameters[lookup.parameter]
    return next(s for s in program.steps if s.rule.looks_up and s.call.operands[0] == value and s.operands[0] == maps)


def _on_meta(program: Program, value: str) -> bool:
    """Whether a value depends on constants that were not computed."""
    read = {value, *(name for call in needed(program.calls, {value}) for name in call.operands)}
    return any(program.constants[name].is_meta for name in read if name in program.constants)


def _values(model: TracedModel, wanted: set[str], batch: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """These values for a batch."""
    program = model.program
    values: dict[str, torch.Tensor] = {**model.constants, **dict(zip(program.inputs, batch, strict=True))}
    with torch.no_grad():
        for call in needed(program.calls, wanted):
            values.update(zip(call.outputs, results_of(call, values), strict=False))
    return {name: values[name] for name in wanted}
