"""What compression does to training: final losses of all methods beside dense gradients, from the single-process emulation of four ranks.

    python -m benchmarks.convergence lstm digits [--methods dense rgc …] [--seeds 3] [--steps N] [--density 0.01] [--batch 32]

Data that packages ship: scikit-learn's digits for a small convolutional net, Python's own sources for a character LSTM. All methods have
the dense run's learning rate, batches and starting values; nothing is tuned for them. "within": the mean over the seeds is no farther from
the dense one's than the dense runs are from each other.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from torch import nn
from torch.nn import functional

from benchmarks.pages import give
from soap.plan.compression.seam import Exchange
from soap.runtime.compression.dgc import Momentum, WarmUp
from soap.runtime.compression.oracle import Emulation, Training, by_policy
from soap.strategy.compression import Chunked, Compression, Rgc, RgcAsq, parse

METHODS = ("dense", "bf16", "int8", "powersgd", "rgc", "rgc+asq", "chunked")
RANKS = 4
LEAST_BYTES = 1024
"""The policy's lower limit here: these nets are small."""
Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Data:
    """``train``, ``test``: inputs and what is wanted of them, samples first."""

    train: Batch
    test: Batch


@dataclass(frozen=True)
class Task:
    """``make``: the net; its starting values are torch's seed's. ``loss`` is per sample or character."""

    data: Callable[[], Data]
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Sequence[torch.Tensor]], torch.Tensor]
    training: Training
    batch: int
    steps: int


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers, for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.hidden, self.out = nn.Linear(32 * 16, 64), nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = functional.max_pool2d(self.second(self.first(images).relu()).relu(), 2)
        return self.out(self.hidden(images.flatten(1)).relu())  # type: ignore[no-any-return]


CHARACTERS = 97
"""Printable ASCII, the end of a line, and all else."""
LENGTH = 48
"""Characters of a sample."""


class CharacterLstm(nn.Module):
    """An LSTM of one layer over characters."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(CHARACTERS, width), nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.Linear(width, CHARACTERS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.rnn(self.encoder(tokens))[0])  # type: ignore[no-any-return]


def digits() -> Data:
    """scikit-learn's 1,797 digits, 360 of them held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images, wanted = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16, torch.tensor(found.target)[order]
    return Data((images[360:], wanted[360:]), (images[:360], wanted[:360]))


def library_text() -> Data:
    """Python's own sources: of each of its top modules, in the order of their names, a tenth held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))[:2_000_000]
    codes = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()
    codes = torch.where(codes == 10, 95, torch.where((codes >= 32) & (codes < 127), codes - 32, 96))
    samples = codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    held = torch.arange(len(samples)) % 10 == 9
    return Data((samples[~held],), (samples[held][:512],))


def digits_loss(module: nn.Module, part: Sequence[torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(module(part[0]), part[1])


def text_loss(module: nn.Module, part: Sequence[torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(module(part[0][:, :-1]).flatten(0, 1), part[0][:, 1:].flatten())


TASKS = {
    "digits": Task(digits, DigitsNet, digits_loss, Training(0.02, Momentum(0.9, nesterov=True)), 32, 450),
    "lstm": Task(library_text, CharacterLstm, text_loss, Training(2.0, clip_norm=0.5), 32, 600),
}


@dataclass(frozen=True)
class Run:
    """``losses``: of each step. ``loss``: of held-out data at the end. ``share``: bytes on the wire, of dense gradients'."""

    task: str
    method: str
    seed: int
    loss: float
    share: float
    losses: tuple[float, ...]


def run(name: str, task: Task, data: Data, method: str, seed: int, density: float | None) -> Run:
    """One training."""
    torch.manual_seed(seed)
    module = task.make()
    compression = None if method == "dense" else parse(method)
    if density is not None and isinstance(compression, Rgc | RgcAsq | Chunked):
        compression = replace(compression, density=density)
    chosen = {} if compression is None else by_policy(module, compression, LEAST_BYTES)
    emulation = Emulation(module, task.loss, chosen, RANKS, task.training)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(task.steps):
        picked = torch.randint(len(data.train[0]), (task.batch,), generator=generator)
        losses.append(emulation.step(list(zip(*(tensor[picked].chunk(RANKS) for tensor in data.train), strict=True))))
    with torch.no_grad():
        final = float(task.loss(module, data.test))
    return Run(name, method, seed, final, wire_share(module, chosen), tuple(losses))


def wire_share(module: nn.Module, chosen: dict[str, Compression | None]) -> float:
    """Bytes that a rank sends in a step, of those of all-reduces."""
    from soap.plan.compression.seam import layout_of

    dense = sent = 0
    for name, tensor in module.named_parameters():
        whole, own = Exchange("sum", tensor.nbytes).sent_bytes(RANKS), chosen.get(name)
        dense += whole
        sent += whole if own is None else layout_of(own, tuple(tensor.shape), tensor.element_size(), RANKS).sent_bytes
    return sent / dense


def table(runs: Sequence[Run]) -> str:
    """One line a task and method."""
    lines = ["| task | method | bytes | held-out loss | seeds | within |", "|---|---|---|---|---|---|"]
    for task in dict.fromkeys(own.task for own in runs):
        by_method = {m: [own for own in runs if (own.task, own.method) == (task, m)] for m in dict.fromkeys(own.method for own in runs)}
        dense = [own.loss for own in by_method.get("dense", ())]
        for method, own in by_method.items():
            losses = [each.loss for each in own]
            if not losses:
                continue
            within = "" if not dense else "yes" if abs(mean(losses) - mean(dense)) <= max(dense) - min(dense) else "no"
            within = "no, lower" if within == "no" and mean(losses) < mean(dense) else within
            seeds = ", ".join(f"{loss:.3f}" for loss in losses)
            lines.append(f"| {task} | {method} | {own[0].share:.1%} | {mean(losses):.3f} | {seeds} | {within} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="convergence", description="Losses with compressed gradients.")
    parser.add_argument("tasks", nargs="*", choices=[[], *TASKS], default=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD", help="dense, or as parse() takes them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="default: the task's")
    parser.add_argument("--batch", type=int, help="default: the task's")
    parser.add_argument("--density", type=float, help="default: the method's")
    parser.add_argument("--dense-steps", type=int, default=0, help="warm-up: so many dense steps")
    parser.add_argument("--stage-steps", type=int, default=0, help="warm-up: so many steps at each falling density")
    parser.add_argument("--losses", metavar="FILE", type=Path, help="append every run's losses, as lines of JSON")
    parser.add_argument("--write", metavar="FILE", type=Path, help="instead of printing")
    args = parser.parse_args(argv)
    runs = []
    for name in args.tasks:
        task = TASKS[name]
        training = replace(task.training, warm_up=WarmUp(args.dense_steps, args.stage_steps))
        task = replace(task, training=training, steps=args.steps or task.steps, batch=args.batch or task.batch)
        try:
            data = task.data()
        except ImportError as error:
            print(f"{name} is left out: {error}; install scikit-learn", file=sys.stderr)
            continue
        for method in args.methods:
            for seed in range(args.seeds):
                begin = time.perf_counter()
                runs.append(run(name, task, data, method, seed, args.density))
                took = time.perf_counter() - begin
                print(f"{name} {method} {seed}: {runs[-1].loss:.4f} in {took:.0f} s", file=sys.stderr, flush=True)
                if args.losses:
                    with args.losses.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(runs[-1])) + "\n")
    give(table(runs), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
