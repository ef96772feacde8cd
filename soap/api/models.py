"""Models and clusters: what a user has, made into what is planned with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from soap.cluster import yaml_file
from soap.cluster.presets import family
from soap.cluster.topology import Topology
from soap.errors import ModelError
from soap.model.graph import OperatorGraph

if TYPE_CHECKING:
    from soap.tracing.model import TracedModel

Model: TypeAlias = "TracedModel | OperatorGraph | str | Path"

Cluster: TypeAlias = "Topology | str | Path"


def export(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    path: str | Path,
    loss: Callable[..., Any] | None = None,
    dynamic_batch: bool | Mapping[str, int] = False,
    verify: bool = True,
    imports: Sequence[str] = (),
) -> None:
    """Write a module in training mode, called with these arguments, to a ``.pt2`` whose only output is the scalar loss.

    ``loss`` makes the scalar from the module's output where that is something else, e.g. ``lambda output: output.loss``.
    ``dynamic_batch``: the file can be trained on batches of any size (a last one that is smaller), of dimension 0 of the inputs or, as a
    mapping, of other dimensions by input name.
    ``verify``: one step of the module in eager PyTorch and one of its program are compared first, in loss, gradients and buffers, and what
    differs is refused: a file holds no backward code of its own (``torch.autograd.Function``, hooks). The module stays as it was. This
    takes two training steps and the memory for one with all gradients.
    ``imports``: the modules that define the model's custom operators (``torch.library``), which commands then need by ``--import``.
    ModelError in one line for an operator outside of ATen if there are none.
    """
    from soap.runtime.eager import NO_VALUES, eager_judge
    from soap.tracing.example import Example
    from soap.tracing.export import export_model

    if isinstance(imports, str):
        raise ModelError(f"imports {imports!r}: expected a sequence of modules, such as ({imports!r},)")
    arguments = tuple(args), dict(kwargs or {})
    judge = eager_judge(Example(model, *arguments, loss)) if verify else None
    unjudged = NO_VALUES if verify else "exported with verify=False"
    options: dict[str, Any] = {"judge": judge, "unjudged": unjudged, "imports": imports}
    export_model(model, *arguments, path=path, loss=loss, dynamic_batch=dynamic_batch, **options)


def load(
    spec: str | Path,
    *,
    plan_only: bool = False,
    batch_dims: Mapping[str, int] | None = None,
    dtype: str | None = None,
    autocast: str | None = None,
    batch_norm: str = "global",
    imports: Sequence[str] = (),
) -> TracedModel:
    """The model of a ``.pt2`` file or of the zoo (``zoo:NAME[:SIZE][@BATCH]``), as a graph of operators that can be computed tile by tile.

    ``plan_only``: without memory for its weights. ``batch_dims``: input name -> dimension of the samples, where it is not 0. ``dtype``:
    replaces the floating-point type, for example ``float64`` for checks. ``autocast="bfloat16"``: with the casts of ``torch.autocast``.
    ``batch_norm``: ``global`` normalises by the whole batch, ``local`` each tile by its own part of it. Strategies hold for models that
    were loaded with the same ``batch_norm``. ``imports``: modules that define custom operators of the model, imported first.
    """
    from soap.tracing.load import load_model

    if str(spec) and Path(spec).is_dir():
        raise ModelError(f"model {str(spec)!r} is a folder; expected a .pt2 file or zoo:NAME: name the file in it")
    return load_model(
        str(spec), plan_only=plan_only, batch_dims=batch_dims, dtype=dtype, autocast=autocast, batch_norm=batch_norm, imports=imports
    )


def measure_rows(model: TracedModel | str | Path, batches: Iterable[Sequence[Any]]) -> OperatorGraph:
    """The model's graph, for ``soap.search`` and the like, with its sparse parameters' touched rows counted on batches of the user's data.

    ``batches``: each a sequence of tensors in the order of the model's inputs. Without this, they are counted on the example inputs, unless
    those always look up the same row. ModelError if no batch has the shapes of the model's inputs.
    """
    from soap.tracing import row_counting
    from soap.tracing.execute import ExecutableModel

    traced = load(model, plan_only=True) if isinstance(model, (str, Path)) else model
    if not isinstance(traced, ExecutableModel):
        raise ModelError(f"rows are counted by running a model's look-ups; expected what soap.load returns, not {type(traced).__name__}")
    return replace(traced.graph, sparse=row_counting.measure_rows(traced, batches))


def load_cluster(spec: str | Path) -> Topology:
    """The cluster of a YAML file or a preset; ``local:N`` and ``emulated:HxD@RATE`` are this machine, measured once and then remembered."""
    topology = yaml_file.load_cluster(spec)
    if isinstance(spec, str) and topology.name == spec and family(spec) is not None:
        from soap.measure.this_machine import measured_topology

        return measured_topology(topology)
    return topology


def graph_of(model: Model) -> OperatorGraph:
    """The graph of a model, in whichever of these ways it is given."""
    if isinstance(model, OperatorGraph):
        return model
    if isinstance(model, (str, Path)):
        return load(model, plan_only=True).graph
    return model.graph


def topology_of(cluster: Cluster) -> Topology:
    """The cluster, if need be read from its file or made of its name."""
    return cluster if isinstance(cluster, Topology) else load_cluster(cluster)
