"""RedSync's clusters, simulated: what compressing gradients gains over all-reducing them, and where a step's time goes.

    python -m benchmarks.redsync --write docs/results/redsync.md
    python -m benchmarks.redsync --nets alexnet --devices 2 4

Fang, Fu, Yang and Hsieh, "RedSync: Reducing Synchronization Bandwidth for Distributed Deep Learning Training System", JPDC 2019. Costs are
estimates (data sheets of the presets ``piz-daint-N`` and ``muradin``); nothing is fitted to the paper. Each device has as many samples as
there. All parameters that the policy compresses are compressed at a thousandth, also where that does not pay.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import soap
from benchmarks.pages import give
from soap import api
from soap.cli.options import positive
from soap.model.graph import OperatorGraph
from soap.search.lossy import lossy_starts
from soap.simulator.simulate import Simulation
from soap.simulator.tasks import TaskKind
from soap.strategy.compression import Compression, Rgc, RgcAsq
from soap.zoo.blocks import Classifier
from soap.zoo.recurrent import LanguageModel, RecurrentConfig

DEVICES = (2, 4, 8, 16, 32, 64)
"""Of Piz Daint, one in a host."""
MURADIN = 8
METHODS: tuple[Compression, ...] = (Rgc(), RgcAsq())
PAPER = {
    "alexnet": "about 3x at 4 to 16 GPUs", "vgg16": "about 2x at 4 to 64", "lstm": "about 3x at 2 to 16", "resnet50": "at most 1.2x",
}  # fmt: skip
"""What the text says of its Figures."""
SAMPLES = {"alexnet": 64, "vgg16": 32, "resnet50": 32, "lstm": 5}
"""Of a device."""


class Vgg16(Classifier):
    """VGG-16 (Simonyan and Zisserman, 2014): thirteen convolutions, three dense layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(count):
                layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
                before = channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        hidden = (nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout())
        self.classifier = nn.Sequential(*hidden, nn.Linear(4096, 1000))

    def logits(self, inputs: Tensor) -> Tensor:
        """Class scores of images."""
        scores: Tensor = self.classifier(torch.flatten(self.features(inputs), 1))
        return scores


def _vgg16(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Vgg16(), (torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,)))


