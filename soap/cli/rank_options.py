"""Options of ``soap-run`` that only plans of ranks in step know. Whatever else trains refuses them, rather than to ignore them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from soap.cli.command import UsageError

RANKS_ALONE = (
    "check", "memory", "timeline", "compare_data_parallel", "compile", "clip_norm", "correct_momentum", "keep", "weight_decay", "no_decay",
    "weights", "save_weights", "eval_data", "eval_steps", "eval_model", "restarts", "spare_plans", "report", "log",
)  # fmt: skip
"""Names of the parsed options."""


def refuse_rank_options(args: argparse.Namespace, further: Sequence[str], said: str, who: str) -> None:
    """UsageError in one line for an option that was given, and is in ``RANKS_ALONE`` or ``further``, as ``said``; and if ``who`` should
    compute on GPUs."""
    asked = [name for name in (*RANKS_ALONE, *further) if getattr(args, name, None)]
    asked += ["accumulate"] if args.accumulate > 1 else ["warm_up"] if args.warm_up != (0, 0) else []
    if asked:
        raise UsageError(f"--{asked[0].replace('_', '-')} {said}")
    if args.autocast == "float16":
        raise UsageError(f"--autocast float16 with {who}, which scale no loss; expected bfloat16")
    if args.device == "cuda" or args.backend == "nccl":
        raise UsageError(f"{who} compute on processors; expected --device cpu")
