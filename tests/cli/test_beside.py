"""``soap-simulate --beside`` as people call it, and the same in Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import soap
from soap.cli.simulate import main
from tests.cli.refusals import assert_refused

CLUSTER = """
name: two by two
hosts:
  - {name: host, count: 2, devices: {type: titanxp, count: 2}, cpu_cores: 8,
     links: {intra: {bandwidth: 10 GB/s, latency: 5 us}}}
network: {bandwidth: 1 Gbit/s, latency: 30 us}
"""
FIRST, SECOND = ("host0/gpu0", "host1/gpu0"), ("host0/gpu1", "host1/gpu1")
MODEL = "zoo:rnnlm:tiny"


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return [MODEL, "--cluster", str(tmp_path / "cluster.yaml"), "--costs", "estimate", "--builtin", "data_parallel"]


def job(folder: Path, **fields: object) -> str:
    path = folder / "other.json"
    path.write_text(json.dumps({"model": MODEL, "builtin": "data_parallel", "devices": SECOND} | fields))
    return str(path)


@pytest.mark.slow
def test_jobs_beside_each_other_are_reported(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*command, "--devices", ",".join(FIRST), "-o", str(path), "--beside", job(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    one, other = report["beside"]
    assert one["job"] == "data_parallel" and other["job"] == "other.json" and other["devices"] == [*SECOND]
    assert report["cluster"]["devices"] == one["devices"] == [*FIRST]
    assert one["alone_ns"] == other["alone_ns"] == report["predicted_ns"] < one["step_ns"] <= 2 * one["alone_ns"]
    assert one["slowdown"] == pytest.approx(one["step_ns"] / one["alone_ns"])
    jobs = [soap.Job(MODEL, path, FIRST), soap.Job(MODEL, "data_parallel", SECOND)]
    found = soap.simulate_beside(jobs, tmp_path / "cluster.yaml", costs="estimate")
    assert [round(own.step_ns) for own in found] == [one["step_ns"], other["step_ns"]]
    assert main([*command, "--devices", ",".join(FIRST), "--beside", job(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    row = next(line for line in lines if line[:1] == ["other.json"])
    assert row[2] == "2" and row[-5] == f"{other['slowdown']:.2f}x"


@pytest.mark.slow
def test_what_cannot_be_beside_it_is_one_line(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [*command, "--devices", ",".join(FIRST), "--beside"]
    assert_refused(capsys, main, [*own, job(tmp_path, devices=FIRST)], 5, "device 'host0/gpu0' is in job 1 and in job 2; expected devices")
    assert_refused(capsys, main, [*own, job(tmp_path, devices=["host7"])], 4, "'host7' is no device of cluster 'two by two'")
    assert_refused(capsys, main, [*own, job(tmp_path, devices=3)], 5, "devices: 3; expected a list")
    assert_refused(capsys, main, [*own, job(tmp_path, strategy="plan.json")], 5, "expected an object with model, builtin or strategy")
    assert_refused(capsys, main, [*own, job(tmp_path, cluster="x")], 5, "unknown key 'cluster'; expected one of model")
    assert_refused(capsys, main, [*own, job(tmp_path, builtin="bipartite+async")], 5, "a stale strategy", "beside other jobs")
    assert_refused(capsys, main, [*own, str(tmp_path / "none.json")], 5, "none.json", "cannot be read")
    assert_refused(capsys, main, [*own, str(tmp_path / "cluster.yaml")], 5, "no JSON", "expected an object with model")
    assert_refused(capsys, main, [*command, "--beside", job(tmp_path)], 5, "is in job 1 and in job 2", "name each job's devices")
    assert_refused(capsys, main, [*command, "--fits", "--beside", job(tmp_path)], 2, "--beside with --fits")
    assert_refused(capsys, main, [*command, "--devices", "gpu0"], 4, "'gpu0' is no device of cluster 'two by two'")
