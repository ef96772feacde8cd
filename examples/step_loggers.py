"""Loggers for ``soap-run --log`` and ``on_step=`` (docs/howto/logging.md).

    soap-run strategy.json --model model.pt2 --log examples.step_loggers:tensorboard
"""

from __future__ import annotations

# --8<-- [start:loggers]
from collections.abc import Callable

import soap


def tensorboard(folder: str = "runs") -> Callable[[soap.StepMetrics], None]:
    """Needs the package tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def log(metrics: soap.StepMetrics) -> None:
        for name, value in metrics.scalars().items():
            writer.add_scalar(name, value, metrics.step)
        writer.flush()

    return log


def wandb(project: str = "soap") -> Callable[[soap.StepMetrics], None]:
    """Needs the package wandb; the account is that of ``wandb login``."""
    import wandb

    run = wandb.init(project=project)
    return lambda metrics: run.log(metrics.scalars(), step=metrics.step)


# --8<-- [end:loggers]
