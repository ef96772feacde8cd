"""Reading a model for planning or training: a ``.pt2`` file, or ``zoo:NAME[:SIZE][@BATCH]``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._export.serde.serialize
from torch.export import ExportedProgram

from soap import zoo
from soap.errors import ModelError, asked, first_line
from soap.logs import TRIALS, silenced
from soap.model.files import check_exists
from soap.model.graph import OperatorGraph
from soap.tracing.archive import plain_archive
from soap.tracing.autocast import ListOf
from soap.tracing.execute import TracedModel
from soap.tracing.export import traced
from soap.tracing.importer import BatchNorm, import_program
from soap.tracing.imports import import_all
from soap.tracing.naming import canonical_names
from soap.tracing.record import NAME, ExportRecord, loads
from soap.tracing.row_counting import measure_rows
from soap.tracing.sizes import Shapes, is_dynamic
from soap.tracing.torch_parts import quiet_torch, replaced
from soap.tracing.without_values import tie_again

LOWER = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types to which autocast may cast."""
PRECISIONS = ("highest", "high", "medium")
"""Of products of float32 matrices, as ``torch.set_float32_matmul_precision`` knows them: below highest in TF32 where hardware has it."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    spec: str | Path,
    *,
    plan_only: bool = False,
    batch_dims: Mapping[str, int] | None = None,
    dtype: str | None = None,
    autocast: str | None = None,
    autocast_device: str = "cpu",
    batch_norm: str = "global",
    matmul_precision: str | None = None,
    imports: Sequence[str] = (),
) -> TracedModel:
    """The traced model of a ``.pt2`` file or of a zoo model. ``plan_only`` reads shapes alone (zoo models are not even allocated).
    ``batch_dims``: input name -> batch dimension. ``dtype`` replaces all floating-point dtypes; ``autocast`` casts as
    ``torch.autocast`` to this type does on ``autocast_device`` (cpu or cuda, whose lists of calls differ); the model remembers it.
    ``batch_norm``: ``global`` or ``local``. ``matmul_precision``: torch's, set for this process. ``imports``: modules that define custom
    operators, imported first.
    Raises ModelError in one line."""
    import_all(imports, asked("imports"))
    if batch_norm not in ("global", "local"):
        raise ModelError(f"batch norm {batch_norm!r}: expected global (over the whole batch) or local (over each tile's part of it)")
    local: BatchNorm = "local" if batch_norm == "local" else "global"
    if autocast_device not in ("cpu", "cuda"):
        raise ModelError(f"autocast device {autocast_device!r}: expected cpu or cuda, the kind of the devices that will train")
    if matmul_precision is not None:
        if matmul_precision not in PRECISIONS:
            raise ModelError(f"matmul precision {matmul_precision!r}: expected one of {', '.join(PRECISIONS)}")
        torch.set_float32_matmul_precision(matmul_precision)
    lists: ListOf = "cuda" if autocast_device == "cuda" else "cpu"
    options = Options(batch_dims, _dtype("dtype", dtype, DTYPES), _dtype("autocast", autocast, LOWER), lists, local)
    text = str(spec)
    source = ZooSource(text, options) if text.startswith("zoo:") else FileSource(Path(spec), options)
    with silenced(*TRIALS):
        return source.trace(plan_only=plan_only)


def load_program(exported: ExportedProgram, name: str) -> TracedModel:
    """The traced model of a program in memory, with which it shares its tensors."""
    with silenced(*TRIALS):
        return ProgramSource(exported, name, Options()).trace()


def _dtype(what: str, name: str | None, known: Mapping[str, torch.dtype]) -> torch.dtype | None:
    if name is not None and name not in known:
        raise ModelError(f"{what} {name!r}: expected {'one of ' if len(known) > 1 else ''}{', '.join(known)}")
    return None if name is None else known[name]


@dataclass(frozen=True, slots=True)
class Options:
    """How programs are read: see ``import_program``."""

    batch_dims: Mapping[str, int] | None = None
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    autocast_device: ListOf = "cpu"
    batch_norm: BatchNorm = "global"


class ProgramSource:
    """An exported program."""

    def __init__(self, exported: ExportedProgram, name: str, options: Options) -> None:
        self.exported, self.name, self.options = exported, name, options

    def trace(self, *, shapes: Shapes | None = None, dtype: torch.dtype | None = None, plan_only: bool = False) -> TracedModel:
        """See ``Source``. Shapes other than the file's own need a program with symbolic sizes."""
        if shapes is not None and not is_dynamic(self.exported):
            raise ModelError("the program was exported for one batch size: soap.export(..., dynamic_batch=True) makes one for all sizes")
        return _imported(self, self.exported, self.name, self.options, shapes, dtype, plan_only)

    def let_go(self, names: Collection[str]) -> None:
        """See ``Source``. Other names of a parameter get the same meta tensor: so it stays one parameter."""
        state, metas = self.exported.state_dict, dict[str, torch.Tensor]()
        for name, first in canonical_names(state).items():
            if first in names:
                if first not in metas:
                    metas[first] = state[first].detach().to("meta").requires_grad_(state[first].requires_grad)
                state[name] = metas[first]

    def take_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """See ``Source``."""
        state = self.exported.state_dict
        first = canonical_names(state)  # a buffer of several names stays one
        given = {first[name]: tensor.detach().to(state[name].dtype) for name, tensor in values.items() if name in state}
        for name, tensor in given.items():
            own = tensor.requires_grad_(state[name].requires_grad)
            state.update({other: own for other, one in first.items() if one == name})


