"""Compressed training of small modules in one process: what parameters are, and that it learns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from benchmarks.oracles.compression import Emulation, Training, by_policy, layers_of
from soap.plan.compression.policy import Layer
from soap.runtime.compression.dgc import Momentum
from soap.strategy.compression import Bf16, Chunked, Compression, Int8, PowerSgd, Rgc, RgcAsq, parse


class Tied(nn.Module):
    """A language model whose encoder and decoder share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(300, 64), nn.LSTM(64, 64), nn.Linear(64, 300)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.rnn(self.encoder(tokens))[0])  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.out = nn.Conv2d(1, 8, 3), nn.Linear(8 * 36, 16), nn.Linear(16, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(self.conv(images).relu().flatten(1)).relu())  # type: ignore[no-any-return]


def test_layers_of_a_module() -> None:
    found = layers_of(Net())
    kinds = {name: layer.kind for name, layer in found.items() if name.endswith("weight")}
    assert kinds == {"conv.weight": "convolution", "hidden.weight": "hidden", "out.weight": "output"}
    assert found["conv.weight"] == Layer("convolution", (8, 1, 3, 3), 4)


def test_a_tied_encoder_is_an_output_layer() -> None:
    found = by_policy(Tied(), RgcAsq(0.01), least_bytes=1000)
    assert found["encoder.weight"] == Rgc(0.01, "sampled")
    assert found["rnn.weight_hh_l0"] == RgcAsq(0.01, "search")
    assert found["rnn.bias_hh_l0"] is None
    assert "decoder.weight" not in found


def loss(module: nn.Module, part: Sequence[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(module(part[0]), part[1])


def batch(step: int, ranks: int, samples: int = 48) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images with a bright quarter, whose number is to be told."""
    generator = torch.Generator().manual_seed(step)
    wanted = torch.randint(4, (samples,), generator=generator)
    images = torch.randn(samples, 1, 8, 8, generator=generator)
    for i, quarter in enumerate(wanted.tolist()):
        images[i, 0, 4 * (quarter // 2) : 4 * (quarter // 2) + 4, 4 * (quarter % 2) : 4 * (quarter % 2) + 4] += 1
    return list(zip(images.chunk(ranks), wanted.chunk(ranks), strict=True))


def trained(compression: Compression | None, steps: int = 40, ranks: int = 4) -> list[float]:
    torch.manual_seed(0)
    module = Net()
    chosen = {} if compression is None else by_policy(module, compression, least_bytes=0)
    emulation = Emulation(module, loss, chosen, ranks, Training(0.05, Momentum(0.9)))
    return [emulation.step(batch(step, ranks)) for step in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "compression",
    [Rgc(0.05), RgcAsq(0.05), Chunked(0.05), PowerSgd(2), Bf16(), Int8()],
    ids=lambda own: own.name,
)
def test_a_net_learns_with_compressed_gradients(compression: Compression) -> None:
    """Chance is 1.39; dense gradients come to below 0.1. Equal runs are equal to the bit."""
    losses = trained(compression)
    assert losses[0] == pytest.approx(trained(None, steps=1)[0], rel=1e-6)
    assert sum(losses[-5:]) / 5 < 0.5
    assert losses[:10] == trained(compression, steps=10)


def test_dense_gradients_do_so_too() -> None:
    assert sum(trained(None)[-5:]) / 5 < 0.2


def test_every_parameter_is_in_the_policys_answer() -> None:
    for word in ("rgc", "rgc+asq", "chunked", "powersgd", "bf16", "int8"):
        assert by_policy(Net(), parse(word)).keys() == dict(Net().named_parameters()).keys()
