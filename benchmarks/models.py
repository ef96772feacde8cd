"""The zoo's models in sizes whose training step takes 50 to 500 ms on two cores: large enough to time, small enough to wait for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import soap
from benchmarks.convergence_tasks import TASKS, Task
from soap.zoo.alexnet import AlexNet, AlexNetConfig
from soap.zoo.dlrm import DLRM, DLRMConfig
from soap.zoo.gpt import GPT, GPTConfig
from soap.zoo.nmt import Translator, TranslatorConfig
from soap.zoo.recipe import labelled_images, tokens
from soap.zoo.recurrent import LanguageModel, RecurrentConfig
from soap.zoo.resnet import ResNet, ResNetConfig
from soap.zoo.vgg import VGG, VGGConfig

Made = tuple[nn.Module, tuple[Tensor, ...]]


def export_model(name: str, folder: Path) -> Path:
    """Write the model of this name to ``folder``; the same weights and example batch every time."""
    torch.manual_seed(0)
    module, args = make_model(name)
    path = folder / f"{name}.pt2"
    soap.export(module, args, path=path)
    return path


def make_model(name: str) -> Made:
    """The model of this name with an example batch, drawn from torch's generator."""
    return {**MODELS, **RUNTIME_MODELS, **EMULATED_MODELS, **COMPRESSED_MODELS, **TASK_MODELS}[name]()


def _text(batch: int, length: int, vocabulary: int) -> tuple[Tensor, ...]:
    text = tokens(batch, length + 1, vocabulary)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _recurrent(vocabulary: int, width: int, steps: int, chunk: int, batch: int) -> Made:
    config = RecurrentConfig(vocabulary=vocabulary, width=width, layers=2, steps=steps, chunk=chunk, outputs=vocabulary)
    return LanguageModel(config), _text(batch, steps, vocabulary)


def _gpt(vocabulary: int, context: int, width: int, layers: int, batch: int, heads: int = 4, dropout: float = 0.0) -> Made:
    config = GPTConfig(vocabulary=vocabulary, context=context, width=width, heads=heads, layers=layers, dropout=dropout)
    return GPT(config), _text(batch, context, vocabulary)


class Llama(nn.Module):
    """A Llama of ``transformers`` with its loss."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "num_attention_heads": heads}
        self.causal = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=heads // 2, vocab_size=vocabulary, use_cache=False))

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of the next words."""
        loss: Tensor = self.causal(input_ids=words, labels=labels).loss
        return loss


def _llama(vocabulary: int, context: int, width: int, layers: int, batch: int, heads: int = 8) -> Made:
    words = tokens(batch, context, vocabulary)
    return Llama(vocabulary, width, layers, heads), (words, words.clone())


def _nmt(vocabulary: int, width: int, steps: int, batch: int) -> Made:
    config = TranslatorConfig(vocabulary=vocabulary, width=width, source_steps=steps, target_steps=steps)
    source, (target, labels) = tokens(batch, steps, vocabulary), _text(batch, steps, vocabulary)
    return Translator(config), (source, target, labels)


