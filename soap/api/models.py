"""Models and clusters: exporting, loading and converting what users give."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from soap.api.kept_graphs import KeptGraph
from soap.cluster import yaml_file
from soap.cluster.kinds import has_gpus
from soap.cluster.presets import LOCAL, family
from soap.cluster.topology import Topology
from soap.errors import ModelError, SoapWarning
from soap.model.graph import OperatorGraph

if TYPE_CHECKING:
    from soap.tracing.execute import TracedModel

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
) -> str:
    """Export a module in training mode, called with these arguments, to a ``.pt2`` file whose only output is the scalar loss.

    ``loss``: makes the scalar from the module's output if that is something else, e.g. ``lambda output: output.loss``. Without it the
    output called ``loss`` is the loss, else the first. Returns in words which one it is; empty if there is only one. A SoapWarning says
    what else it may be, and what is in evaluation mode and therefore does not train, such as dropout.
    ``dynamic_batch``: the file can be trained on batches of any size, such as a smaller last one. True: the samples are in dimension 0 of
    the inputs; a mapping gives other dimensions by input name.
    ``verify``: first compare one step of the module in eager PyTorch with one step of its program, in loss, gradients and buffers. A
    difference is refused: a file holds no backward code of the module's own (``torch.autograd.Function``, hooks). So is state that Python
    moves from call to call (attributes, containers, counters, its random numbers), by name; buffers may move. The module does not
    change. This takes two training steps and two forward passes, and the memory of one step with all gradients.
    ``imports``: modules that define the model's custom operators (``torch.library``). Commands then need them by ``--import``.

    ModelError in one line if the module cannot be exported, differs from its program, or has operators outside of ATen without ``imports``.
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
    return export_model(model, *arguments, path=path, loss=loss, dynamic_batch=dynamic_batch, **options)


def load(
    spec: str | Path,
    *,
    plan_only: bool = False,
    batch_dims: Mapping[str, int] | None = None,
    dtype: str | None = None,
    autocast: str | None = None,
    autocast_device: str = "cpu",
    batch_norm: str = "global",
    matmul_precision: str | None = None,
    sum_dtype: str | None = None,
    imports: Sequence[str] = (),
    weights: str | Path | None = None,
) -> TracedModel:
    """Load a model from a ``.pt2`` file or the zoo (``zoo:NAME[:SIZE][@BATCH]``): a graph of operators that can be computed tile by tile.

    ``plan_only``: allocate no memory for its weights. ``batch_dims``: input name -> dimension of the samples, if it is not 0. ``dtype``:
    replaces the floating-point type, for example ``float64`` for checks. ``autocast="bfloat16"``: use the casts of ``torch.autocast``
    on ``autocast_device`` (``cpu`` or ``cuda``: the kind of the devices that will train; their lists of calls differ, and without autocast
    what products of 16-bit operands keep); ``float16``, for GPUs without bfloat16, trains with a scaled loss
    (``TrainingOptions.loss_scaling``).
    ``batch_norm``: ``global`` normalises by the whole batch, ``local`` each tile by its own part of it. A strategy is valid only for models
    that were loaded with the same ``batch_norm``.
    ``matmul_precision``: ``highest``, ``high`` or ``medium``, as for ``torch.set_float32_matmul_precision``, which is set for this process
    (None: left as it is). Products of float32 matrices are priced by it.
    ``sum_dtype``: in which type the partial results of split operators are made, sent and added up if their sum is of a 16-bit type:
    ``float32``, so that a split sum is as exact as one process's (the default where ``autocast_device`` is ``cpu``), or ``own``, the sum's
    own type, as in Megatron-LM and DTensor (``cuda``): half of the bytes. Strategies remember it; single numbers are summed in float32.
    ``imports``: modules that define custom operators of the model, imported first.
    ``weights``: a safetensors file, or a folder with such files, as Hugging Face writes it: parameters then stay in the files until a rank
    reads its parts. Or a checkpoint, or ``init:normal:STD`` or ``init:fan_in`` (``soap.weights.initializer``). Without, they are those that
    the model was exported with. Not with ``plan_only``.

    ModelError in one line if the model cannot be read or planned, or the weights are not its.
    """
    from soap.tracing.load import load_model

    if str(spec) and Path(spec).is_dir():
        raise ModelError(f"model {str(spec)!r} is a folder; expected a .pt2 file or zoo:NAME: name the file in it")
    model = load_model(
        str(spec), plan_only=plan_only, batch_dims=batch_dims, dtype=dtype, autocast=autocast, autocast_device=autocast_device,
        batch_norm=batch_norm, matmul_precision=matmul_precision, sum_dtype=sum_dtype, imports=imports,
    )
    if weights is not None:
        if plan_only:
            raise ModelError(f"weights {str(weights)!r} with plan_only, which reads none; leave one of them out")
        from soap.api.weights import open_weights
        from soap.weights.fitting import give, remarks

        opened = open_weights(weights, model)
        for line in remarks(model, opened):
            warnings.warn(line, SoapWarning, stacklevel=2)
        return give(model, opened)
    return model


