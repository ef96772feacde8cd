"""Twelve small models of as many kinds (two to four layers, 192 to 256 wide), which nobody has tuned SOAP for: most from the
``transformers`` library, which brings their losses, the rest written down here or in ``benchmarks.models``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soap
from benchmarks.models import make_model

WORDS, LENGTH, TEXTS, IMAGES, CLASSES = 2000, 64, 16, 16, 10

Built = tuple[nn.Module, dict[str, Tensor]]
"""A module whose output has a ``loss``, and its batch by name."""


def gpt2() -> Built:
    """Decoder: 3 layers, 256 wide."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 256, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=WORDS, use_cache=False, bos_token_id=1, eos_token_id=2)), text()


def t5() -> Built:
    """Encoder and decoder: 2 layers each, 256 wide."""
    from transformers import T5Config, T5ForConditionalGeneration

    ends = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    config = T5Config(d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4, vocab_size=WORDS, use_cache=False, **ends)
    return T5ForConditionalGeneration(config), text()


def vit() -> Built:
    """Vision transformer: 3 layers, 192 wide."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 3}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=CLASSES)), images(64)


def convnext() -> Built:
    """Depthwise convolutions: 2 layers of 192, 2 of 256 channels."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[192, 256], depths=[2, 2], num_stages=2, num_labels=CLASSES, drop_path_rate=0.0)
    return ConvNextForImageClassification(config), images(64)


def bert() -> Built:
    """Encoder: 3 layers, 256 wide."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=WORDS, max_position_embeddings=LENGTH)), text()


def llama() -> Built:
    """Decoder with rotary positions and gated layers: 3 layers, 192 wide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=WORDS, use_cache=False)), text()


def text() -> dict[str, Tensor]:
    """Drawn token ids, which are their own labels."""
    words = torch.randint(3, WORDS, (TEXTS, LENGTH))
    return {"input_ids": words, "labels": words.clone()}


def images(side: int) -> dict[str, Tensor]:
    """Drawn images with labels."""
    return {"pixel_values": torch.randn(IMAGES, 3, side, side), "labels": torch.randint(0, CLASSES, (IMAGES,))}


def whisper() -> Built:
    """Sound to text: convolutions, then encoder and decoder, 2 layers each, 192 wide."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 192, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    wide = {"encoder_ffn_dim": 768, "decoder_ffn_dim": 768, "num_mel_bins": 40, "max_source_positions": 64, "max_target_positions": LENGTH}
    config = WhisperConfig(**sizes, **ends, **wide, vocab_size=WORDS, use_cache=False)
    batch = {"input_features": torch.randn(TEXTS, 40, 128), "labels": torch.randint(3, WORDS, (TEXTS, 32))}
    return WhisperForConditionalGeneration(config), batch


def mixtral() -> Built:
    """Decoder with 4 experts, 2 of them for each word: 2 layers, 192 wide."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **experts, vocab_size=WORDS, use_cache=False)), text()


class UNet(nn.Module):
    """A diffusion model's denoiser: two scales of residual convolutions with group norms, which are told the time step."""

    def __init__(self, width: int = 64, times: int = 1000) -> None:
        super().__init__()
        self.time = nn.Embedding(times, 2 * width)
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([_Residual(width, width, 2 * width), _Residual(width, 2 * width, 2 * width)])
        self.middle = _Residual(2 * width, 2 * width, 2 * width)
        self.up = nn.ModuleList([_Residual(4 * width, width, 2 * width), _Residual(2 * width, width, 2 * width)])
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """Mean squared error of the predicted noise. [samples, 3, side, side] twice, [samples]."""
        when = self.time(times)
        fine = self.down[0](self.first(images + noise), when)
        coarse = self.down[1](F.avg_pool2d(fine, 2), when)
        inner = self.middle(F.avg_pool2d(coarse, 2), when)
        inner = self.up[0](torch.cat([F.interpolate(inner, scale_factor=2.0, mode="nearest"), coarse], 1), when)
        inner = self.up[1](torch.cat([F.interpolate(inner, scale_factor=2.0, mode="nearest"), fine], 1), when)
        return F.mse_loss(self.last(inner), noise)


