"""``--lossy`` from the search to the run: what is allowed, found, said and checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import soap
from soap.cli.run import main as run
from soap.cli.search import main as search
from soap.cli.simulate import main as simulate
from soap.errors import StrategyError
from soap.plan.syncs.clipping import NORM_BYTES
from soap.search.lossy import lossy_starts
from soap.simulator.communication.prices import Communication
from soap.strategy.compression import Int8
from tests.cli.refusals import assert_refused

MODEL, CLUSTER = "zoo:gpt:tiny", "emulated:2x1@100Mbit/s"


@pytest.mark.parametrize(
    ("method", "said"),
    [("zip", "'zip' is unknown"), ("rgc:2", "density 2.0; expected"), ("powersgd:x", "expected a rank"), ("int8:4", "has no setting")],
)
def test_other_methods_are_refused(method: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, search, [MODEL, "--cluster", CLUSTER, "-o", str(tmp_path / "s.json"), "--lossy", method], 2, "--lossy", said)


@pytest.mark.parametrize("option", ["--correct-momentum=0.9", "--warm-up=5"])
def test_training_without_compression_changes_no_plan(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = "without --lossy; expected --lossy METHOD too"
    assert_refused(capsys, search, [MODEL, "--cluster", CLUSTER, "-o", str(tmp_path / "s.json"), option], 2, option.split("=")[0], said)


@pytest.mark.slow
def test_plans_that_clip_wait_for_the_norm_whatever_they_send(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without ``--lossy``, too: by as much as an all-reduce of eight bytes takes."""
    arguments = ["zoo:alexnet:tiny", "--cluster", "emulated:2x1@1Mbit/s", "--budget", "5", "--costs", "estimate", "--profile", "0"]
    arguments += ["--verify", "0", "-o", str(tmp_path / "s.json"), "--start", "data_parallel", "--pin", "*=sample:2", "--json"]
    times = []
    for clipping in ([], ["--clip-norm", "1"]):
        assert search([*arguments, *clipping]) == 0
        times.append(json.loads(capsys.readouterr().out)["predicted_ns"])
    [norm_ns] = {Communication(soap.load_cluster("emulated:2x1@1Mbit/s")).allreduce(NORM_BYTES, (0, 1))[0]}
    assert times[1] - times[0] == norm_ns


def test_what_is_compressed_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A search with ``--lossy`` says what each parameter sends, and what that saves; without it nothing is compressed."""
    out = tmp_path / "s.json"
    arguments = ["zoo:alexnet:tiny", "--cluster", "emulated:2x1@1Mbit/s", "--budget", "30", "--costs", "estimate", "--profile", "0"]
    arguments += ["--verify", "0", "-o", str(out), "--start", "data_parallel", "--pin", "*=sample:2"]
    assert search([*arguments, "--lossy", "bf16"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("lossy: ") and "so it does not train exactly like one process" in text.splitlines()[0]
    assert "as the search was told: --pin *=sample:2, --lossy bf16" in text
    assert simulate(["zoo:alexnet:tiny", "--strategy", str(out), "--cluster", "emulated:2x1@1Mbit/s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    own = found["compressed"]["parameters"]
    assert own and all(entry["method"] == "bf16" and entry["sent_bytes"] <= entry["dense_bytes"] // 2 + 8 for entry in own.values())
    assert found["compressed"]["all"]["saved_ns"] > 0
    assert "does not pay" not in text
    assert search(arguments) == 0
    told = capsys.readouterr().out
    assert "lossy" not in told and "compression" not in told
    assert all(sync.compression is None for sync in soap.load_strategy(out, "zoo:alexnet:tiny", "emulated:2x1@1Mbit/s").parameters.values())


@pytest.mark.parametrize(("methods", "named"), [(["bf16"], "bf16"), (["rgc:0.01", "int8"], "rgc:0.01")])
def test_a_search_says_that_compression_does_not_pay(
    methods: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one device there is nothing to send. The line stands where people read; documents have no compressed parameters."""
    arguments = ["zoo:alexnet:tiny", "--cluster", "emulated:2x1@1Mbit/s", "--budget", "2", "--costs", "estimate", "--profile", "0"]
    arguments += ["--verify", "0", "-o", str(tmp_path / "s.json"), "--start", "single_device", "--pin", "*=@0"]
    assert search([*arguments, *(word for method in methods for word in ("--lossy", method))]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "compression" in line]
    assert line.startswith("compression does not pay here: ") and all(method in line for method in methods) and named in line


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--warm-up", "2,", "expected DENSE or DENSE,EACH steps, such as 100,50"),
        ("--warm-up", ",2", "expected DENSE or DENSE,EACH steps"),
        ("--warm-up", "2,3,4", "expected DENSE or DENSE,EACH steps"),
        ("--warm-up", "-1", "expected DENSE or DENSE,EACH steps"),
        ("--correct-momentum", "1", "expected a momentum from 0 to below 1"),
        ("--correct-momentum", "nan", "expected a number of at least 0"),
    ],
)
def test_other_ways_to_train_are_refused_at_once(option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, run, ["none.json", "--model", MODEL, "--cluster", "local:2", f"{option}={value}"], 2, option, said)


def test_another_cluster_is_no_help_against_a_wrong_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hint at ``--what-if`` stands where that helps: the file is fine, and of another cluster."""
    model, cluster, out = soap.load(MODEL, plan_only=True), soap.load_cluster("local:2"), tmp_path / "s.json"
    [strategy] = lossy_starts(model.graph, soap.api.classical("data_parallel", model, cluster), [Int8()]).values()
    soap.save_strategy(out, strategy, model, cluster)
    arguments = [MODEL, "--strategy", str(out), "--costs", "estimate"]
    code, hint = StrategyError.exit_code, "or price it here all the same with --what-if"
    assert_refused(capsys, simulate, [*arguments, "--cluster", CLUSTER], code, hint)
    out.write_text(out.read_text().replace('"int8"', '"bf16", "density": 0.1'))
    for where in ("local:2", CLUSTER):
        assert simulate([*arguments, "--cluster", where]) == StrategyError.exit_code
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and "bf16: unknown setting 'density'; it has no settings" in line and "--what-if" not in line


@pytest.mark.long
@pytest.mark.slow
def test_a_lossy_plan_is_checked_against_its_emulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, cluster, out = soap.load(MODEL, plan_only=True), soap.load_cluster("local:2"), tmp_path / "s.json"
    [strategy] = lossy_starts(model.graph, soap.api.classical("data_parallel", model, cluster), [Int8()]).values()
    soap.save_strategy(out, strategy, model, cluster)
    assert run([str(out), "--model", MODEL, "--cluster", "local:2", "--steps", "3", "--check", "--costs", "estimate"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("lossy: ")
    assert "before compression as in one process, then as one process emulates it, bit for bit" in text
