"""Throughput, utilisation and cost in one line."""

from __future__ import annotations

import json

import pytest

from soap.cli import plan_summary
from soap.cli.simulate import main
from soap.cluster.price import Price
from soap.simulator.throughput import Throughput


@pytest.mark.parametrize(
    ("price", "line"),
    [
        (None, "1,234 samples/s (315,952 tokens/s), MFU 41%"),
        (Price(9.33), "1,234 samples/s (315,952 tokens/s), MFU 41%, 2.10 per million samples (0.0082 per million tokens)"),
        (Price(9333, "EUR"), "1,234 samples/s (315,952 tokens/s), MFU 41%, 2,100.57 EUR per million samples (8.21 per million tokens)"),
        (Price(0.0), "1,234 samples/s (315,952 tokens/s), MFU 41%, 0.00 per million samples (0.00 per million tokens)"),
    ],
)
def test_line(price: Price | None, line: str) -> None:
    own = Throughput(64_820_000, 80, 80 * 256, 10**12, "float32", 3.76e13, price)
    assert plan_summary.throughput_text(plan_summary.throughput_document(own)) == line


def test_what_a_model_has_not_is_left_out() -> None:
    figure = Throughput(10**9, 3, None, 10**9, "float32", 1e12, Price(3600.0))
    assert plan_summary.throughput_text(plan_summary.throughput_document(figure)) == "3 samples/s, MFU 0.1%, 333,333.33 per million samples"
    none = Throughput(10**9, None, None, 10**6, "float32", 1e12)
    assert plan_summary.throughput_text(plan_summary.throughput_document(none)) == "MFU under 0.1%"


def test_simulate_reports_them(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["zoo:gpt:tiny", "--cluster", "h200-8", "--builtin", "data_parallel"]
    assert main([*command, "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    found = own["throughput"]
    assert found["samples_per_second"] == pytest.approx(8e9 / own["predicted_ns"])
    assert found["tokens_per_second"] == pytest.approx(96e9 / own["predicted_ns"])
    assert found["mfu"] == pytest.approx(found["model_flops"] * 1e9 / own["predicted_ns"] / found["peak_flops_per_second"])
    assert (found["arithmetic"], found["peak_flops_per_second"]) == ("float32", 8 * 67e12)
    assert found["price_per_hour"] is found["currency"] is found["cost_per_million_samples"] is found["cost_per_million_tokens"] is None
    assert main(command) == 0
    assert f"  throughput           {plan_summary.throughput_text(found)}\n" in capsys.readouterr().out
