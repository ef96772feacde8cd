"""Throughput, utilisation and cost of a step, as all commands report them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soap.cli.plain_text import attributes
from soap.simulator.throughput import Throughput


def document(found: Throughput) -> dict[str, Any]:
    """Plain JSON values. The keys are part of the commands' interface."""
    return {
        **attributes(found, "samples_per_second", "tokens_per_second", "mfu", "model_flops", "arithmetic", "peak_flops_per_second"),
        "price_per_hour": None if found.price is None else found.price.per_hour,
        "currency": None if found.price is None else found.price.currency or None,
        **attributes(found, "cost_per_million_samples", "cost_per_million_tokens"),
    }


def text(figures: Mapping[str, Any]) -> str:
    """The document in one line: ``1,234 samples/s (315,904 tokens/s), MFU 41%, 2.10 EUR per million samples``."""
    samples, tokens = (figures[f"{what}_per_second"] for what in ("samples", "tokens"))
    parts = [] if samples is None else [f"{rate(samples)} samples/s" + ("" if tokens is None else f" ({rate(tokens)} tokens/s)")]
    parts.append(f"MFU {share(figures['mfu'])}")
    if figures["cost_per_million_samples"] is not None:
        parts.append(f"{cost(figures['cost_per_million_samples'], figures['currency'])} per million samples")
    if figures["cost_per_million_tokens"] is not None:
        parts[-1] += f" ({cost(figures['cost_per_million_tokens'], None)} per million tokens)"
    return ", ".join(parts)


def rate(per_second: float) -> str:
    """``315,904``, or three digits of a small one: ``0.0123``."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def share(utilisation: float) -> str:
    """``41%``, ``3.2%``."""
    percent = 100 * utilisation
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.1f}%" if percent >= 0.05 else "under 0.1%"


def cost(amount: float, currency: str | None) -> str:
    """``2.10 EUR``, or three digits of a small amount: ``0.00123``."""
    digits = f"{amount:,.2f}" if amount >= 1 or amount == 0 else f"{amount:.3g}"
    return f"{digits} {currency}" if currency else digits
