"""What ``benchmarks.convergence`` trains: small nets on data that packages ship, scikit-learn's digits and Python's own sources."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.oracles.compression import Training
from soap.errors import SoapError
from soap.runtime.compression.dgc import Momentum

Batch = tuple[Tensor, ...]
RANKS = 4
CHARACTERS = 97
"""Printable ASCII, the end of a line, and all else."""
LENGTH = 32
"""Characters of a sample."""
TEXT = 1_000_000
"""Characters in all."""
HELD_OUT = 360
"""Samples that are not trained with."""


@dataclass(frozen=True)
class Data:
    """``train``, ``test``: inputs and what is wanted of them, samples first."""

    train: Batch
    test: Batch


@dataclass(frozen=True)
class Task:
    """``make``: the net; its starting values are those of torch's seed. ``scores``: (net, samples) -> scores of classes, one row for each
    prediction, and the right classes. ``batch``: of all ranks together."""

    data: Callable[[], Data]
    make: Callable[[], nn.Module]
    scores: Callable[[nn.Module, Sequence[Tensor]], tuple[Tensor, Tensor]]
    training: Training
    batch: int
    steps: int

    def loss(self, module: nn.Module, samples: Sequence[Tensor]) -> Tensor:
        """Mean cross-entropy of all predictions."""
        return functional.cross_entropy(*self.scores(module, samples))

    def final(self, module: nn.Module, samples: Sequence[Tensor]) -> tuple[float, float]:
        """The same, and the share of predictions that are wrong."""
        with torch.no_grad():
            scores, wanted = self.scores(module, samples)
            return float(functional.cross_entropy(scores, wanted)), float((scores.argmax(1) != wanted).float().mean())


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers, for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.hidden, self.out = nn.Linear(32 * 16, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        images = functional.max_pool2d(self.second(self.first(images).relu()).relu(), 2)
        return self.out(self.hidden(images.flatten(1)).relu())  # type: ignore[no-any-return]


class CharacterLstm(nn.Module):
    """An LSTM of one layer over characters."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(CHARACTERS, width), nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.Linear(width, CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.rnn(self.encoder(tokens))[0])  # type: ignore[no-any-return]


@cache
def digits() -> Data:
    """scikit-learn's 1,797 digits. SoapError in one line if there is no scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SoapError("digits need scikit-learn, which is not installed; pip install scikit-learn, or name other --tasks") from None
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images, wanted = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16, torch.tensor(found.target)[order]
    return Data((images[HELD_OUT:], wanted[HELD_OUT:]), (images[:HELD_OUT], wanted[:HELD_OUT]))


@cache
def library_text() -> Data:
    """The top modules of Python's library, in the order of their names. Every tenth sample may be held out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))[:TEXT]
    codes = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()
    codes = torch.where(codes == ord("\n"), 95, torch.where((codes >= 32) & (codes < 127), codes - 32, 96))
    samples = codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    held = torch.arange(len(samples)) % 10 == 9
    return Data((samples[~held],), (samples[held][:HELD_OUT],))


def digit_scores(module: nn.Module, samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    images, wanted = samples
    return module(images), wanted


def next_characters(module: nn.Module, samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    (text,) = samples
    return module(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()


TASKS = {
    "digits": Task(digits, DigitsNet, digit_scores, Training(0.02, Momentum(0.9, nesterov=True)), 16, 1000),
    "lstm": Task(library_text, CharacterLstm, next_characters, Training(2.0, clip_norm=0.5), 32, 500),
}
"""With the optimizers of the paper: Nesterov's momentum for the convolutional net, SGD that clips for the LSTM."""
