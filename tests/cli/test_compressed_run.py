"""``soap-run`` of plans that compress: what stays unsupported is refused before ranks start, and predictions know the training."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

import soap
from soap.cli.run import main, make_parser, prepare
from soap.plan.syncs.seam import method_for
from soap.strategy.compression import Rgc
from soap.strategy.sync import compressed
from tests.cli.refusals import assert_refused

MODEL, CLUSTER = "zoo:gpt:tiny", "local:2"


def saved(folder: Path, plan: str) -> list[str]:
    """A command with a strategy whose largest parameter is compressed."""
    model, cluster = soap.load(MODEL, plan_only=True), soap.load_cluster(CLUSTER)
    strategy = soap.api.classical(plan, model.graph, cluster)
    dense = [tensor for tensor in model.graph.parameters if tensor.name not in model.graph.sparse]
    name = max(dense, key=lambda tensor: prod(tensor.shape)).name
    soap.save_strategy(folder / "s.json", strategy.with_changes(parameters={name: compressed(Rgc(0.01))}), model, cluster)
    return [str(folder / "s.json"), "--model", MODEL, "--cluster", CLUSTER]


def test_what_is_not_supported_starts_no_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("soap.runtime.comm.launch.launch", lambda **_: pytest.fail("ranks were started"))
    command = saved(tmp_path, "data_parallel")
    assert_refused(capsys, main, [*command, "--clip-norm", "1", "--check"], 2, "--check with --clip-norm and a plan that compresses")
    corrected = [*command, "--correct-momentum", "0.9", "--optimizer", "adam"]
    assert_refused(capsys, main, corrected, 2, "--correct-momentum 0.9 beside --optimizer adam", "expected sgd")


def test_predictions_know_momentum_decay_warm_up_and_clipping(tmp_path: Path) -> None:
    command = saved(tmp_path, "data_parallel")
    options = ["--correct-momentum", "0.9", "--weight-decay", "0.1", "--warm-up", "1,1", "--clip-norm", "1"]
    plain, full = (prepare(make_parser().parse_args([*command, *own])) for own in ([], options))
    plans = [found[1]["strategy"].plan for found in (plain, full)]
    syncs = [sync for plan in plans for sync in plan.syncs if sync.compression]
    kept = [next(iter(method_for(sync).holds(plan, sync))).size_bytes for plan, sync in zip(plans, syncs, strict=True)]
    assert kept[1] == 3 * kept[0]  # residual; u, and the momentum of weight decay
    assert [plan.training.clips for plan in plans] == [False, True]
    assert full[0].compressed == {"strategy": (syncs[0].parameter,)}
