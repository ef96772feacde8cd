"""Values that a model begins with, drawn by the names of its parameters, so that every rank and every process draws the same ones.

``init:normal:STD`` draws from a normal distribution with this standard deviation, as GPT-2 and most language models begin.
``init:fan_in`` draws evenly up to 1/sqrt(fan-in), as torch's linear layers and convolutions begin; the fan-in of (out, in, …) is all but
the first dimension. Both are for tensors of two or more dimensions. Those of fewer are zeros if ``bias`` is in the last word of their
names, and else ones, as those of normalizations. ``@SEED`` behind it gives other numbers (default 0). Buffers keep their values.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from math import prod

import torch

from soap.errors import ModelError
from soap.weights.fitting import Kind

PREFIX = "init:"
EXPECTED = "init:normal:STD or init:fan_in, with @SEED behind it or without, such as init:normal:0.02@7"
_SPEC = re.compile(r"init:(?:normal:(?P<deviation>\d+(?:\.\d*)?(?:e-?\d+)?)|fan_in)(?:@(?P<seed>\d{1,18}))?")


class Initializer:
    """See ``Weights``."""

    is_mapped = False

    def __init__(self, spec: str, kinds: Mapping[str, Kind]) -> None:
        found = _SPEC.fullmatch(spec)
        if found is None:
            raise ModelError(f"weights {spec!r}: no such initializer; expected {EXPECTED}")
        self.said, self.kinds = spec, kinds
        self._deviation = None if found["deviation"] is None else float(found["deviation"])
        self._seed = int(found["seed"] or 0)

    def tensor(self, name: str) -> torch.Tensor:
        """See ``Weights``. Numbers are drawn in float32, whatever the parameter's type is."""
        shape, dtype = self.kinds[name]
        if len(shape) < 2:
            value = 0.0 if "bias" in name.rpartition(".")[2] else 1.0
            return torch.full(shape, value, dtype=dtype)
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:8], "big") >> 1)
        if self._deviation is not None:
            drawn = torch.empty(shape).normal_(0.0, self._deviation, generator=generator)
        else:
            bound = max(1, prod(shape[1:])) ** -0.5
            drawn = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        return drawn.to(dtype)
