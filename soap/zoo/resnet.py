"""Residual networks with bottleneck blocks (He 2015); the 3x3 convolution carries the stride, as in common practice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soap.zoo.blocks import Classifier, ConvNorm
from soap.zoo.recipe import Recipe, labelled_images

EXPANSION = 4
"""Output channels of a bottleneck block per inner channel."""


@dataclass(frozen=True)
class ResNetConfig:
    """Blocks per stage and sizes; ``width`` is the number of inner channels of the first stage, doubled in each further one."""

    blocks: tuple[int, int, int, int]
    image: int = 224
    width: int = 64
    classes: int = 1000


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = inner * EXPANSION
        self.reduce = ConvNorm(channels, inner, 1)
        self.spatial = ConvNorm(inner, inner, 3, stride=stride, padding=1)
        self.expand = ConvNorm(inner, out, 1, activation=False)
        same = channels == out and stride == 1
        self.shortcut = None if same else ConvNorm(channels, out, 1, stride=stride, activation=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """The block's output, with the shortcut added before the last activation."""
        residual: Tensor = self.expand(self.spatial(self.reduce(inputs)))
        return F.relu(residual + (inputs if self.shortcut is None else self.shortcut(inputs)))


class ResNet(Classifier):
    """Image classifier of four stages."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.stem = ConvNorm(3, config.width, 7, stride=2, padding=3)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        stages, channels = [], config.width
        for i, count in enumerate(config.blocks):
            inner = config.width << i
            first = Bottleneck(channels, inner, stride=1 if i == 0 else 2)
            channels = inner * EXPANSION
            stages.append(nn.Sequential(first, *(Bottleneck(channels, inner, 1) for _ in range(count - 1))))
        self.stages = nn.Sequential(*stages)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, config.classes)

    def logits(self, inputs: Tensor) -> Tensor:
        """Class scores of images."""
        features = self.average(self.stages(self.pool(self.stem(inputs))))
        scores: Tensor = self.fc(torch.flatten(features, 1))
        return scores


def _recipe(config: ResNetConfig, batch: int) -> Recipe:
    return Recipe(partial(ResNet, config), partial(labelled_images, size=config.image, classes=config.classes), batch)


RECIPES = {
    "resnet50": _recipe(ResNetConfig((3, 4, 6, 3)), 64),
    "resnet50:tiny": _recipe(ResNetConfig((1, 1, 1, 1), image=36, width=8, classes=10), 8),
    "resnet101": _recipe(ResNetConfig((3, 4, 23, 3)), 64),
    "resnet101:tiny": _recipe(ResNetConfig((1, 1, 2, 1), image=36, width=8, classes=10), 8),
    "resnet152": _recipe(ResNetConfig((3, 8, 36, 3)), 64),
    "resnet152:tiny": _recipe(ResNetConfig((1, 2, 2, 1), image=36, width=8, classes=10), 8),
}
