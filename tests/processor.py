"""Abilities of the processor that some tests need. They ask here, and nowhere else; what lacks an ability is skipped with the reason."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from soap.tracing.autocast import NO_PRIMITIVE


def needs_lstm_under_autocast(dtype: torch.dtype) -> None:
    """Skip the test if torch itself cannot run an LSTM under autocast to ``dtype``: oneDNN needs instructions for that, such as AVX-512.
    ``ONEDNN_MAX_CPU_ISA=AVX2`` takes them away from processors that have them."""
    reason = lacks_lstm_under_autocast(dtype)
    if reason:
        pytest.skip(f"torch itself cannot run an LSTM under autocast to {dtype} on this processor: {reason}")


@cache
def lacks_lstm_under_autocast(dtype: torch.dtype) -> str:
    """Why the processor cannot do that; empty if it can."""
    try:
        with torch.autocast("cpu", dtype=dtype):
            torch.nn.LSTM(4, 4)(torch.zeros(3, 2, 4))  # for training: some processors can do it for inference alone
    except RuntimeError as error:
        if NO_PRIMITIVE not in str(error):
            raise
        return str(error).split(".")[0]
    return ""
