"""Operator rules, by family. Importing this package registers them all."""

from __future__ import annotations

import soap.tracing.rules.attention
import soap.tracing.rules.complex
import soap.tracing.rules.experts
import soap.tracing.rules.index
import soap.tracing.rules.linear
import soap.tracing.rules.loss
import soap.tracing.rules.norm
import soap.tracing.rules.random
import soap.tracing.rules.recurrent
import soap.tracing.rules.reduce
import soap.tracing.rules.shape
import soap.tracing.rules.windows  # noqa: F401
from soap.tracing.rules.notation import registered, tiled

__all__ = ["registered", "tiled"]