def planned_graph(spec: str | Path, **reading: Any) -> OperatorGraph:
    """The graph of ``load(spec, plan_only=True, **reading)``. It is kept, and found again without torch (``kept_graphs``). Errors and
    warnings are those of ``load``."""
    kept = KeptGraph(str(spec), reading)
    graph = kept.find()
    if graph is None:
        with _retold() as told:
            graph = load(spec, plan_only=True, **reading).graph
        kept.keep(graph, told)
    elif precision := reading.get("matmul_precision"):
        import torch

        torch.set_float32_matmul_precision(precision)
    return graph


@contextmanager
def _retold() -> Iterator[list[str]]:
    """The texts of SOAP's own warnings of what is done here; all warnings are given when it is over."""
    told: list[str] = []
    found: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", SoapWarning)
            yield told
    finally:
        told += [str(one.message) for one in found if issubclass(one.category, SoapWarning)]
        for one in found:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def measure_rows(model: TracedModel | str | Path, batches: Iterable[Sequence[Any]]) -> OperatorGraph:
    """The model's graph, for ``soap.find`` and the like, with the touched rows of sparse parameters counted on batches of the user's data.

    ``batches``: each a sequence of tensors in the order of the model's inputs. Without this function, rows are counted on the example
    inputs, unless these always look up the same row. ModelError if no batch has the shapes of the model's inputs.
    """
    from soap.tracing import row_counting
    from soap.tracing.execute import TracedModel

    traced: object = load(model, plan_only=True) if isinstance(model, (str, Path)) else model
    if not isinstance(traced, TracedModel):
        raise ModelError(f"rows are counted by running a model's look-ups; expected what soap.load returns, not {type(traced).__name__}")
    return replace(traced.graph, sparse=row_counting.measure_rows(traced, batches))


def load_cluster(spec: str | Path, *, own_samples: bool = False) -> Topology:
    """Load a cluster from a YAML file or a preset. ``local:N`` and ``emulated:HxD@RATE`` stand for this machine, which is measured once;
    the result is remembered. ``local`` is ``local:N`` with as many devices as torch sees GPUs; without GPUs, with 4 processes, or 2 on
    fewer than 4 cores. ``own_samples``: memory is predicted for a job in which each device is given only the samples of a batch that it
    reads (``soap.PartBatch``). TopologyError in one line if the description is wrong."""
    if spec == LOCAL:
        from soap.measure.this_machine import device_count

        spec = f"{LOCAL}:{device_count()}"
    topology = yaml_file.load_cluster(spec)
    if isinstance(spec, str) and topology.name == spec and family(spec) is not None:
        from soap.measure.this_machine import measured_topology

        topology = measured_topology(topology)
    return replace(topology, own_samples=own_samples) if own_samples else topology


def graph_of(model: Model, topology: Topology | None = None, sum_dtype: str | None = None) -> OperatorGraph:
    """The graph of a model, however it is given; of a file or name, for the kind of devices that will train. ``sum_dtype``: as ``load`` has
    it; ModelError in one line if the model was loaded with another."""
    if isinstance(model, (str, Path)):
        on_gpus = topology is not None and has_gpus(topology)
        return planned_graph(model, autocast_device="cuda" if on_gpus else "cpu", sum_dtype=sum_dtype)
    graph = model if isinstance(model, OperatorGraph) else getattr(model, "graph", None)
    if not isinstance(graph, OperatorGraph):
        raise ModelError(
            f"a {type(model).__name__} cannot be planned: expected a .pt2 file, a name such as zoo:gpt:tiny, or what soap.load returns; "
            'export a module first: soap.export(module, inputs, path="model.pt2")'
        )
    if sum_dtype is not None and graph.sum_dtype not in (None, sum_dtype):
        raise ModelError(f"model {graph.name!r} was loaded with sum_dtype {graph.sum_dtype!r}; expected {sum_dtype!r} there, too")
    return graph


def topology_of(cluster: Cluster) -> Topology:
    """The cluster, read from its file or made from its name if need be."""
    return cluster if isinstance(cluster, Topology) else load_cluster(cluster)
