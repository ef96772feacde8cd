"""Numbers that people see are possible: of zoo models by strategies, in what commands print, in their JSON, and in reports."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.language_model import LanguageModel
from soap import api
from soap.api.models import planned_graph
from soap.cli import reporting
from soap.cli.simulate import main
from soap.plan.memory_kinds import MemoryKind
from soap.report.page import tabs_of
from soap.report.section import Block, Choice, Figure, Table, Text
from soap.simulator.folded import FoldedSimulation
from soap.simulator.memory.array_ledger import ArrayLedger
from soap.simulator.simulate import Simulation
from soap.strategy.named import named
from tests.extent import every

pytest.importorskip("bokeh", reason="reports need bokeh: pip install '.[report]'")

SIGNED = {"set_back_saves_ns", "regret_ns", "change"}
"""Differences, which may be below 0."""
SHARE = re.compile(r"share$|shares|fraction|mfu")
"""Names of parts of a whole."""
UNIT = "[KMGT]?i?B|ns|us|µs|ms|s|samples|x|times"
BELOW_ZERO = re.compile(rf"(?<![\w.^-])-\d[\d.,]*\s*(?:{UNIT})\b|(?<![\w.])-0(?:\.0+)?(?![\d.])|\bnan\b|\binf\b")
PARTS = re.compile(r"(\d+(?:\.\d+)?)% of (?:the time|the iteration)")

CLUSTERS = ["local:2", "h100-4", "p100-4x4"]
STRATEGIES = [
    "data_parallel", "megatron", "fsdp", "pipeline", "parameter_server", "zero1+selective", "sequence_parallel", "recompute",
    "hsdp", "single_device", "sparse_allgather", "model_parallel", "fsdp+offload", "one_weird_trick",
]  # fmt: skip
MODELS = ["rnnlm", "gpt", "nmt", "dlrm", "alexnet"]
CASES = [
    (f"zoo:{model}:tiny", CLUSTERS[(i + j) % 3], strategy) for i, model in enumerate(MODELS) for j, strategy in enumerate(STRATEGIES)
]

LAYERS_AT_ONCE = ("lm.pt2", "local:4", "megatron")
"""An LSTM whose backward pass never holds the gradients of all of its layers and all that it has kept at once."""


def numbers(document: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number of a JSON document, with where it stands."""
    if isinstance(document, dict):
        for name, own in document.items():
            yield from numbers(own, (*path, name))
    elif isinstance(document, list):
        for own in document:
            yield from numbers(own, path)
    elif isinstance(document, int | float) and not isinstance(document, bool):
        yield path, document


def impossible(path: tuple[str, ...], number: float) -> bool:
    below = math.copysign(1, number) < 0 and not SIGNED.intersection(path)
    return not math.isfinite(number) or below or (SHARE.search(path[-1]) is not None and number > 1 + 1e-9)


def wrong_words(text: str) -> list[str]:
    """Places of a text that say something impossible."""
    return [*BELOW_ZERO.findall(text), *(share for share in PARTS.findall(text) if float(share) > 100)]


def texts(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        match block:
            case Text():
                yield block.text
            case Table():
                yield from (cell for row in block.rows for cell in row)
            case Figure():
                yield from (block.title, block.about)
            case Choice():
                yield from texts([figure for _, figure in block.options])


def check_memory(simulation: Simulation | FoldedSimulation) -> None:
    for held, peak in zip(simulation.peak_by_kind, simulation.peak_bytes, strict=True):
        assert sum(held.values()) == peak and min(held.values()) >= 0
    for curve in simulation.memory_over_time:
        assert min(int(own.min()) for own in curve.by_kind.values()) >= 0
        assert (sum(curve.by_kind.values()) == curve.bytes_held).all()


def test_what_is_impossible_is_found() -> None:
    for text in ("workspace -867 KiB", "waits -0.3 ms", "saves -0.0", "nan ms", "busy 104% of the time on average", "-1.5x"):
        assert wrong_words(text), text
    for text in ("(-9.6%)", "1e-04", "zoo:dlrm:tables=3-4", "0-3", "100% of the time", "2026-11-29", "difference 5.3e-07 s"):
        assert not wrong_words(text), text
    assert impossible(("peak", "workspace"), -1) and impossible(("saves",), -0.0) and impossible(("mfu",), 1.01)
    assert not impossible(("explanation", "set_back_saves_ns"), -3) and not impossible(("speedup",), 1.01)


def test_what_is_never_held_at_once_is_taken_from_what_is_counted() -> None:
    """A pass that holds 30 bytes less than its operands, its results and their gradients: 20 of them are the gradients there are."""
    ledger = ArrayLedger(1, frozenset(), 10)
    ledger.hold(0, 0, 10, 100, MemoryKind.KEPT)
    ledger.hold(0, 4, 6, 20, MemoryKind.GRADIENTS)
    ledger.hold(0, 4, 6, -30, MemoryKind.WORKSPACE)
    ledger.hold(0, 4, 6, 50, MemoryKind.BUFFERS)
    ledger.hold(0, 6, 6, 1000, MemoryKind.BUFFERS, late=True)  # over before anything begins then
    (curve,) = ledger.curves()
    told = {MemoryKind.KEPT: 90, MemoryKind.GRADIENTS: 0, MemoryKind.WORKSPACE: 0, MemoryKind.BUFFERS: 50}
    assert curve.peak_bytes == 140 and {**curve.at_peak} == {**dict.fromkeys(MemoryKind, 0), **told}
    assert curve.bytes_held.tolist() == [100, 140, 100, 0]
    assert {kind: int(own[1]) for kind, own in curve.by_kind.items()} == {**curve.at_peak}
    assert min(int(own.min()) for own in curve.by_kind.values()) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cluster", "strategy"), [*every(28, CASES), LAYERS_AT_ONCE])
def test_numbers_are_possible(model: str, cluster: str, strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if model == LAYERS_AT_ONCE[0]:
        model = str(tmp_path / model)
        words = torch.randint(2000, (2, 16, 8))
        api.export(LanguageModel(2000, 64), (words[0], words[1]), path=model)
    command = [model, "--cluster", cluster, "--builtin", strategy, "--costs", "estimate", "--explain"]
    assert main(command) == 0
    assert wrong_words(capsys.readouterr().out) == []
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [own for own in numbers(document) if impossible(*own)] == []
    assert max(document["busy_ns"].values(), default=0) <= document["predicted_ns"]
    graph, topology = planned_graph(model), api.load_cluster(cluster)
    simulator = api.simulator_for(graph, topology, costs="estimate")
    chosen = api.simulated_name(strategy, simulator) if strategy == "pipeline" else named(strategy, graph, topology)
    simulation = simulator.run(chosen)
    check_memory(simulation)
    contents = reporting.plan_contents("plan", simulator, chosen, simulation, on=())
    (found, _) = tabs_of([contents])
    for tab in found:
        assert [wrong for text in texts(tab.panes[0].blocks) for wrong in wrong_words(text)] == [], tab.title
