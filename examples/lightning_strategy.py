"""A strategy of Lightning whose steps are trained by a plan (docs/howto/lightning.md). Needs lightning.

    torchrun --nproc-per-node 2 -m examples.lightning_strategy --output classifier.pt
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import soap
from soap.errors import RuntimeFailure


# --8<-- [start:strategy]
class Loss(nn.Module):
    """What is exported: the loss of ``training_step``, whose ``self.log`` is left out."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: Tensor, **named: Tensor) -> Tensor:
        """The batch as the loader gives it: tensors in order, or by name."""
        module: Any = self.module
        logs = module.log, module.log_dict
        module.log = module.log_dict = lambda *_, **__: None
        try:
            found = module.training_step(named or list(batch), 0)
        finally:
            module.log, module.log_dict = logs
        loss: Tensor = found["loss"] if isinstance(found, Mapping) else found
        return loss


class PlannedStrategy(DDPStrategy):
    """``Trainer(strategy=PlannedStrategy())`` under torchrun: each rank's part of a batch goes to a runner, which has searched a plan
    for the first one. Loaders, callbacks, schedules, validation and checkpoints of weights are Lightning's; the loss is logged as
    ``train_loss``. RuntimeFailure in one line for what it would otherwise ignore.
    """

    def __init__(self, planning: soap.RunnerConfig | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.runner: Any = None
        self._planning = planning or soap.RunnerConfig()

    def configure_ddp(self) -> None:
        """Nothing wraps the module."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Refuse what a plan does not know; make the runner, with an optimizer like that of ``configure_optimizers``."""
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        if trainer.accumulate_grad_batches != 1 or trainer.precision != "32-true" or trainer.gradient_clip_algorithm == "value":
            raise RuntimeFailure("a plan knows one batch for each update, precision 32-true, and clipping by the norm")
        if len(self.optimizers) != 1 or len(self.optimizers[0].param_groups) != 1:
            raise RuntimeFailure("configure_optimizers: expected one optimizer with one group of parameters")
        (own,) = self.optimizers
        known = inspect.signature(type(own)).parameters
        options = {name: value for name, value in own.param_groups[0].items() if name in known and name != "params"}
        clip_norm = trainer.gradient_clip_val or None
        config = replace(self._planning, optimizer=lambda tensors: type(own)(tensors, **options), clip_norm=clip_norm)
        assert self.lightning_module is not None
        self.runner = soap.get_runner(Loss(self.lightning_module.train()), config=config)

    def training_step(self, batch: Any, *_: Any) -> Any:
        """Forward, backward and update of the whole batch, of which this rank has a part."""
        assert self.lightning_module is not None
        if self.runner.trainer is not None and self.runner.trainer.optimizer is not None:
            for group in self.runner.trainer.optimizer.param_groups:  # where Lightning's schedule has brought it
                group["lr"] = self.optimizers[0].param_groups[0]["lr"]
        loss = torch.tensor(self.runner.run(batch))
        self.lightning_module.log("train_loss", loss, prog_bar=True)
        return loss

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """It is done."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """So is the update: without gradients the module's own optimizer does nothing."""
        loss = closure()
        optimizer.step()
        return loss

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """For checkpoints; asked for on all ranks."""
        self.take_back()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Lightning's checkpoints have weights alone."""
        raise RuntimeFailure("ckpt_path: checkpoints lack the plan's optimizer states; load the weights instead (load_from_checkpoint)")

    def on_validation_start(self) -> None:
        """Validate the values that are there by now."""
        self.take_back()

    def on_train_end(self) -> None:
        """The module has the trained values behind ``fit``, on all ranks."""
        self.take_back()
        self.runner.close()
        self.runner = None

    def take_back(self) -> None:
        """Bring the trained values into the module, on all ranks at once."""
        if self.runner is None or self.runner.trainer is None:
            return
        trained = self.runner.state_dict()  # on rank 0
        for name, tensor in self.runner.model.state_dict().items():
            if trained:
                tensor.copy_(trained[name])
            if dist.get_world_size() > 1:
                dist.broadcast(tensor, 0)


# --8<-- [end:strategy]


class Classifier(pl.LightningModule):
    """As Lightning has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: Any, batch_number: int) -> Tensor:
        """Mean cross-entropy."""
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        self.log("own_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_number: int) -> None:
        """The same of other samples."""
        inputs, labels = batch
        self.log("validation_loss", nn.functional.cross_entropy(self.layers(inputs), labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """With a schedule that steps after each update."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(batch: int, seed: int) -> DataLoader[Any]:
    """64 samples in their order; the labels can be learned. ``batch``: samples for each rank."""
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(seed))
    return DataLoader(soap.shard(TensorDataset(inputs, inputs[:, :4].argmax(1))), batch_size=batch)


def fit(module: Classifier, batch: int, **options: Any) -> pl.Trainer:
    """Two epochs on CPUs, with validation."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    divided: dict[str, Any] = {"use_distributed_sampler": False}  # but by soap.shard; Lightning's own sampler draws an order
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, gradient_clip_val=1.0, **quiet, **divided, **options)
    trainer.fit(module, loader(batch, 0), loader(batch, 1))
    return trainer


def main() -> None:
    """Train by a plan on the ranks that torchrun has started; write the weights and the metrics."""
    parser = argparse.ArgumentParser(description="Train a classifier with Lightning, by a plan.")
    parser.add_argument("--output", default="classifier.pt", help="weights and metrics (default %(default)s)")
    given = parser.parse_args()
    torch.manual_seed(0)
    module = Classifier()
    trainer = fit(module, 8, strategy=PlannedStrategy(process_group_backend="gloo"), devices=2)
    if trainer.is_global_zero:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save({"state": module.state_dict(), "metrics": metrics}, given.output)
        print(metrics)


if __name__ == "__main__":
    main()
