"""Small models of the ``transformers`` library, one per family, with random weights: built from configurations, nothing is downloaded.

``MODELS[name]()`` gives (module in training mode, keyword arguments of its forward, loss function or None). None: the module returns the
loss itself, as the output called ``loss``. Seed torch before the call for equal weights and inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, Any], Callable[..., torch.Tensor] | None]

BATCH, LENGTH, WORDS, CLASSES = 4, 8, 50, 5
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH_SIDES = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 32))}


def _words(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, WORDS, (BATCH, length))


def _text() -> dict[str, torch.Tensor]:
    return {"input_ids": _words(), "labels": _words()}


def _padding() -> torch.Tensor:
    """A mask in which every sample but the first ends early."""
    return (torch.arange(LENGTH) < LENGTH - torch.arange(BATCH)[:, None]).long()


def _images(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, CLASSES, (BATCH,))}


def gpt2() -> Built:
    """Decoder with learned positions and tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=WORDS, n_positions=16, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).train(), {**_text(), "use_cache": False}, None


def llama() -> Built:
    """Decoder with rotary positions, grouped queries and RMS norm."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=WORDS)
    return LlamaForCausalLM(config).train(), {**_text(), "use_cache": False}, None


def llama_padded() -> Built:
    """The same with a causal mask and a padding mask at once."""
    module, inputs, _ = llama()
    return module, {**inputs, "attention_mask": _padding()}, None


def bert() -> Built:
    """Encoder; padding is masked."""
    from transformers import BertConfig, BertForMaskedLM

    module = BertForMaskedLM(BertConfig(**SMALL, vocab_size=WORDS))
    return module.train(), {**_text(), "attention_mask": _padding()}, None


def vit() -> Built:
    """Vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**SMALL, image_size=16, patch_size=4, num_labels=CLASSES)
    return ViTForImageClassification(config).train(), _images(16), None


def swin() -> Built:
    """Vision transformer with shifted windows."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES, drop_path_rate=0.0
    )
    return SwinForImageClassification(config).train(), _images(32), None


def resnet() -> Built:
    """Convolutions with batch norm."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=CLASSES)
    return ResNetForImageClassification(config).train(), _images(32), None


def convnext() -> Built:
    """Depthwise convolutions with layer norm."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=CLASSES, drop_path_rate=0.0)
    return ConvNextForImageClassification(config).train(), _images(32), None


def t5() -> Built:
    """Encoder and decoder with relative positions; the decoder's inputs are the labels, shifted."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, vocab_size=WORDS, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config).train(), {**_text(), "attention_mask": _padding(), "use_cache": False}, None


def bart() -> Built:
    """Encoder and decoder with learned positions."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(vocab_size=WORDS, d_model=16, max_position_embeddings=16, decoder_start_token_id=2, **IDS, **BOTH_SIDES)
    return BartForConditionalGeneration(config).train(), {**_text(), "use_cache": False}, None


def whisper() -> Built:
    """Encoder over sound (1-d convolutions) and decoder over text."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=WORDS, d_model=16, num_mel_bins=8, max_source_positions=16, max_target_positions=16, decoder_start_token_id=1,
        begin_suppress_tokens=None, **IDS, **BOTH_SIDES,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(BATCH, 8, 32), "labels": _words(), "use_cache": False}
    return WhisperForConditionalGeneration(config).train(), inputs, None


def mixtral() -> Built:
    """Mixture of experts: two of four per token, and the loss that balances them."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SMALL, num_key_value_heads=2, vocab_size=WORDS, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )
    config._experts_implementation = "batched_mm"  # the one whose shapes do not depend on data
    return MixtralForCausalLM(config).train(), {**_text(), "use_cache": False}, None


def mixtral_grouped() -> Built:
    """The same as the library builds it by itself: tokens sorted by expert, grouped products, which are an operator of its own."""
    module, inputs, _ = mixtral()
    module.config._experts_implementation = "grouped_mm"
    return module, inputs, None


def mamba() -> Built:
    """State-space layers, their scan written out over the sequence."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=WORDS, conv_kernel=3, use_cache=False, time_step_rank=2, **IDS
    )
    return MambaForCausalLM(config).train(), {**_text(), "use_cache": False}, None


def fnet() -> Built:
    """Fourier transforms over positions and features in place of attention."""
    from transformers import FNetConfig, FNetForMaskedLM

    config = FNetConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=WORDS, max_position_embeddings=LENGTH,
        tpu_short_seq_length=LENGTH, **IDS,
    )  # fmt: skip
    return FNetForMaskedLM(config).train(), _text(), None


MODELS: dict[str, Callable[[], Built]] = {
    build.__name__: build
    for build in (gpt2, llama, llama_padded, bert, vit, swin, resnet, convnext, t5, bart, whisper, mixtral, mixtral_grouped, mamba, fnet)
}
