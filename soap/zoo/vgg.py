"""VGG (Simonyan 2014, configurations D and E): 3x3 convolutions in five stages, three dense layers that hold most of the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from soap.zoo.blocks import Classifier
from soap.zoo.recipe import Recipe, labelled_images

Stages = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class VGGConfig:
    """Convolutions of each stage, and sizes. ``image``: a multiple of 32, as each stage ends with a pooling."""

    convolutions: Stages
    image: int = 224
    channels: Stages = (64, 128, 256, 512, 512)
    hidden: int = 4096
    classes: int = 1000
    dropout: float = 0.5


def _features(config: VGGConfig) -> nn.Sequential:
    """Convolutions and poolings."""
    layers: list[nn.Module] = []
    before = 3
    for count, channels in zip(config.convolutions, config.channels, strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            before = channels
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


class VGG(Classifier):
    """Image classifier without normalization."""

    def __init__(self, config: VGGConfig) -> None:
        super().__init__()
        self.features = _features(config)
        side = config.image // 32
        self.classifier = nn.Sequential(
            nn.Linear(config.channels[-1] * side * side, config.hidden),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.classes),
        )

    def logits(self, inputs: Tensor) -> Tensor:
        """Class scores of images."""
        scores: Tensor = self.classifier(torch.flatten(self.features(inputs), 1))
        return scores


def _recipe(config: VGGConfig, batch: int) -> Recipe:
    return Recipe(partial(VGG, config), partial(labelled_images, size=config.image, classes=config.classes), batch)


def _tiny(convolutions: Stages) -> Recipe:
    return _recipe(VGGConfig(convolutions, image=64, channels=(4, 8, 8, 12, 12), hidden=32, classes=10, dropout=0.0), 8)


RECIPES = {
    "vgg16": _recipe(VGGConfig((2, 2, 3, 3, 3)), 64),
    "vgg16:tiny": _tiny((1, 1, 1, 1, 2)),
    "vgg19": _recipe(VGGConfig((2, 2, 4, 4, 4)), 64),
    "vgg19:tiny": _tiny((1, 1, 1, 2, 2)),
}
