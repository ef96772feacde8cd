"""Cells of a notebook that show plans (docs/howto/jupyter.md)."""

from __future__ import annotations

from IPython.display import IFrame, display

import soap

MODEL, CLUSTER = "zoo:rnnlm:tiny", "p100-4x4"


def cells() -> soap.SearchOutcome:
    """Three tables."""
    # --8<-- [start:cells]
    found = soap.find(MODEL, CLUSTER, soap.SearchOptions(budget=500))
    display(found)  # or alone in the last line of a cell
    display(soap.simulate(MODEL, CLUSTER, found.strategy))
    display(soap.classical("megatron", MODEL, CLUSTER))
    # --8<-- [end:cells]
    return found


def report(found: soap.SearchOutcome) -> None:
    """The whole report, inside the notebook."""
    # --8<-- [start:report]
    from soap.cli.report import main as soap_report

    found.save("strategy.json")
    soap_report([MODEL, "--cluster", CLUSTER, "--strategy", "strategy.json", "-o", "report.html"])
    display(IFrame("report.html", width=1100, height=800))
    # --8<-- [end:report]
