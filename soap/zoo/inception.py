"""Inception-v3 (Szegedy 2015) without the auxiliary head: parallel branches of factorized convolutions, joined along the channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from soap.zoo.blocks import Classifier, ConvNorm
from soap.zoo.recipe import Recipe, labelled_images

Conv = partial(ConvNorm, eps=1e-3)


@dataclass(frozen=True)
class InceptionConfig:
    """Sizes; the defaults are those of the publication.

    ``thin`` divides all channel counts. ``pooled``: channels of the pooled branch of each 35x35 module; ``inner``: inner channels of
    each 17x17 module; ``wide``: number of 8x8 modules.
    """

    image: int = 299
    thin: int = 1
    pooled: tuple[int, ...] = (32, 64, 64)
    inner: tuple[int, ...] = (128, 160, 160, 192)
    wide: int = 2
    classes: int = 1000
    dropout: float = 0.5


class Branches(nn.Module):
    """Applies every branch to the same input and joins the results along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, inputs: Tensor) -> Tensor:
        """The branches' outputs in order, one after the other along dimension 1."""
        return torch.cat([branch(inputs) for branch in self.branches], dim=1)


def _stem(thin: int) -> tuple[list[nn.Module], int]:
    """First convolutions and the number of channels after them."""
    c32, c64, c80, c192 = (n // thin for n in (32, 64, 80, 192))
    layers = [
        Conv(3, c32, 3, stride=2), Conv(c32, c32, 3), Conv(c32, c64, 3, padding=1), nn.MaxPool2d(3, 2),
        Conv(c64, c80, 1), Conv(c80, c192, 3), nn.MaxPool2d(3, 2),
    ]  # fmt: skip
    return layers, c192


def _pooled(channels: int, out: int) -> nn.Sequential:
    """Average pooling of the same size, then a 1x1 convolution."""
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Conv(channels, out, 1))


def _module_35(channels: int, thin: int, pooled: int) -> tuple[nn.Module, int]:
    """1x1, 5x5, double 3x3 and pooled branches."""
    c48, c64, c96, out = 48 // thin, 64 // thin, 96 // thin, pooled // thin
    block = Branches(
        Conv(channels, c64, 1),
        nn.Sequential(Conv(channels, c48, 1), Conv(c48, c64, 5, padding=2)),
        nn.Sequential(Conv(channels, c64, 1), Conv(c64, c96, 3, padding=1), Conv(c96, c96, 3, padding=1)),
        _pooled(channels, out),
    )
    return block, 2 * c64 + c96 + out


def _reduce_35(channels: int, thin: int) -> tuple[nn.Module, int]:
    """Halves the 35x35 maps."""
    c64, c96, c384 = 64 // thin, 96 // thin, 384 // thin
    block = Branches(
        Conv(channels, c384, 3, stride=2),
        nn.Sequential(Conv(channels, c64, 1), Conv(c64, c96, 3, padding=1), Conv(c96, c96, 3, stride=2)),
        nn.MaxPool2d(3, 2),
    )
    return block, c384 + c96 + channels


def _rows_and_columns(inner: int, sizes: Sequence[tuple[int, int]]) -> list[nn.Module]:
    """Alternating 1x7 and 7x1 convolutions that keep the map's size."""
    return [Conv(a, b, (1, 7) if i % 2 == 0 else (7, 1), padding=(0, 3) if i % 2 == 0 else (3, 0)) for i, (a, b) in enumerate(sizes)]


def _module_17(channels: int, thin: int, inner: int) -> tuple[nn.Module, int]:
    """1x1, factorized 7x7, double factorized 7x7 and pooled branches."""
    c, c192 = inner // thin, 192 // thin
    double = _rows_and_columns(c, [(c, c), (c, c), (c, c), (c, c192)])
    block = Branches(
        Conv(channels, c192, 1),
        nn.Sequential(Conv(channels, c, 1), *_rows_and_columns(c, [(c, c), (c, c192)])),
        nn.Sequential(Conv(channels, c, 1), *double),
        _pooled(channels, c192),
    )
    return block, 4 * c192


def _reduce_17(channels: int, thin: int) -> tuple[nn.Module, int]:
    """Halves the 17x17 maps."""
    c192, c320 = 192 // thin, 320 // thin
    factorized = _rows_and_columns(c192, [(c192, c192), (c192, c192)])
    block = Branches(
        nn.Sequential(Conv(channels, c192, 1), Conv(c192, c320, 3, stride=2)),
        nn.Sequential(Conv(channels, c192, 1), *factorized, Conv(c192, c192, 3, stride=2)),
        nn.MaxPool2d(3, 2),
    )
    return block, c320 + c192 + channels


def _module_8(channels: int, thin: int) -> tuple[nn.Module, int]:
    """Branches that fork once more into a row and a column convolution."""
    c192, c320, c384, c448 = 192 // thin, 320 // thin, 384 // thin, 448 // thin

    def fork() -> Branches:
        return Branches(Conv(c384, c384, (1, 3), padding=(0, 1)), Conv(c384, c384, (3, 1), padding=(1, 0)))

    block = Branches(
        Conv(channels, c320, 1),
        nn.Sequential(Conv(channels, c384, 1), fork()),
        nn.Sequential(Conv(channels, c448, 1), Conv(c448, c384, 3, padding=1), fork()),
        _pooled(channels, c192),
    )
    return block, c320 + 4 * c384 + c192


class InceptionV3(Classifier):
    """Image classifier; every convolution is followed by batch norm."""

    def __init__(self, config: InceptionConfig) -> None:
        super().__init__()
        thin = config.thin
        layers, channels = _stem(thin)
        makers: list[Callable[[int, int], tuple[nn.Module, int]]] = [
            *(partial(_module_35, pooled=pooled) for pooled in config.pooled),
            _reduce_35,
            *(partial(_module_17, inner=inner) for inner in config.inner),
            _reduce_17,
            *(_module_8 for _ in range(config.wide)),
        ]
        for make in makers:
            block, channels = make(channels, thin)
            layers.append(block)
        self.features = nn.Sequential(*layers)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(config.dropout)
        self.fc = nn.Linear(channels, config.classes)

    def logits(self, inputs: Tensor) -> Tensor:
        """Class scores of images."""
        features = self.dropout(self.average(self.features(inputs)))
        scores: Tensor = self.fc(torch.flatten(features, 1))
        return scores


def _recipe(config: InceptionConfig, batch: int) -> Recipe:
    return Recipe(partial(InceptionV3, config), partial(labelled_images, size=config.image, classes=config.classes), batch)


_TINY = InceptionConfig(image=107, thin=16, pooled=(32,), inner=(128,), wide=1, classes=10, dropout=0.0)

RECIPES = {"inception_v3": _recipe(InceptionConfig(), 64), "inception_v3:tiny": _recipe(_TINY, 8)}
