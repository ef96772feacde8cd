"""What sources say of a run in words, as options of its prediction: by one rule for all benchmarks."""

from __future__ import annotations

import re

from soap.simulator.kernels import Kernels


def kernels_told(told: str) -> Kernels:
    """How light calls run by what a source says of its kernels; call by call where it says nothing."""
    added = ("+overlap" if OVERLAP_TOLD.search(told) else "") + ("+flash2" if FLASH2_TOLD.search(told) else "")
    if "torch.compile" in told and "no torch.compile" not in told:
        return f"compiled{added}"
    return f"{'fused' if FUSED_TOLD.search(told) or '+overlap' in added else 'eager'}{added}"


FUSED_TOLD = re.compile("Transformer Engine|Megatron fused|fused bias-GeLU|fused kernels of its own")
"""In words about kernels: hand-written ones in place of light calls."""
OVERLAP_TOLD = re.compile(r"async TP|TP (comm\w* )?overlap|overlaps as in the recipe")
"""In words about kernels: collectives of tensor parallelism run in parts with its products."""
FLASH2_TOLD = re.compile(r"SDPA flash|flash_attention2|flash attention \(triton")
"""In words about kernels: FlashAttention-2, or what is of its time. All such rows are older than torch's choice of cuDNN's on Hopper
(2.11)."""