def _lstm(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Two layers of 1,500 on the Penn Treebank's vocabulary, 35 steps."""
    config = RecurrentConfig(vocabulary=10_000, width=1500, layers=2, steps=35, chunk=35, outputs=10_000)
    words = torch.randint(config.vocabulary, (batch, config.steps))
    return LanguageModel(config), (words, words.clone())


BUILDERS: dict[str, Callable[[int], tuple[nn.Module, tuple[Tensor, ...]]]] = {"vgg16": _vgg16, "lstm": _lstm}


def graph_of(net: str, batch: int) -> OperatorGraph:
    """The operators of a net for this global batch, on the meta device."""
    if net not in BUILDERS:
        return soap.load(f"zoo:{net}@{batch}", plan_only=True, batch_norm="local").graph
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{net}.pt2"
        with torch.device("meta"):
            module, inputs = BUILDERS[net](batch)
            soap.export(module.train(), inputs, path=path, verify=False)
        return soap.load(path, plan_only=True).graph


@dataclass(frozen=True)
class Cell:
    """A net on so many devices. ``rivals``: by method. ``shares``: of RGC's step: select, send (on the busiest link), restore, update."""

    net: str
    devices: int
    dense_ns: int
    rivals: tuple[int, ...]
    shares: tuple[float, float, float, float]


def cell(net: str, cluster: str) -> Cell:
    """Simulate a net by data parallelism, and with all that each method's policy compresses."""
    topology = soap.load_cluster(cluster)
    graph = graph_of(net, SAMPLES[net] * topology.device_count)
    simulator = api.simulator_for(graph, topology, optimizer_states=0, costs="estimate")
    usual = api.classical("data_parallel", graph, topology)
    dense = simulator.predict(usual).makespan_ns
    found = [simulator.run(lossy_starts(graph, usual, [method]).popitem()[1]) for method in METHODS]
    return Cell(net, topology.device_count, dense, tuple(own.makespan_ns for own in found), shares(found[0]))


def shares(simulation: Simulation) -> tuple[float, float, float, float]:
    """Parts of a step: of the first device's time selecting, restoring and updating; and of its links' time for what is compressed. They
    may overlap with the backward pass."""
    spent = dict.fromkeys(("select", "send", "restore", "update"), 0)
    for task in simulation.tasks.tasks:
        word = task.name.partition(" ")[0]
        if task.kind is TaskKind.COMPRESS and task.resources == (0,):
            spent["restore" if word == "restore" else "select"] += task.duration_ns
        elif task.kind is TaskKind.SYNC and word in ("sync", "spread") and task.flows:
            spent["send"] += task.duration_ns
        elif task.kind is TaskKind.UPDATE and task.resources == (0,):
            spent["update"] += task.duration_ns
    select, send, restore, update = (own / simulation.makespan_ns for own in spent.values())
    return select, send, restore, update


def page(cells: Sequence[Cell], others: Sequence[Cell]) -> str:
    """The page as Markdown."""
    return "\n".join([*_head(), *_table(cells, "Piz Daint: a P100 in each host"), *_table(others, "Muradin: TITAN V in one host"), ""])


HEAD = """# RedSync's clusters, simulated

Written by `python -m benchmarks.redsync`. Fang et al., JPDC 2019, on the presets `piz-daint-N` (10 GB/s and 1 us to the
network, all paths free) and `muradin`. Every figure is a prediction from data sheets; none is fitted, and nothing was run on
such machines.

Speed-ups are over all-reduced gradients, in buckets behind the backward pass, at NCCL's prices. The paper's baseline is
Horovod of 2018; what of the network its sums reached is not known here. Compressed are all parameters that the policy names,
at a density of 0.1%, also where that does not pay: a search leaves those alone. All-gathers are priced as direct exchanges.
Shares are of RGC's step; selecting and sending overlap with the backward pass in part.

What the paper says, net by net, and nothing gained elsewhere:
"""
FOUND = """
Here the nets come in that order, too, but gain less: at these links NCCL hides nearly all sums of VGG-16 and ResNet-50
behind the backward pass, so that there compressing costs time. ASQ comes closer to RGC with more GPUs, and does not pass it
up to 64: half of the bytes are saved where selecting takes longer than sending.
"""


def _head() -> Iterator[str]:
    yield HEAD
    yield from (f"- {net}: {said}" for net, said in PAPER.items())
    yield "- ASQ loses to RGC for the LSTM below 16 GPUs"
    yield FOUND.rstrip()


def _table(cells: Sequence[Cell], title: str) -> Iterator[str]:
    yield ""
    yield f"## {title}"
    yield ""
    yield "| net | GPUs | dense | RGC | speed-up | ASQ's | select | send | restore | update |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for own in cells:
        rgc, asq = own.rivals
        parts = " | ".join(f"{share:.0%}" for share in own.shares)
        gains = f"{own.dense_ns / rgc:.2f} | {own.dense_ns / asq:.2f}"
        yield f"| {own.net} | {own.devices} | {own.dense_ns / 1e6:.1f} ms | {rgc / 1e6:.1f} ms | {gains} | {parts} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="RedSync's clusters, simulated.")
    parser.add_argument("--nets", nargs="+", choices=list(SAMPLES), default=list(SAMPLES))
    parser.add_argument("--devices", nargs="+", type=positive, default=list(DEVICES), metavar="N")
    parser.add_argument("--write", metavar="FILE", help="write the page there (default: print it)")
    args = parser.parse_args(argv)
    cells = [cell(net, f"piz-daint-{count}") for net in args.nets for count in args.devices]
    give(page(cells, [cell(net, "muradin") for net in args.nets]), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
