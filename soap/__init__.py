"""SOAP finds by simulation how to spread the training of a PyTorch model over devices, and runs it.

The public names below are loaded on first use, so that ``import soap`` costs nothing and planning tools start without torch.
What they do is said in ``soap.api``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from soap.api import (
        Job,
        SearchOutcome,
        ServersOutcome,
        classical,
        export,
        find,
        find_servers,
        fits,
        load,
        load_cluster,
        load_strategy,
        measure_rows,
        save_strategy,
        simulate,
        simulate_beside,
        simulate_servers,
    )
    from soap.cluster.topology import Topology
    from soap.errors import InfeasibleError, ModelError, ProfileError, RuntimeFailure, SoapError, StrategyError, TopologyError
    from soap.model.graph import OperatorGraph
    from soap.preprocessing.local import preprocess
    from soap.runner.config import RunnerConfig
    from soap.runner.runner import get_runner
    from soap.runner.sharding import partitioner, shard
    from soap.runner.tuning import tune
    from soap.runtime.inputs import PartBatch
    from soap.runtime.trainer import Trainer
    from soap.runtime.training_options import StepMetrics, TrainingOptions
    from soap.search.options import SearchOptions
    from soap.strategy.config import OpConfig, Strategy, SyncConfig
    from soap.tracing.without_values import without_weights

__version__ = "0.2.0"

_HOME = {
    "Job": "soap.api",
    "SearchOutcome": "soap.api",
    "ServersOutcome": "soap.api",
    "classical": "soap.api",
    "export": "soap.api",
    "find": "soap.api",
    "find_servers": "soap.api",
    "fits": "soap.api",
    "load": "soap.api",
    "load_cluster": "soap.api",
    "load_strategy": "soap.api",
    "measure_rows": "soap.api",
    "preprocess": "soap.preprocessing.local",
    "save_strategy": "soap.api",
    "simulate": "soap.api",
    "simulate_beside": "soap.api",
    "simulate_servers": "soap.api",
    "get_runner": "soap.runner.runner",
    "partitioner": "soap.runner.sharding",
    "shard": "soap.runner.sharding",
    "tune": "soap.runner.tuning",
    "without_weights": "soap.tracing.without_values",
    "RunnerConfig": "soap.runner.config",
    "PartBatch": "soap.runtime.inputs",
    "StepMetrics": "soap.runtime.training_options",
    "Trainer": "soap.runtime.trainer",
    "TrainingOptions": "soap.runtime.training_options",
    "SearchOptions": "soap.search.options",
    "OperatorGraph": "soap.model.graph",
    "OpConfig": "soap.strategy.config",
    "Strategy": "soap.strategy.config",
    "SyncConfig": "soap.strategy.config",
    "Topology": "soap.cluster.topology",
    "InfeasibleError": "soap.errors",
    "ModelError": "soap.errors",
    "ProfileError": "soap.errors",
    "RuntimeFailure": "soap.errors",
    "SoapError": "soap.errors",
    "StrategyError": "soap.errors",
    "TopologyError": "soap.errors",
}
"""Public name -> module that defines it."""

__all__ = [  # noqa: RUF022 - verbs, then values, then errors
    "classical",
    "export",
    "find",
    "find_servers",
    "fits",
    "get_runner",
    "load",
    "load_cluster",
    "load_strategy",
    "measure_rows",
    "partitioner",
    "preprocess",
    "save_strategy",
    "shard",
    "simulate",
    "simulate_beside",
    "simulate_servers",
    "tune",
    "without_weights",
    "Job",
    "PartBatch",
    "RunnerConfig",
    "SearchOptions",
    "SearchOutcome",
    "ServersOutcome",
    "StepMetrics",
    "Trainer",
    "TrainingOptions",
    "OperatorGraph",
    "OpConfig",
    "Strategy",
    "SyncConfig",
    "Topology",
    "SoapError",
    "InfeasibleError",
    "ModelError",
    "ProfileError",
    "RuntimeFailure",
    "StrategyError",
    "TopologyError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'soap' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
