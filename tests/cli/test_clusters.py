"""``soap-search`` with several clusters: which machine to rent."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import soap
from soap.cli.search import main
from soap.search import chains
from tests.cli.refusals import assert_refused
from tests.extent import rows_often

MODEL = "zoo:gpt:tiny"
Capsys = pytest.CaptureFixture[str]
TINY = """
name: crumbs
device_types: {chip: {kind: cuda, flops: {float32: 1 TFLOP/s}, memory_bandwidth: 1 GB/s, memory: 16 KiB, kernel_overhead: 1 us}}
hosts:
  - {name: a, devices: {type: chip, count: 2}, cpu_cores: 8, memory: 64 GiB, links: {intra: {bandwidth: 1 GB/s, latency: 5 us}}}
"""


def search(*arguments: str) -> int:
    return main([MODEL, "--budget", "5", "--start", "data_parallel", "--confidence", "0", *arguments])


def clusters(*specs: str) -> list[str]:
    return [word for spec in specs for word in ("--cluster", spec)]


FAST, SLOW, SLOWEST = "fast", "l4-2x2", "l4-3x2"
PRICES = {FAST: 1000.0, SLOW: 1.0, SLOWEST: 1.5}
HOSTS = """
name: fast
hosts:
  - name: node
    count: 2
    devices: {type: h200, count: 2}
    cpu_cores: 20
    memory: 256 GiB
    links: {intra: {bandwidth: 400 GB/s, latency: 1 us}}