def _dlrm(batch: int, largest: int = 400_000) -> Made:
    rows = (largest, largest // 2, largest // 4, 5000, 100, 20)
    config = DLRMConfig(rows=rows, bottom=(13, 512, 256, 64), top=(512, 256, 1))
    categories = torch.stack([torch.randint(rows, (batch,)) for rows in config.rows], dim=1)
    return DLRM(config), (torch.rand(batch, config.bottom[0]), categories, torch.randint(2, (batch,)).float())


def _alexnet(batch: int) -> Made:
    config = AlexNetConfig(hidden=1024, classes=100)
    return AlexNet(config), labelled_images(batch, config.image, config.classes)


def _small_alexnet(batch: int) -> Made:
    config = AlexNetConfig(image=127, channels=(32, 64, 96, 64, 64), hidden=1024, classes=100, dropout=0.0)
    return AlexNet(config), labelled_images(batch, config.image, config.classes)


def _small_vgg16(batch: int) -> Made:
    config = VGGConfig((2, 2, 3, 3, 3), image=64, channels=(16, 32, 64, 64, 64), hidden=1024, classes=100, dropout=0.0)
    return VGG(config), labelled_images(batch, config.image, config.classes)


class _TaskModel(nn.Module):
    """A net of ``convergence_tasks`` with its loss."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.net, self._loss = task.make(), task.loss

    def forward(self, *samples: Tensor) -> Tensor:
        return self._loss(self.net, samples)


def _task(name: str) -> Made:
    task = TASKS[name]
    return _TaskModel(task), tuple(tensor[: task.batch].clone() for tensor in task.data().train)


def _resnet50(image: int, batch: int, width: int = 64) -> Made:
    config = ResNetConfig((3, 4, 6, 3), image=image, width=width, classes=100)
    return ResNet(config), labelled_images(batch, config.image, config.classes)


MODELS: dict[str, Callable[[], Made]] = {
    "lm": partial(_recurrent, vocabulary=24_000, width=512, steps=8, chunk=8, batch=16),
    "rnnlm": partial(_recurrent, vocabulary=4000, width=512, steps=24, chunk=8, batch=16),
    "gpt-wide": partial(_gpt, vocabulary=2000, context=32, width=512, layers=3, batch=4),
    "gpt-long": partial(_gpt, vocabulary=2000, context=256, width=192, layers=4, batch=4),
    "dlrm": partial(_dlrm, batch=512),
    "alexnet": partial(_alexnet, batch=8),
}
"""lm, dlrm: large tables; gpt-wide: wide dense layers; gpt-long, rnnlm: much to compute; alexnet: convolutions, then dense layers."""

RUNTIME_MODELS: dict[str, Callable[[], Made]] = {
    "runtime-resnet50": partial(_resnet50, image=64, batch=16),
    "runtime-gpt": partial(_gpt, vocabulary=4000, context=128, width=256, layers=4, batch=8, heads=8, dropout=0.1),
    "runtime-gpt-dry": partial(_gpt, vocabulary=4000, context=128, width=256, layers=4, batch=8, heads=8),
    "runtime-gpt-large": partial(_gpt, vocabulary=50_257, context=1024, width=768, layers=12, batch=8, heads=12),
    "runtime-gpt-tiny": partial(_gpt, vocabulary=64, context=8, width=16, layers=4, batch=8),
    "runtime-gpt-deep": partial(_gpt, vocabulary=4000, context=128, width=256, layers=8, batch=16, heads=8),
    "runtime-llama-deep": partial(_llama, vocabulary=4000, context=128, width=256, layers=8, batch=16),
    "runtime-resnet50-large": partial(_resnet50, image=224, batch=64),
    "runtime-llama": partial(_llama, vocabulary=4000, context=128, width=256, layers=4, batch=8),
    "runtime-rnnlm": partial(_recurrent, vocabulary=2000, width=256, steps=40, chunk=8, batch=64),
    "runtime-rnnlm-short": partial(_recurrent, vocabulary=2000, width=256, steps=40, chunk=8, batch=32),
}
"""For ``benchmarks.runtime``: steps long enough for 1% to be seen, sides that PyTorch's own tools can train."""

EMULATED_MODELS: dict[str, Callable[[], Made]] = {
    "emulated-rnnlm": partial(_recurrent, vocabulary=2000, width=256, steps=24, chunk=8, batch=32),
    "emulated-gpt": partial(_gpt, vocabulary=2000, context=128, width=192, layers=4, batch=8),
    "emulated-resnet50": partial(_resnet50, image=64, batch=16, width=24),
    "emulated-nmt": partial(_nmt, vocabulary=2000, width=192, steps=16, batch=32),
    "emulated-dlrm": partial(_dlrm, batch=2048, largest=20_000),
}
"""For ``benchmarks.accuracy``: 8 to 14 MB of parameters, which four hosts sum at 200 Mbit/s in 0.5 to 0.8 s."""

COMPRESSED_MODELS: dict[str, Callable[[], Made]] = {
    "emulated-alexnet": partial(_small_alexnet, batch=32),
    "emulated-lstm": partial(_recurrent, vocabulary=2000, width=384, steps=20, chunk=10, batch=20),
    "emulated-vgg16": partial(_small_vgg16, batch=32),
}
"""For ``benchmarks.lossy_emulated``, beside ``emulated-resnet50``: what RedSync's paper trains, in sizes for four emulated hosts."""

TASK_MODELS: dict[str, Callable[[], Made]] = {f"task-{name}": partial(_task, name) for name in TASKS}
"""For ``benchmarks.time_to_loss``: what ``benchmarks.convergence`` trains, with the loss, and its first samples as the example batch."""
