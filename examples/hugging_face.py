"""Hugging Face's Trainer, whose steps are trained by a plan (docs/howto/hugging_face.md). Needs transformers and accelerate.

    torchrun --nproc-per-node 2 -m examples.hugging_face --output gpt2-trained
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, get_scheduler

import soap
from soap.errors import RuntimeFailure

# --8<-- [start:trainer]
EXPECTED: dict[str, Any] = {
    "gradient_accumulation_steps": 1, "fp16": False, "bf16": False, "label_smoothing_factor": 0.0, "neftune_noise_alpha": None,
    "load_best_model_at_end": False, "torch_compile": False,
}  # fmt: skip
"""Options of ``TrainingArguments`` that a plan does not know yet, and what they must be."""


class Elsewhere(torch.optim.Optimizer):
    """Where transformers expects an optimizer. It has the learning rate that is shown; parameters are updated by the plan's ranks."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(()))], {"lr": learning_rate})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing is left to do."""


class PlannedTrainer(Trainer):
    """``transformers.Trainer`` with other steps: each rank's part of a batch goes to a runner, which has searched a plan for the first one.

    Data, collators, callbacks, logging, evaluation and ``save_model`` are Trainer's. RuntimeFailure in one line for options that it would
    otherwise ignore. All batches must have the shape of the first one, so pad to a fixed length.
    """

    optimizer: torch.optim.Optimizer | None

    def __init__(self, *args: Any, planning: soap.RunnerConfig | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.runner: Any = None
        self._config = planning or soap.RunnerConfig()
        for name, expected in EXPECTED.items():
            if (given := getattr(self.args, name)) != expected:
                raise RuntimeFailure(f"{name} {given!r}: a plan does not know it; expected {expected!r}")
        if self.args.optim not in ("adamw_torch", "adamw_torch_fused"):
            raise RuntimeFailure(f"optim {self.args.optim!r}: expected 'adamw_torch'")
        if self.args.save_strategy != "no" and not self.args.save_only_model:
            raise RuntimeFailure("checkpoints lack the plan's optimizer states; expected save_only_model=True, or save_strategy 'no'")
        self.accelerator.prepare_model = lambda model, *_, **__: model  # else it would be wrapped for data parallelism
        self.accelerator.clip_grad_norm_ = lambda *_, **__: torch.tensor(self._norm())  # the plan has clipped; this is shown

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """See ``Elsewhere``."""
        if self.optimizer is None:
            self.optimizer = Elsewhere(self.args.learning_rate)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Trainer's schedule, and the runner with the same one."""
        given, decaying = self.args, set(self.get_decay_parameter_names(self.model))
        config = replace(
            self._config,
            optimizer=lambda tensors: torch.optim.AdamW(
                tensors, lr=given.learning_rate, betas=(given.adam_beta1, given.adam_beta2), eps=given.adam_epsilon
            ),
            groups=lambda name, shape: {"weight_decay": given.weight_decay if name in decaying else 0.0},
            schedule=lambda own: get_scheduler(
                given.lr_scheduler_type, own, given.get_warmup_steps(num_training_steps), num_training_steps, given.lr_scheduler_kwargs
            ),
            clip_norm=given.max_grad_norm or None,
            loss=lambda output: output.loss,
            seed=given.seed,
        )
        self.runner = soap.get_runner(self.model.train(), config=config)
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward, backward and update of the whole batch, of which this rank has ``inputs``. Its loss, on all ranks."""
        tensors = {name: value.to("cpu") for name, value in inputs.items() if isinstance(value, Tensor)}
        return torch.tensor(self.runner.run(tensors), device=self.args.device)

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        """As Trainer's; the module has the trained values behind it, on all ranks."""
        if resume_from_checkpoint:
            raise RuntimeFailure("resume_from_checkpoint: checkpoints of Trainer lack the plan's optimizer states; load the model instead")
        outcome = super().train(**options)
        self.take_back()
        self.runner.close()
        self.runner = None
        return outcome

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        """Of the values that are there by now."""
        self.take_back()
        metrics: dict[str, float] = super().evaluate(*args, **options)
        return metrics

    def save_model(self, *args: Any, **options: Any) -> None:
        """Likewise; called on all ranks."""
        self.take_back()
        super().save_model(*args, **options)

    def take_back(self) -> None:
        """Bring the trained values into the module, on all ranks at once."""
        if self.runner is None or self.runner.trainer is None:
            return
        trained = self.runner.state_dict()  # on rank 0
        for name, tensor in self.model.state_dict().items():
            if trained:
                tensor.copy_(trained[name])
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(tensor, 0)

    def _norm(self) -> float:
        norm = self.runner.trainer.gradient_norm
        return float("nan") if norm is None else norm


# --8<-- [end:trainer]


def language_model() -> GPT2LMHeadModel:
    """A small one, the same on all ranks."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 512, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def texts(count: int = 64) -> list[dict[str, Tensor]]:
    """Samples of one length, as tokenizers make them with ``padding="max_length"``."""
    drawn = torch.randint(512, (count, 32), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": words, "labels": words} for words in drawn]


def arguments(output: str, batch: int, steps: int) -> TrainingArguments:
    """Training on CPUs with a warm-up, weight decay and clipping; ``batch``: samples for each rank."""
    return TrainingArguments(
        output, per_device_train_batch_size=batch, max_steps=steps, learning_rate=0.01, warmup_steps=2, weight_decay=0.1, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, ddp_backend="gloo" if "RANK" in os.environ else None, seed=3, disable_tqdm=True,
    )  # fmt: skip


def main() -> None:
    """Train, and write the model as ``from_pretrained`` reads it."""
    parser = argparse.ArgumentParser(description="Train a small GPT-2 with Hugging Face's Trainer, by a plan.")
    parser.add_argument("--output", default="gpt2-trained", help="the model's folder (default %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="updates (default %(default)s)")
    given = parser.parse_args()
    trainer = PlannedTrainer(language_model(), arguments(given.output, 4, given.steps), train_dataset=texts())
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
