"""AlexNet (Krizhevsky 2014, the one-column variant): five convolutions, three dense layers that hold most of the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from soap.zoo.blocks import Classifier
from soap.zoo.recipe import Recipe, labelled_images


@dataclass(frozen=True)
class AlexNetConfig:
    """Sizes; the defaults are those of the publication."""

    image: int = 224
    channels: tuple[int, int, int, int, int] = (64, 192, 384, 256, 256)
    hidden: int = 4096
    classes: int = 1000
    dropout: float = 0.5


def _features(channels: tuple[int, int, int, int, int]) -> nn.Sequential:
    """Convolutions and poolings."""
    c1, c2, c3, c4, c5 = channels
    return nn.Sequential(
        nn.Conv2d(3, c1, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(c1, c2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(c2, c3, 3, padding=1), nn.ReLU(),
        nn.Conv2d(c3, c4, 3, padding=1), nn.ReLU(),
        nn.Conv2d(c4, c5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
    )  # fmt: skip


class AlexNet(Classifier):
    """Image classifier without local response normalization."""

    def __init__(self, config: AlexNetConfig) -> None:
        super().__init__()
        self.features = _features(config.channels)
        side = _side_after_features(config.image)
        self.classifier = nn.Sequential(
            nn.Dropout(config.dropout),
            nn.Linear(config.channels[-1] * side * side, config.hidden),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(),
            nn.Linear(config.hidden, config.classes),
        )

    def logits(self, inputs: Tensor) -> Tensor:
        """Class scores of images."""
        scores: Tensor = self.classifier(torch.flatten(self.features(inputs), 1))
        return scores


def _side_after_features(image: int) -> int:
    """Height of the feature map that the dense layers see."""
    side = (image + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side


def _recipe(config: AlexNetConfig, batch: int) -> Recipe:
    return Recipe(partial(AlexNet, config), partial(labelled_images, size=config.image, classes=config.classes), batch)


RECIPES = {
    "alexnet": _recipe(AlexNetConfig(), 256),
    "alexnet:tiny": _recipe(AlexNetConfig(image=96, channels=(4, 12, 24, 16, 16), hidden=64, classes=10, dropout=0.0), 8),
}
