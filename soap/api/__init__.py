"""The public functions, and the composition root: the one package that knows all parts.

A model may be what ``load`` returns, an ``OperatorGraph``, or text for ``load``. A cluster may be a ``Topology`` or text for
``load_cluster``. Functions that need torch import it when they are called.
"""

from __future__ import annotations

from soap.api.beside import Job, beside_of, job_simulation, load_job, simulate_beside
from soap.api.deciding import decision_record, finalists_by_name, memory_range, timed
from soap.api.finding import find
from soap.api.fitting import Fit, Way, fits
from soap.api.informing import WhatDecides, what_decides
from soap.api.models import Cluster, Model, export, load, load_cluster, measure_rows, planned_graph
from soap.api.outcome import LEAST_MEASURED, Run, SearchOutcome, least_measured
from soap.api.predictions import (
    Prediction,
    costs_for,
    costs_record,
    explain,
    explain_synchronization,
    explain_unkept,
    predicted_range,
    simulate,
    simulator_for,
    with_links,
)
from soap.api.servers import (
    ANY,
    MOST_SIMULATED,
    WORKER_POLICIES,
    ServersOutcome,
    WorkersOutcome,
    find_servers,
    find_workers,
    simulate_servers,
    simulate_workers,
    steady,
)
from soap.api.strategies import (
    classical,
    load_strategy,
    load_strategy_contents,
    load_strategy_header,
    placed_layers,
    require_cluster,
    save_strategy,
    simulated_name,
    with_recorded_rows,
)
from soap.api.what_if import Elsewhere, elsewhere, sensitivity

__all__ = [
    "ANY",
    "LEAST_MEASURED",
    "MOST_SIMULATED",
    "WORKER_POLICIES",
    "Cluster",
    "Elsewhere",
    "Fit",
    "Job",
    "Model",
    "Prediction",
    "Run",
    "SearchOutcome",
    "ServersOutcome",
    "Way",
    "WhatDecides",
    "WorkersOutcome",
    "beside_of",
    "classical",
    "costs_for",
    "costs_record",
    "decision_record",
    "elsewhere",
    "explain",
    "explain_synchronization",
    "explain_unkept",
    "export",
    "finalists_by_name",
    "find",
    "find_servers",
    "find_workers",
    "fits",
    "job_simulation",
    "least_measured",
    "load",
    "load_cluster",
    "load_job",
    "load_strategy",
    "load_strategy_contents",
    "load_strategy_header",
    "measure_rows",
    "memory_range",
    "placed_layers",
    "planned_graph",
    "predicted_range",
    "require_cluster",
    "save_strategy",
    "sensitivity",
    "simulate",
    "simulate_beside",
    "simulate_servers",
    "simulate_workers",
    "simulated_name",
    "simulator_for",
    "steady",
    "timed",
    "what_decides",
    "with_links",
    "with_recorded_rows",
]