class FileSource(ProgramSource):
    """The program of a ``.pt2`` file, with what the file records of its export."""

    def __init__(self, path: Path, options: Options) -> None:
        exported, self.record = read_pt2(path)
        super().__init__(exported, path.stem, options)

    def trace(self, *, shapes: Shapes | None = None, dtype: torch.dtype | None = None, plan_only: bool = False) -> TracedModel:
        """See ``ProgramSource``."""
        model = super().trace(shapes=shapes, dtype=dtype, plan_only=plan_only)
        model.record = self.record
        forget_parameters(self.exported, model.graph)  # the first model has them; what is traced again is without
        return model


def forget_parameters(exported: ExportedProgram, graph: OperatorGraph) -> None:
    """Replace a program's values of the graph's parameters by meta tensors, so that whoever has the parameters decides on them."""
    names = {tensor.name for tensor in graph.parameters}
    forgotten: dict[str, torch.nn.Parameter] = {}
    for name, canonical in canonical_names(exported.state_dict).items():
        if canonical in names:
            own = exported.state_dict[name]
            forgotten.setdefault(canonical, torch.nn.Parameter(own.detach().to("meta"), requires_grad=own.requires_grad))
            exported.state_dict[name] = forgotten[canonical]


class ZooSource:
    """A model of the zoo, which can be made for any batch."""

    def __init__(self, spec: str, options: Options) -> None:
        self.spec, self.options = spec, options

    def trace(self, *, shapes: Shapes | None = None, dtype: torch.dtype | None = None, plan_only: bool = False) -> TracedModel:
        """See ``Source``. The first dimensions of the shapes give the batch."""
        spec = self.spec if shapes is None else f"{self.spec.partition('@')[0]}@{shapes[0][0]}"
        exported, name = export_zoo(spec, plan_only=plan_only)
        model = _imported(self, exported, name, self.options, None, dtype, plan_only)
        if plan_only and model.graph.sparse:  # the program's own batch has no values
            model.graph = replace(model.graph, sparse=measure_rows(model, [next(zoo.batches(name))]))
        own = [list(model.graph.tensors[name].shape) for name in model.input_names]
        if shapes is not None and own != [list(shape) for shape in shapes]:
            raise ModelError(f"{spec} has inputs of shapes {own}")
        return model

    def let_go(self, names: Collection[str]) -> None:
        """Nothing: parameters are made when a model is."""

    def take_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """See ``Source``."""
        raise ModelError(f"{self.spec} has buffers of its own; expected a .pt2 file, for other values of buffers")


