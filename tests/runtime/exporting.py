"""A process that builds models of ``transformers``, exports them as users do, and computes what eager PyTorch makes of them.

Run as a program it reads names, one a line, and answers each with one line of JSON. So the library is imported once, and never by those
that read the files.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from soap.tracing.calls import TileContext
from tests.runtime.traced import traced
from tests.transformers_models import ARCHITECTURES

WAYS = ("torch.export.save", "soap.export")
"""Each leaves a file of this name."""
EXPECTED = "expected.pt"
"""Loss and gradients by name, in float64."""


class Exporter:
    """The process; ``with`` it ends."""

    def __init__(self) -> None:
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL  # torch.export prints what it could not trace
        command = [sys.executable, "-m", "tests.runtime.exporting"]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, text=True)

    def export(self, name: str, folder: Path) -> dict[str, str]:
        """Way of exporting -> "" or why it was refused. Files and expected numbers are in the folder then."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, str(folder)]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that exports died of {name}"
        result = json.loads(answer)
        assert "failed" not in result, result["failed"]
        return dict(result)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


class Comparison(NamedTuple):
    """The largest relative error of a program's loss and gradients, where that is, and how many operators there are, without a rule among
    them."""

    error: float
    place: str
    operators: int
    whole: int


def compared(path: str, expected: str) -> Comparison:
    """Run on a rank: a file's program against what eager PyTorch made of the model."""
    assert "transformers" not in sys.modules
    model, right = traced(path, "float64"), torch.load(expected, weights_only=True)
    parameters = {n: p.detach().clone().requires_grad_(model.graph.tensors[n].requires_grad) for n, p in model.parameters.items()}
    context = TileContext(0, 0, {n: b.clone() for n, b in model.buffers.items()})
    loss = model.reference_loss(model.example_inputs, parameters, context)
    loss.backward()
    worst, place = float((loss.detach() - right["loss"]).abs() / right["loss"].abs()), "loss"
    largest = max(float(g.abs().max()) for g in right["gradients"].values())
    for name, gradient in right["gradients"].items():
        found = parameters.get(model.graph.aliases.get(name, name))
        made = torch.zeros_like(gradient) if found is None or found.grad is None else found.grad
        error = float((made - gradient).abs().max()) / max(float(gradient.abs().max()), 1e-3 * largest)
        if not error <= worst:
            worst, place = error, name
    operators = model.graph.operators
    return Comparison(worst, place, len(operators), sum(not op.partitionable for op in operators))


class InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Everything that a model computes in float32 by name is computed in float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)


def eager(name: str) -> dict[str, Any]:
    """Loss and gradients by plain PyTorch, in float64. The weights and inputs are those of float32."""
    torch.manual_seed(0)
    module, inputs = ARCHITECTURES[name]()
    module, inputs = module.double(), tree_map(_widened, inputs)
    for part in module.modules():
        if hasattr(part, "config"):  # experts in a loop: grouped products know no float64
            part.config._experts_implementation = "eager"
    torch.set_default_dtype(torch.float64)
    try:
        with InFloat64():  # type: ignore[no-untyped-call]
            found = module(**inputs)
            loss = found["loss"] if isinstance(found, dict) else found.loss
            loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "gradients": gradients}


def _widened(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def exported(name: str, folder: Path) -> dict[str, str]:
    """Export a model in both ways, and note why not."""
    import soap
    from soap.errors import SoapError

    torch.manual_seed(0)
    module, inputs = ARCHITECTURES[name]()
    refused = dict.fromkeys(WAYS, "")
    try:
        torch.export.save(_program(module, inputs), folder / f"{WAYS[0]}.pt2")
    except Exception as error:
        refused[WAYS[0]] = str(error).strip().splitlines()[0]
    try:
        soap.export(module, (), inputs, path=folder / f"{WAYS[1]}.pt2")
    except SoapError as error:
        refused[WAYS[1]] = str(error)
    if not all(refused.values()):
        torch.save(eager(name), folder / EXPECTED)
    return refused


def _program(module: nn.Module, inputs: dict[str, Any]) -> torch.export.ExportedProgram:
    return torch.export.export(module, (), inputs, strict=False)


def main() -> None:
    """Answer until there is nothing more to read."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        name, folder = json.loads(line)
        try:
            result = exported(name, Path(folder))
        except Exception as error:
            result = {"failed": f"{name}: {type(error).__name__}: {error}"}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
