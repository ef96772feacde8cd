"""Models of the zoo that are read for planning alone are read once in a process of the tests, which read the same few hundreds of times.

What changes how a model is read is part of the key; graphs and programs do not change once they are made.
"""

from __future__ import annotations

import copy
import sys
from typing import Any


def keep_zoo_models() -> None:
    """From now on, if the code that reads them is imported by now: half of the tests do without torch."""
    load: Any = sys.modules.get("soap.tracing.load")
    if load is None or hasattr(load.ZooSource, "kept"):
        return
    import torch

    real, kept = load.ZooSource.trace, dict[Any, Any]()

    def trace(self: Any, *, shapes: Any = None, dtype: Any = None, plan_only: bool = False) -> Any:
        options = self.options
        if not plan_only or shapes is not None or options.batch_dims:
            return real(self, shapes=shapes, dtype=dtype, plan_only=plan_only)
        usual = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        key = self.spec, dtype, options.dtype, options.autocast, options.autocast_device, options.batch_norm, usual
        if key not in kept:
            kept[key] = real(self, plan_only=True, dtype=dtype)
        return copy.copy(kept[key])

    load.ZooSource.trace, load.ZooSource.kept = trace, kept