def _imported(
    source: ZooSource | ProgramSource,
    exported: ExportedProgram,
    name: str,
    options: Options,
    shapes: Shapes | None,
    dtype: torch.dtype | None,
    plan_only: bool,
) -> TracedModel:
    """The traced model, which remembers its source."""
    model = import_program(
        exported,
        name=name,
        batch_dims=options.batch_dims,
        plan_only=plan_only,
        dtype=dtype or options.dtype,
        autocast=options.autocast,
        autocast_device=options.autocast_device,
        batch_norm=options.batch_norm,
        shapes=shapes,
    )
    model.autocast = next((name for name, dtype in LOWER.items() if dtype == options.autocast), None)
    model.source = PlanningSource(source) if plan_only else source
    return model


@dataclass(frozen=True, slots=True)
class PlanningSource:
    """What a model without values was traced from; it is traced again without values."""

    whole: ZooSource | ProgramSource

    def trace(self, *, shapes: Shapes | None = None, dtype: torch.dtype | None = None) -> TracedModel:
        """See ``Source``."""
        return self.whole.trace(shapes=shapes, dtype=dtype, plan_only=True)

    def let_go(self, names: Collection[str]) -> None:
        """See ``Source``."""
        self.whole.let_go(names)

    def take_state(self, values: Mapping[str, torch.Tensor]) -> None:
        """See ``Source``."""
        self.whole.take_state(values)


def export_zoo(spec: str, *, plan_only: bool) -> tuple[ExportedProgram, str]:
    """A zoo model's program and its canonical name; on the meta device if only a plan is wanted."""
    model = zoo.build(spec.removeprefix("zoo:"), fake=plan_only)
    return traced(model.module, model.args, dict(model.kwargs)), f"zoo:{model.name}"


def read_pt2(path: Path) -> tuple[ExportedProgram, ExportRecord]:
    """The exported program in a file and the record of its export, without running any code that the file might hold."""
    check_exists(path)
    try:
        archive, weights = plain_archive(path)
        with warnings.catch_warnings(), quiet_torch(), _weights_only(), _blocks_without_results(), _types_looked_up_once():
            warnings.simplefilter("ignore")
            extra = {NAME: ""}
            exported, record = torch.export.load(archive, extra_files=extra), loads(extra[NAME])
            weights.give(exported.state_dict)
            tie_again(exported.state_dict, record.tied)
            return exported, replace(record, has_values=not any(tensor.is_meta for tensor in exported.state_dict.values()))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model file {str(path)!r} cannot be read ({first_line(error)}); expected a .pt2 file that torch.export.save wrote"
        ) from error


def _blocks_without_results() -> AbstractContextManager[None]:
    """Mend a block under ``no_grad`` without results, as it only changes buffers: torch saves it without a value, and cannot load it."""

    def make(original: Any) -> Any:
        def mended(self: Any, serialized: Any, node: torch.fx.Node) -> None:
            original(self, serialized, node)
            if not serialized.outputs and isinstance(node.target, torch._ops.HigherOrderOperator):
                node.meta.setdefault("val", ())

        return mended

    return replaced("torch._export.serde.serialize", "GraphModuleDeserializer.deserialize_outputs", make)


def _types_looked_up_once() -> AbstractContextManager[None]:
    """Let torch's reader ask for a class's fields once, and not for each of the file's hundred thousands of values: half of its time."""

    def make(original: Any) -> Any:
        known: dict[Any, Any] = {}

        def hints(kind: Any, **names: Any) -> Any:
            return known[kind] if kind in known else known.setdefault(kind, original.get_type_hints(kind, **names))

        return SimpleNamespace(**{**vars(original), "get_type_hints": hints})

    return replaced("torch._export.serde.serialize", "typing", make)


@contextmanager
def _weights_only() -> Iterator[None]:
    """Within this context torch's own switch forbids every ``torch.load`` to run code: a second lock behind the checks of the archive."""
    names = ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ[names[0]] = "1"
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