network: {bandwidth: 400 Gbit/s, latency: 1 us}
"""


@pytest.fixture
def priced(tmp_path: Path) -> dict[str, str]:
    """Clusters with a price, by name: the fast one costs far more."""
    paths = {name: tmp_path / f"{name}.yaml" for name in PRICES}
    for name, price in PRICES.items():
        paths[name].write_text(f"{HOSTS if name == FAST else f'preset: {name}'}\nprice_per_hour: {price}\ncurrency: EUR\n")
    return {name: str(path) for name, path in paths.items()}


@pytest.mark.slow
def test_the_fastest_cluster_s_strategy_is_written(tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "s.json"
    assert search(*clusters(SLOWEST, SLOW), "-o", str(out)) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    options = soap.SearchOptions(budget=5, starts=["data_parallel"], patience=0.5, confidence=0.0)
    outcomes = {name: soap.find(MODEL, name, options) for name in (SLOWEST, SLOW)}
    times = {name: found.time_ns for name, found in outcomes.items()}
    chosen = min(times, key=lambda name: times[name])
    assert soap.load_strategy(out, MODEL, chosen)
    assert json.loads(out.read_text())["record"]["predicted_ns"] == times[chosen]
    rows = {line.split()[0]: line for line in lines[1:3]}
    assert set(rows) == {SLOWEST, SLOW} and rows[chosen].endswith("no price  chosen")
    assert all(rows[name].split()[1] == f"{time_ns / 1e6:.3f}" for name, time_ns in times.items())
    assert "80% of draws" in lines[0]
    for name, found in outcomes.items():
        low, _, high = (f"{time_ns / 1e6:.3f}" for time_ns in found.range["time_ns"])
        assert f" {low} ms to {high} ms " in rows[name]
    assert f"fastest: {chosen}; of its strategy:" in lines
    assert said.out.endswith(f"wrote {out}\n") and said.err == ""


@pytest.mark.long
def test_json_has_all_clusters(tmp_path: Path, capsys: Capsys, priced: dict[str, str]) -> None:
    given = list(priced.values())
    assert search(*clusters(*given), "--objective", "cost", "-o", str(tmp_path / "s.json"), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["objective"] == "cost" and [entry["cluster_given"] for entry in report["clusters"]] == given
    costs = {}
    for name, entry in zip(priced, report["clusters"], strict=True):
        price = PRICES[name]
        assert entry["cluster"]["name"] == name and entry["fits"] is True and entry["search"]["evaluations"] > 1
        low, _, high = entry["range"]["time_ns"]
        assert low < high and entry["range"]["wins"] >= 0
        assert entry["throughput"]["price_per_hour"] == price and entry["throughput"]["currency"] == "EUR"
        costs[name] = entry["throughput"]["cost_per_million_samples"]
        assert costs[name] == pytest.approx(price * entry["predicted_ns"] / 3.6e12 / 8 * 1e6)
    cheapest = min(costs, key=lambda name: costs[name])
    assert report["chosen"] == priced[cheapest] and report["cluster"]["name"] == cheapest != FAST
    assert report["predicted_ns"] == report["clusters"][list(priced).index(cheapest)]["predicted_ns"]


@pytest.mark.long
@pytest.mark.slow
def test_cost_and_time_may_choose_differently(tmp_path: Path, capsys: Capsys, priced: dict[str, str]) -> None:
    two = clusters(priced[SLOW], priced[FAST])
    reports = {}
    for objective in ("time", "cost"):
        assert search(*two, "--objective", objective, "--costs", "estimate", "-o", str(tmp_path / "s.json"), "--json") == 0
        reports[objective] = json.loads(capsys.readouterr().out)
    slow_ns, fast_ns = (entry["predicted_ns"] for entry in reports["time"]["clusters"])
    assert fast_ns < slow_ns < 1000 * fast_ns
    assert reports["time"]["chosen"] == priced[FAST] and reports["cost"]["chosen"] == priced[SLOW]
    assert search(*two, "--objective", "cost", "-o", str(tmp_path / "s.json")) == 0
    text = capsys.readouterr().out
    assert f"cheapest: {priced[SLOW]}; of its strategy:" in text and " EUR per million samples (" in text


def test_prices_are_asked_for_before_anything_is_searched(tmp_path: Path, capsys: Capsys, priced: dict[str, str]) -> None:
    out, model = tmp_path / "s.json", tmp_path / "no.pt2"
    model.write_text("no model")  # which is not even looked at
    wanted = [str(model), "--objective", "cost", "-o", str(out)]
    refused = "--objective cost: cluster 'h200-8' has no price; expected price_per_hour in its file"
    assert_refused(capsys, main, [*wanted, *clusters(priced[SLOW], "h200-8")], 4, refused)
    assert_refused(capsys, main, [*wanted, *clusters("h200-8")], 4, refused)
    Path(priced[FAST]).write_text("preset: h200-8\nprice_per_hour: 3\ncurrency: USD\n")
    assert_refused(capsys, main, [*wanted, *clusters(*priced.values())], 4, "several currencies (EUR, USD)")
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.long
def test_one_cluster_with_a_price_is_searched_as_ever(tmp_path: Path, capsys: Capsys, priced: dict[str, str]) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    assert search(*clusters(SLOW), "-o", str(paths[0])) == 0
    assert search(*clusters(priced[SLOW]), "--objective", "cost", "-o", str(paths[1])) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    plain, with_price = capsys.readouterr().out.split("wrote ")[:2]
    assert "chosen" not in plain + with_price and " EUR per million samples (" in with_price


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (clusters("h200-8", "p100-4x4", "h200-8"), ["--cluster h200-8 is given twice"]),
        ([*clusters("h200-8", "local:2"), "--profile", "5"], ["--profile with several --cluster", "expected one --cluster"]),
        ([*clusters("h200-8", "local:2"), "--verify"], ["--verify with several --cluster"]),
        ([*clusters("h200-8", "local:2"), "--objective", "money"], ["--objective", "'money'"]),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], words: list[str], tmp_path: Path, capsys: Capsys) -> None:
    assert_refused(capsys, main, ["no.pt2", *arguments, "-o", str(tmp_path / "s.json")], 2, *words)


@pytest.mark.slow
def test_this_machine_is_neither_measured_nor_run(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soap.cli.first_measuring.profile", None)
    monkeypatch.setattr("soap.cli.first_measuring.verify", None)
    assert search(*clusters(SLOW, "local:2"), "-o", str(tmp_path / "s.json")) == 0
    assert capsys.readouterr().err == "soap-search: several clusters are compared by predictions: nothing is measured or run\n"


@pytest.mark.slow
@pytest.mark.long
def test_a_model_that_fits_on_some_of_them(tmp_path: Path, capsys: Capsys) -> None:
    crumbs, out = tmp_path / "crumbs.yaml", tmp_path / "s.json"
    crumbs.write_text(TINY)
    assert search(*clusters(str(crumbs), SLOW), "-o", str(out)) == 0
    text = capsys.readouterr().out
    assert any(line.split()[0] == str(crumbs) and line.endswith("nothing fits into memory") for line in text.splitlines()[:3])
    assert search(*clusters(str(crumbs), SLOW), "-o", str(out), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["clusters"][0]["fits"] is False and "does not fit" in report["clusters"][0]["problem"] and report["chosen"] == SLOW
    other = tmp_path / "other.yaml"
    other.write_text(TINY)
    command = [MODEL, *clusters(str(crumbs), str(other)), "-o", str(tmp_path / "none.json"), "--budget", "5"]
    assert_refused(capsys, main, command, 7, f"cluster '{crumbs}': ", f"cluster '{other}': ", "16.0 KiB")
    assert not (tmp_path / "none.json").exists()


@pytest.mark.slow
def test_an_option_that_one_cluster_cannot_have(tmp_path: Path, capsys: Capsys) -> None:
    command = [MODEL, *clusters(SLOWEST, SLOW), "-o", str(tmp_path / "s.json"), "--budget", "5", "--forbid", "*=@5"]
    assert_refused(capsys, main, command, 5, f"cluster '{SLOW}': ", "device 5", "0 to 3")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("search_number", "number", "code"),
    rows_often([(1, signal.SIGINT, 130), (2, signal.SIGINT, 130), (2, signal.SIGTERM, 143)], [(2, signal.SIGINT, 130)]),
)
def test_interrupted_it_keeps_what_is_known(
    search_number: int, number: int, code: int, priced: dict[str, str], tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun = chains._Run.everything, list[Any]()

    def everything(run: Any) -> None:
        begun.append(run)
        if len(begun) == search_number:  # its starts are evaluated
            os.kill(os.getpid(), number)
        real(run)

    monkeypatch.setattr(chains._Run, "everything", everything)
    out, given = tmp_path / "s.json", [SLOW, priced[FAST], SLOWEST]
    assert search(*clusters(*given), "-o", str(out), "--json") == code
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert len(begun) == search_number
    entries = report["clusters"]
    assert [entry.get("problem") for entry in entries] == [None] * search_number + ["not searched"] * (3 - search_number)
    assert [entry["search"]["interrupted"] for entry in entries[:search_number]] == [False] * (search_number - 1) + [True]
    best = min(entries[:search_number], key=lambda entry: entry["predicted_ns"])
    assert report["chosen"] == best["cluster_given"]
    assert soap.load_strategy(out, MODEL, report["chosen"])
    after = f"interrupted after {search_number - 1} of 3 clusters: the best strategy so far, of {report['chosen']}, is in {out}\n"
    assert said.err == f"soap-search: {after}"


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("known", [0, 1])
def test_interrupted_before_a_search_has_begun(known: int, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = soap.api.find, list[object]()

    def find(graph: Any, topology: Any, *rest: Any, **options: Any) -> Any:
        asked.append(topology)
        if len(asked) > known:
            os.kill(os.getpid(), signal.SIGINT)
        return real(graph, topology, *rest, **options)

    monkeypatch.setattr("soap.api.find", find)
    out = tmp_path / "s.json"
    assert search(*clusters(SLOW, SLOWEST), "-o", str(out)) == 130
    said = capsys.readouterr()
    if known:
        assert soap.load_strategy(out, MODEL, SLOW)
        assert SLOWEST in said.out and "not searched" in said.out and "interrupted after 1 of 2 clusters" in said.err
    else:
        assert not out.exists() and said.out == "" and said.err == "soap-search: interrupted: nothing was found yet\n"
