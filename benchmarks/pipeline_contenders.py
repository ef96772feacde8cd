"""What ``benchmarks.pipelines`` compares: the same stages by our runtime and by ``torch.distributed.pipelining``. Runs on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from benchmarks.contenders import Contest, Step, batch_of, soap_step
from benchmarks.layers import by_layers, first_layers
from benchmarks.models import Llama
from soap.cluster.topology import Topology
from soap.model.graph import OperatorGraph
from soap.runtime.comm.world import choose_device
from soap.schedules.named import parse
from soap.strategy.config import Strategy
from soap.zoo.blocks import token_loss
from soap.zoo.gpt import GPT


class Known(NamedTuple):
    """A schedule on both sides. ``word``: in names of contests; ``ours``: as our plans name it."""

    word: str
    ours: str
    theirs: type


SCHEDULES = {
    "ScheduleGPipe": Known("gpipe", "gpipe", ScheduleGPipe),
    "Schedule1F1B": Known("1f1b", "1f1b", Schedule1F1B),
    "ScheduleInterleaved1F1B": Known("interleaved", "interleaved:2", ScheduleInterleaved1F1B),
}


@dataclass(frozen=True, kw_only=True)
class PipelineContest(Contest):
    """A pipeline of equal numbers of layers. ``ours``: our schedule; ``theirs``: torch's."""

    microbatches: int

    def strategy(self, graph: OperatorGraph, topology: Topology) -> Strategy:
        """A stage on each device."""
        return by_layers(graph, topology, stages=topology.device_count, microbatches=self.microbatches, schedule=self.ours)

    def step(self, ours: bool) -> Step:
        """The training iteration of a side, made ready."""
        return soap_step(self) if ours else torch_step(self)


class _GPTPart(nn.Module):
    """Some blocks of the zoo's GPT, with what is before the first and behind the last."""

    def __init__(self, model: GPT, first: int, last: int) -> None:
        super().__init__()
        count = len(model.blocks)
        self.blocks = model.blocks[first:last]
        self.token, self.position = (model.token_embedding, model.position_embedding) if first == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if last == count else (None, None)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.token is not None and self.position is not None:
            hidden = self.token(hidden) + self.position(torch.arange(hidden.shape[1], device=hidden.device))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


class _LlamaPart(nn.Module):
    """Some layers of a Llama, with what is before the first and behind the last."""

    def __init__(self, model: Llama, first: int, last: int) -> None:
        super().__init__()
        whole = model.causal.model
        count = len(whole.layers)
        self.layers, self.rotary = whole.layers[first:last], whole.rotary_emb
        self.embed = whole.embed_tokens if first == 0 else None
        self.norm, self.head = (whole.norm, model.causal.lm_head) if last == count else (None, None)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.embed is None else self.embed(hidden)
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        around = self.rotary(hidden, position_ids=places)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=places, position_embeddings=around)
        return hidden if self.norm is None or self.head is None else self.head(self.norm(hidden))


def _next_word_loss(model: Llama) -> Callable[[Tensor, Tensor], Tensor]:
    loss, vocabulary = model.causal.loss_function, model.causal.config.vocab_size
    return lambda logits, labels: cast(Tensor, loss(logits=logits, labels=labels, vocab_size=vocabulary))


def torch_step(contest: PipelineContest) -> Step:
    """The schedule of ``torch.distributed.pipelining``; the first rank has the batch, the last one the labels."""
    module, (words, labels) = batch_of(contest)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    known = SCHEDULES[contest.theirs]
    each = parse(known.ours).chunks
    part, layers, loss = _parts_of(module)
    borders = [*first_layers(layers, ranks * each), layers]
    device = choose_device(contest.device, int(os.environ["LOCAL_RANK"]))
    own = [rank + ranks * chunk for chunk in range(each)]
    parts = [part(borders[chunk], borders[chunk + 1]) for chunk in own]
    stages = [PipelineStage(made, chunk, ranks * each, device) for made, chunk in zip(parts, own, strict=True)]
    several = issubclass(known.theirs, PipelineScheduleMulti)
    schedule = known.theirs(stages if several else stages[0], contest.microbatches, loss_fn=loss)
    optimizer = contest.optimizer([parameter for made in parts for parameter in made.parameters()])
    del module, part, loss

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given: Sequence[Tensor] = (words,) if rank == 0 else ()
        target: dict[str, Any] = {"target": labels, "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*given, **target, return_outputs=False)
        optimizer.step()
        return float(torch.stack(losses).mean().detach()) if losses else 0.0

    return step


def _parts_of(module: nn.Module) -> tuple[Callable[[int, int], nn.Module], int, Callable[[Tensor, Tensor], Tensor]]:
    """(what makes a part of a model from its first layer and the one behind its last, number of layers, the loss)."""
    if isinstance(module, GPT):
        return (lambda first, last: _GPTPart(module, first, last)), len(module.blocks), token_loss
    llama = cast(Llama, module)
    return (lambda first, last: _LlamaPart(llama, first, last)), len(llama.causal.model.layers), _next_word_loss(llama)
