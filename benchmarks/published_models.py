"""The models of ``published.json`` as graphs: built on the meta device and exported without values, whatever their size."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soap
from soap.measure.compute_rates import float32_precision
from soap.model.graph import OperatorGraph
from soap.zoo.dlrm import DLRM, DLRMConfig
from soap.zoo.gpt import GPT, CausalAttention, GPTConfig

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of a module's ``forward``."""


def graph_of(model: Mapping[str, Any], batch: int, **precision: str) -> OperatorGraph:
    """The operators of a model of the data file on GPUs, for a batch of all devices together. ``precision``: further arguments of
    ``soap.load``. Batch normalization is by device, as DistributedDataParallel has it."""
    options: dict[str, Any] = {"plan_only": True, "batch_norm": "local", "autocast_device": "cuda", **precision}
    with float32_precision("highest"):  # as before afterwards
        return _loaded(model, batch, options)


def _loaded(model: Mapping[str, Any], batch: int, options: Mapping[str, Any]) -> OperatorGraph:
    if model["builder"] == "zoo":
        return soap.load(f"zoo:{model['spec']}@{batch}", **options).graph
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        with torch.device("meta"):
            module, (args, kwargs), loss = built(model, batch)
            soap.export(module.train(), args, kwargs, path=path, loss=loss, verify=False)
        return soap.load(path, **options).graph


def built(model: Mapping[str, Any], batch: int) -> tuple[nn.Module, Inputs, Any]:
    """A module that is no zoo's, its inputs, and how ``soap.export`` finds the loss."""
    loss = (lambda output: output.loss) if model["builder"] == "transformers" else None
    return *BUILDERS[model["builder"]](model, batch), loss


class PlainAttention(CausalAttention):
    """Attention as it was before fused kernels: products, mask, softmax and dropout one after the other."""

    dropout: float

    def forward(self, inputs: Tensor) -> Tensor:
        """Attended values, projected, of the shape of ``inputs``."""
        query, key, value = (self._split(layer(inputs)) for layer in (self.query, self.key, self.value))
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = F.dropout(torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), -1), self.dropout, self.training)
        result: Tensor = self.output((weights @ value).transpose(1, 2).flatten(2))
        return result


def _gpt(model: Mapping[str, Any], batch: int) -> tuple[nn.Module, Inputs]:
    """``attention``: plain or fused. ``tied``: whether the output layer has the weights of the token embedding."""
    sizes = {key: model[key] for key in ("vocabulary", "width", "heads", "layers", "dropout")}
    module = GPT(GPTConfig(context=model["sequence"], **sizes))
    if model["attention"] == "plain":
        for part in module.modules():
            if type(part) is CausalAttention:
                part.__class__, part.dropout = PlainAttention, model["dropout"]
    if model["tied"]:
        module.head.weight = module.token_embedding.weight
    words = torch.zeros(batch, model["sequence"], dtype=torch.int64)
    return module, ((words, words.clone()), {})


def _transformers(model: Mapping[str, Any], batch: int) -> tuple[nn.Module, Inputs]:
    """``class``: of the library; ``config``: its sizes; ``inputs``: of which task; ``attention``: the library's implementation."""
    import transformers

    made = getattr(transformers, model["class"])
    config = made.config_class(**model["config"])
    config._attn_implementation = model["attention"]
    words = torch.zeros(batch, model["sequence"], dtype=torch.int64)
    places = torch.zeros(batch, dtype=torch.int64)
    task: dict[str, dict[str, Any]] = {
        "language_model": {"labels": words.clone(), "use_cache": False},
        "pretraining": {"attention_mask": torch.ones_like(words), "labels": words.clone(), "next_sentence_label": places},
        "question_answering": {"attention_mask": torch.ones_like(words), "start_positions": places, "end_positions": places.clone()},
    }
    return made(config), ((), {"input_ids": words, **task[model["inputs"]]})


def _dlrm(model: Mapping[str, Any], batch: int) -> tuple[nn.Module, Inputs]:
    """``rows``: of each table; ``bottom`` and ``top``: widths of the perceptrons, as ``DLRMConfig`` has them."""
    config = DLRMConfig(rows=tuple(model["rows"]), bottom=tuple(model["bottom"]), top=tuple(model["top"]), batch=batch)
    ids = torch.zeros(batch, len(config.rows), dtype=torch.int64)
    return DLRM(config), ((torch.zeros(batch, config.bottom[0]), ids, torch.zeros(batch)), {})


BUILDERS = {"gpt": _gpt, "transformers": _transformers, "dlrm": _dlrm}
