"""Exports that must change nothing; and at the end of a run of the rules' conformance, how many rules and ATen overloads it has met."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soap
from soap.errors import ModelError
from soap.tracing.execute import TracedModel
from soap.tracing.load import load_model
from soap.tracing.rules import registered
from tests.tracing.exporting import Exports, mean_square


@pytest.fixture
def export(tmp_path: Path) -> Exports:
    """Exports, expects that nothing of the module, its gradients and torch's generator has changed, and reads the file."""

    def run(module: nn.Module, *args: Tensor, **options: Any) -> TracedModel:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        before, generator, training = copy.deepcopy(module.state_dict()), torch.get_rng_state(), module.training
        try:
            soap.export(module, args, path=tmp_path / "m.pt2", loss=options.pop("loss", mean_square), **options)
        except ModelError:
            assert list(tmp_path.iterdir()) == []  # nothing half-written
            raise
        finally:
            torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
            assert all(p.grad is not None and bool((p.grad == 1).all()) for p in module.parameters())
            assert torch.equal(torch.get_rng_state(), generator) and module.training == training
        return load_model(tmp_path / "m.pt2")

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found: dict[str, set[str]] = {"rule": set(), "overload": set()}
    for report in terminalreporter.getreports("passed"):
        if report.when == "call":
            for key, value in report.user_properties:
                if key in found:
                    found[key].add(str(value))
    if found["rule"]:
        text = f"operator rules: {len(found['rule'])} of {len(registered())} checked by tiles, on {len(found['overload'])} ATen overloads"
        terminalreporter.write_sep("-", text)