class _Residual(nn.Module):
    def __init__(self, channels: int, made: int, told: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, channels), nn.GroupNorm(8, made)])
        self.convolutions = nn.ModuleList([nn.Conv2d(channels, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)])
        self.told, self.around = nn.Linear(told, made), nn.Conv2d(channels, made, 1)

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        inner = self.convolutions[0](F.silu(self.norms[0](x))) + self.told(when)[:, :, None, None]
        return self.around(x) + self.convolutions[1](F.silu(self.norms[1](inner)))


class StateSpace(nn.Module):
    """A state-space language model: each layer convolves with the response of diagonal linear recurrences, by Fourier transforms (S4D:
    Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models", 2022)."""

    def __init__(self, width: int = 256, layers: int = 2, states: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.mixes = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.decay = nn.ParameterList(nn.Parameter(torch.rand(width, states)) for _ in range(layers))
        self.gain = nn.ParameterList(nn.Parameter(torch.randn(width, states) / states) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy. [samples, length] twice."""
        x, length = self.embedding(words), words.shape[1]
        steps = torch.arange(length, device=words.device, dtype=x.dtype)
        for norm, mix, decay, gain in zip(self.norms, self.mixes, self.decay, self.gain, strict=True):
            response = (gain[:, :, None] * torch.exp(-F.softplus(decay)[:, :, None] * steps)).sum(1)
            inner = norm(x).transpose(1, 2)
            seen = torch.fft.irfft(torch.fft.rfft(inner, n=2 * length) * torch.fft.rfft(response, n=2 * length), n=2 * length)
            value, gate = mix(seen[..., :length].transpose(1, 2)).chunk(2, -1)
            x = x + value * torch.sigmoid(gate)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def unet() -> Built:
    """A denoiser of 32 x 32 pictures."""
    pictures = {"images": torch.randn(IMAGES, 3, 32, 32), "noise": torch.randn(IMAGES, 3, 32, 32)}
    return UNet(), {**pictures, "times": torch.randint(0, 1000, (IMAGES,))}


def ssm() -> Built:
    """2 layers, 256 wide."""
    words = torch.randint(3, WORDS, (TEXTS, LENGTH))
    return StateSpace(), {"words": words, "labels": words.roll(-1, 1)}


@dataclass(frozen=True)
class Small:
    """A model in training mode, its batch, by place and by name, and what makes the loss of its output (None: it is the output)."""

    module: nn.Module
    args: tuple[Tensor, ...]
    inputs: Mapping[str, Tensor]
    loss: Callable[[Any], Tensor] | None


def make_small(name: str) -> Small:
    """The model of this name; the same weights and example batch every time."""
    torch.manual_seed(0)
    if name in BY_PLACE:
        module, args = make_model(BY_PLACE[name])
        return Small(module.train(), args, {}, None)
    module, inputs = MODELS[name]()
    loss = None if isinstance(module, UNet | StateSpace) else (lambda output: output.loss)
    return Small(module.train(), (), inputs, loss)


def export_small(name: str, folder: Path) -> Path:
    """Write the model of this name to ``folder``."""
    small = make_small(name)
    path = folder / f"{name}.pt2"
    soap.export(small.module, small.args, small.inputs, path=path, loss=small.loss)
    return path


MODELS: Mapping[str, Callable[[], Built]] = {
    build.__name__: build for build in (gpt2, t5, vit, convnext, bert, llama, whisper, mixtral, unet, ssm)
}
BY_PLACE = {"dlrm": "emulated-dlrm", "lstm": "emulated-rnnlm"}
"""Names of ``benchmarks.models``."""
NAMES = (*MODELS, *BY_PLACE)
