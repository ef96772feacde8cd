"""Llama 3 8B, which nothing of this machine has to hold: built on the meta device, exported, and ready to be planned for any cluster.

    python -m examples.llama llama.pt2
    soap-search llama.pt2 --cluster h200-8

It needs `transformers`. Sizes are those of Meta's Llama 3 8B; `--layers` and `--samples` make it smaller.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import soap

CONTEXT = 4096
VOCABULARY = 128_256


def export(path: Path, layers: int, samples: int) -> None:
    """Write the model in bfloat16, with batches of ``samples`` sequences of 4096 words, to ``path``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        words = torch.zeros(samples, CONTEXT, dtype=torch.int64)
        soap.export(model, (), {"input_ids": words, "labels": words}, path=path, loss=lambda outputs: outputs.loss)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Export Llama 3 8B from the meta device.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args(argv)
    export(args.path, args.layers, args.samples)


if __name__ == "__main__":
    main()
