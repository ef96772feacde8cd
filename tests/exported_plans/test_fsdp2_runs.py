"""The files for PyTorch's ``fully_shard`` train: two processes, compared with one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import soap
from soap.api.exported_plans import export_plan

PLANS = {"fsdp": (2, 2), "fsdp+selective": (1, 1), "zero1": (2, 1), "fsdp+recompute": (1, 3)}
"""Builtin strategies, into how many micro-batches, and how many modules are gathered ahead."""

SCRIPT = '''
import importlib, json, os, sys
import torch
import torch.distributed as dist
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


def made():
    torch.manual_seed(0)
    return Model(), torch.randn(8, 8)


def trained(plan):
    model, x = made()
    plan.parallelize(model, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = x.chunk(dist.get_world_size())[dist.get_rank()]
    for _ in range(2):
        plan.backward(model, [(part,) for part in mine.chunk(plan.MICRO_BATCHES)])
        optimizer.step()
        optimizer.zero_grad()
    return {name.replace("_checkpoint_wrapped_module.", ""): p.full_tensor().tolist() for name, p in model.named_parameters()}


def main():
    dist.init_process_group("gloo")
    found = {name: trained(importlib.import_module(name)) for name in sys.argv[1:]}
    if dist.get_rank() == 0:
        with open("out.json", "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # PyTorch keeps what fully_shard made, and so gloo's threads: one that drops a tensor while Python ends aborts
'''


@pytest.mark.slow
def test_the_files_train_like_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "script", raising=False)
    import script  # type: ignore[import-not-found]

    model, x = script.made()
    soap.export(model, (x,), path=tmp_path / "model.pt2")
    graph, cluster = soap.load(tmp_path / "model.pt2", plan_only=True).graph, soap.load_cluster("h100-2")
    files = {name: f"plan{number}" for number, name in enumerate(PLANS)}
    for name, (microbatches, prefetch) in PLANS.items():
        plan = replace(soap.classical(name, graph, cluster), microbatches=microbatches, prefetch=prefetch)
        found = export_plan(plan, graph, cluster, "fsdp2", nearest_only=True)
        assert found.comparison.equal
        assert f"\nPREFETCH = {prefetch}  #" in found.text and "MODULES = ('first', *LAYERS, 'last')" in found.text
        (tmp_path / f"{files[name]}.py").write_text(found.text)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "script.py", *files.values()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    for own in json.loads((tmp_path / "out.json").read_text()).values():
        assert own.keys() == dict(model.named_parameters()).keys()
        for key, value in model.named_parameters():
            torch.testing.assert_close(torch.tensor(own[key]), value.detach(), rtol=1e-5, atol=1e-6)
