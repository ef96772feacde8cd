"""A model of 3 GB trains on ranks that may have 2.3 GB each: what a rank loads is its parts, and never a whole copy of anything else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import get_rank

import soap
from soap.errors import SoapWarning
from soap.runtime.comm.launch import launch
from soap.runtime.comm.world import close_world, open_world
from soap.runtime.trainer import Trainer
from soap.strategy.config import Strategy
from soap.weights.fitting import Kind
from soap.weights.safetensors_files import write_weights
from tests.control_groups import Group, limited

pytest.importorskip("safetensors")
WIDTH, LAYERS, SAMPLES, RANKS = 8192, 11, 8, 4
WEIGHT_BYTES = 4 * WIDTH * WIDTH
LIMIT_BYTES, ALLOWED_BYTES = 2_300_000_000, 300_000_000


def chain() -> nn.Module:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    return nn.Sequential(*layers)


@contextmanager
def most_anonymous_bytes() -> Iterator[list[int]]:
    """What this process holds at most beyond what it held before, but for maps of files, which the kernel takes back at will."""
    before, found, over = _anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            found[0] = max(found[0], _anonymous_bytes() - before)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def trained(path: str, weights: str, strategy: Strategy, groups: Sequence[Group]) -> tuple[int, list[float]]:
    """On each rank: the most that loading took, and the losses of two steps, under the limit of its group."""
    cluster = soap.load_cluster(f"local:{RANKS}")
    world = open_world(RANKS, "cpu", "gloo")
    groups[get_rank()].enter()
    try:
        with most_anonymous_bytes() as loading:
            model = soap.load(path, weights=weights)
            trainer = Trainer(model, (strategy, cluster), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        with trainer:
            return loading[0], [trainer.step(*model.example_inputs) for _ in range(2)]
    finally:
        close_world(world)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ranks_load_their_parts_alone(tmp_path: Path) -> None:
    with soap.without_weights():
        module = chain()
    with pytest.warns(SoapWarning, match="has no values"):
        soap.export(module, (torch.randn(SAMPLES, WIDTH),), path=tmp_path / "m.pt2", loss=lambda output: output.square().mean())
    kinds = {name: Kind(tuple(tensor.shape), tensor.dtype) for name, tensor in module.state_dict().items()}
    (tmp_path / "w").mkdir()
    write_weights(tmp_path / "w", kinds, (torch.randn(kind.shape) / WIDTH**0.5 for kind in kinds.values()))
    assert (tmp_path / "w" / "model.safetensors").stat().st_size > LAYERS * WEIGHT_BYTES > LIMIT_BYTES
    graph = soap.load(tmp_path / "m.pt2", plan_only=True).graph
    strategy = soap.classical("megatron", graph, soap.load_cluster(f"local:{RANKS}"))
    with ExitStack() as made:
        groups = [made.enter_context(limited(LIMIT_BYTES)) for _ in range(RANKS)]
        found = launch(RANKS, trained, (str(tmp_path / "m.pt2"), str(tmp_path / "w"), strategy, groups))
    shards = LAYERS * WEIGHT_BYTES // RANKS
    loaded = [most for most, _ in found.values()]
    assert all(shards <= most <= shards + WEIGHT_BYTES + ALLOWED_BYTES for most in loaded), loaded
    losses = [own for _, own in found.values()]
    assert all(own == losses[0] for own in losses) and all(map(isfinite, losses[0])) and losses[0][1] < losses[0][0]
