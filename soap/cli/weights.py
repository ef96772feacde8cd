"""``--weights`` of commands that train: a model's values from files of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from soap import api
from soap.cli.command import Parser
from soap.cli.options import Reading
from soap.errors import ModelError

if TYPE_CHECKING:
    from soap.model.graph import OperatorGraph
    from soap.tracing.record import ExportRecord

HELP = "a safetensors file, or a folder as Hugging Face writes it: the model's values (default: those in MODEL)"


def add_weights(parser: Parser) -> None:
    """The option."""
    parser.add_argument("--weights", metavar="PATH", help=HELP)


def read(
    model: str, weights: str | None, reading: Reading, *, resumed: bool
) -> tuple[OperatorGraph, ExportRecord | None, Mapping[str, str]]:
    """The model's graph, what its file says of its export, and what its parameters are called in the weights. ModelError in one line if
    these are not the model's, or if it has none, and no checkpoint gives them."""
    from soap.weights.fitting import matched
    from soap.weights.spec import open_weights

    planned = api.load(model, plan_only=True, **reading)
    record: ExportRecord | None = getattr(planned, "record", None)
    if weights is not None:
        return planned.graph, record, matched(planned, open_weights(weights))
    if record is not None and not record.has_values and not resumed:
        raise ModelError(f"model {model!r} was exported without weights; expected --weights PATH: safetensors, as Hugging Face writes")
    return planned.graph, record, {}
