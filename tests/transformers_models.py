"""Small models of the ``transformers`` library, with random weights: built from configurations, nothing is downloaded.

``ARCHITECTURES[name]()`` gives (module in training mode, keyword arguments of its forward), without dropout; with ``dropout=True`` as the
library has it. The module returns the loss itself, as the output called ``loss``. Seed torch before the call for equal weights and inputs.
``transformers`` is imported when a model is built. ``MODELS``: one for each family, with dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]

BATCH, LENGTH, WORDS, CLASSES = 4, 8, 50, 5
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH_SIDES = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 32))}


def _words(length: int = LENGTH, words: int = WORDS) -> torch.Tensor:
    return torch.randint(3, words, (BATCH, length))


def text() -> dict[str, Any]:
    """A language model's ids and labels, padding at the end of every sample but the first."""
    return {"input_ids": _words(), "labels": _words(), "attention_mask": padding()}


def padding() -> torch.Tensor:
    """A mask in which every sample but the first ends early."""
    return (torch.arange(LENGTH) < LENGTH - torch.arange(BATCH)[:, None]).long()


def decoded() -> dict[str, Any]:
    """The same for models that keep a cache."""
    return {**text(), "use_cache": False}


def images(size: int) -> dict[str, Any]:
    """Pictures with a class each."""
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, CLASSES, (BATCH,))}


def pixels(size: int) -> dict[str, Any]:
    """Pictures with a class for every pixel."""
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, CLASSES, (BATCH, size, size))}


def sound(samples: int) -> dict[str, Any]:
    """Waves with a class each."""
    return {"input_values": torch.randn(BATCH, samples), "labels": torch.randint(0, CLASSES, (BATCH,))}


def series(past: int, future: int, lags: int) -> dict[str, Any]:
    """A time series: what was, with one feature of time, and what comes."""
    return {
        "past_values": torch.randn(BATCH, past + lags),
        "past_time_features": torch.randn(BATCH, past + lags, 1),
        "past_observed_mask": torch.ones(BATCH, past + lags),
        "future_values": torch.randn(BATCH, future),
        "future_time_features": torch.randn(BATCH, future, 1),
    }


def pairs(**extra: Any) -> dict[str, Any]:
    """Pictures and their texts, compared within the batch."""
    return {"input_ids": _words(), "pixel_values": torch.randn(BATCH, 3, 16, 16), "attention_mask": padding(), "return_loss": True, **extra}


def without_dropout(config: Any) -> Any:
    """The configuration, and those inside, with nothing that draws random numbers in training."""
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            without_dropout(value)
    return config


def build(model: str, config: str, inputs: Callable[[], dict[str, Any]], *, dropout: bool = False, **options: Any) -> Built:
    """A model by the names of its classes."""
    import transformers

    made = getattr(transformers, f"{config}Config")(**options)
    module = getattr(transformers, model)(made if dropout else without_dropout(made)).train()
    for part in module.modules():
        if isinstance(part, nn.Dropout) and not dropout:
            part.p = 0.0
    return module, inputs()


class Fitted(nn.Module):
    """A detector with a loss of its outputs by a matching that is given: the one of the library needs values (and scipy)."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, pixel_values: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor) -> dict[str, torch.Tensor]:
        """Classes and boxes of every query."""
        found = self.detector(pixel_values=pixel_values)
        by_class = nn.functional.cross_entropy(found.logits.flatten(0, 1), classes.flatten())
        return {"loss": by_class + nn.functional.l1_loss(found.pred_boxes, boxes)}


def backbone() -> Any:
    """A small ResNet that gives features."""
    from transformers import ResNetConfig

    stages = [f"stage{n}" for n in range(1, 5)]
    return ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=stages)


def fitted(model: str, config: str, size: int, options: Callable[[], dict[str, Any]], *, dropout: bool = False) -> Built:
    """A detector of five objects in pictures of this size."""
    module, _ = build(model, config, dict, dropout=dropout, **options())
    inputs = {
        "pixel_values": torch.randn(BATCH, 3, size, size),
        "classes": torch.randint(0, CLASSES + 1, (BATCH, 5)),
        "boxes": torch.rand(BATCH, 5, 4),
    }
    return Fitted(module).train(), inputs


def causal(name: str, inputs: Callable[[], dict[str, Any]] = decoded, kind: str = "ForCausalLM", **options: Any) -> Callable[..., Built]:
    """A decoder over words."""
    return partial(build, f"{name}{kind}", name, inputs, **{**GROUPED, "vocab_size": WORDS, **IDS, **options})


def masked(name: str, inputs: Callable[[], dict[str, Any]] = text, kind: str = "ForMaskedLM", **options: Any) -> Callable[..., Built]:
    """An encoder over words."""
    return partial(build, f"{name}{kind}", name, inputs, **{**SMALL, "vocab_size": WORDS, **IDS, **options})


def picture(name: str, size: int = 16, kind: str = "ForImageClassification", **options: Any) -> Callable[..., Built]:
    """A classifier of pictures."""
    return partial(build, f"{name}{kind}", name, partial(images, size), **{"num_labels": CLASSES, **options})


def both_sides(name: str, inputs: Callable[[], dict[str, Any]] = decoded, **options: Any) -> Callable[..., Built]:
    """An encoder and a decoder over words."""
    usual = {"vocab_size": WORDS, "d_model": 16, "max_position_embeddings": 16, "decoder_start_token_id": 2, **IDS, **BOTH_SIDES}
    return partial(build, f"{name}ForConditionalGeneration", name, inputs, **{**usual, **options})


TRANSFORMER = {"image_size": 16, "patch_size": 4, **SMALL}
WAVES = {**SMALL, "conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2, "num_labels": CLASSES,
         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 8, "apply_spec_augment": False,
         "vocab_size": WORDS}  # fmt: skip
MIXED = {**GROUPED, "vocab_size": WORDS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
         "output_router_logits": True, **IDS}  # fmt: skip
LATENT = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 8, "q_lora_rank": 8,
          "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1,
          "num_key_value_heads": 4}  # fmt: skip
TIMES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16, "encoder_layers": 2,
         "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
         "decoder_ffn_dim": 16}  # fmt: skip
TOWERS = {"text_config": {**SMALL, "vocab_size": WORDS, "max_position_embeddings": 16, **IDS}, "vision_config": TRANSFORMER}
"""Configurations that several models share."""

ARCHITECTURES: dict[str, Callable[..., Built]] = {
    # decoders
    "gpt2": partial(build, "GPT2LMHeadModel", "GPT2", decoded, n_layer=2, n_head=2, n_embd=16, vocab_size=WORDS, n_positions=16, **IDS),
    "gpt_neo": causal("GPTNeo", num_layers=2, num_heads=4, window_size=4, attention_types=[[["global", "local"], 1]]),
    "gpt_neox": causal("GPTNeoX"),
    "llama": causal("Llama"),
    "mistral": causal("Mistral", sliding_window=4),
    "qwen2": causal("Qwen2"),
    "qwen3": causal("Qwen3", head_dim=4),
    "phi": causal("Phi"),
    "phi3": causal("Phi3", max_position_embeddings=16, original_max_position_embeddings=16),
    "gemma2": causal("Gemma2", head_dim=4, sliding_window=4),
    "gemma3": partial(build, "Gemma3ForCausalLM", "Gemma3Text", decoded, **GROUPED, vocab_size=WORDS, head_dim=4, sliding_window=4, **IDS),
    "granite": causal("Granite"),
    "olmo2": causal("Olmo2"),
    "cohere": causal("Cohere"),
    "stablelm": causal("StableLm"),
    "starcoder2": causal("Starcoder2"),
    "bloom": partial(build, "BloomForCausalLM", "Bloom", decoded, n_layer=2, n_head=4, hidden_size=16, vocab_size=WORDS, **IDS),
    "falcon": causal("Falcon", new_decoder_architecture=True, num_kv_heads=2),
    "mpt": partial(build, "MptForCausalLM", "Mpt", decoded, d_model=16, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=16,
                   vocab_size=WORDS),
    "opt": causal("OPT", ffn_dim=32, word_embed_proj_dim=16, max_position_embeddings=16),
    # mixtures of experts
    "mixtral": partial(build, "MixtralForCausalLM", "Mixtral", decoded, **{**MIXED, "num_local_experts": 4}),
    "qwen2_moe": partial(build, "Qwen2MoeForCausalLM", "Qwen2Moe", decoded, **MIXED, shared_expert_intermediate_size=8),
    "qwen3_moe": partial(build, "Qwen3MoeForCausalLM", "Qwen3Moe", decoded, **MIXED, head_dim=4),
    "olmoe": partial(build, "OlmoeForCausalLM", "Olmoe", decoded, **MIXED),
    "deepseek_v3": causal("DeepseekV3", **LATENT),
    "gpt_oss": partial(build, "GptOssForCausalLM", "GptOss", decoded, **{**MIXED, "num_local_experts": 4}, head_dim=4, sliding_window=4),
    "jamba": causal("Jamba", num_experts=4, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=2, attn_layer_offset=1,
                    mamba_d_state=4, mamba_d_conv=3, mamba_dt_rank=2, use_mamba_kernels=False, output_router_logits=True),
    "qwen3_next": partial(build, "Qwen3NextForCausalLM", "Qwen3Next", decoded, **MIXED, head_dim=4, linear_key_head_dim=4,
                          linear_value_head_dim=4, linear_num_key_heads=2, linear_num_value_heads=4, shared_expert_intermediate_size=8,
                          layer_types=["linear_attention", "full_attention"]),
    # state-space layers
    "mamba": partial(
        build, "MambaForCausalLM", "Mamba", decoded, hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=WORDS, conv_kernel=3,
        time_step_rank=2, **IDS,
    ),
    "mamba2": partial(
        build, "Mamba2ForCausalLM", "Mamba2", decoded, hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=WORDS, conv_kernel=3,
        num_heads=4, head_dim=8, n_groups=2, chunk_size=4, **IDS,
    ),
    "rwkv": partial(build, "RwkvForCausalLM", "Rwkv", decoded, hidden_size=16, num_hidden_layers=2, vocab_size=WORDS, context_length=16,
                    **IDS),
    # encoders
    "bert": masked("Bert"),
    "roberta": masked("Roberta", max_position_embeddings=16, type_vocab_size=1),
    "deberta_v2": masked("DebertaV2", relative_attention=True, pos_att_type="p2c|c2p", position_buckets=4, max_position_embeddings=16),
    "electra": masked("Electra", embedding_size=8),
    "albert": masked("Albert", embedding_size=8),
    "distilbert": masked("DistilBert", dim=16, hidden_dim=32, n_layers=2, n_heads=4),
    "mpnet": masked("MPNet", max_position_embeddings=16),
    "modernbert": masked("ModernBert", global_attn_every_n_layers=2, local_attention=4),
    "xlnet": partial(build, "XLNetLMHeadModel", "XLNet", text, d_model=16, n_layer=2, n_head=4, d_inner=32, vocab_size=WORDS),
    "fnet": partial(build, "FNetForMaskedLM", "FNet", lambda: {k: v for k, v in text().items() if k != "attention_mask"}, **{
        k: v for k, v in SMALL.items() if k != "num_attention_heads"}, vocab_size=WORDS, max_position_embeddings=16),
    "longformer": masked("Longformer", attention_window=4, max_position_embeddings=16),
    "big_bird": masked("BigBird", attention_type="original_full", max_position_embeddings=16),
    "data2vec_text": masked("Data2VecText", max_position_embeddings=16),
    "layoutlm": masked("LayoutLM"),
    "esm": masked("Esm", max_position_embeddings=16, mask_token_id=4, position_embedding_type="rotary"),
    "funnel": partial(build, "FunnelForMaskedLM", "Funnel", text, vocab_size=WORDS, block_sizes=[1, 1], d_model=16, n_head=4, d_head=4,
                      d_inner=32),
    # encoders and decoders
    "t5": partial(build, "T5ForConditionalGeneration", "T5", decoded, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
                  vocab_size=WORDS, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2),
    "bart": both_sides("Bart"),
    "pegasus": both_sides("Pegasus"),
    "mbart": both_sides("MBart"),
    "marian": partial(both_sides("Marian").func, "MarianMTModel", "Marian", decoded, **both_sides("Marian").keywords),
    "led": both_sides("LED", attention_window=4, max_encoder_position_embeddings=16, max_decoder_position_embeddings=16),
    # pictures
    "vit": picture("ViT", **TRANSFORMER),
    "deit": picture("DeiT", **TRANSFORMER),
    "beit": picture("Beit", **TRANSFORMER, use_relative_position_bias=True),
    "dinov2": picture("Dinov2", **TRANSFORMER),
    "swin": picture("Swin", 32, image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4),
    "convnext": picture("ConvNext", 32, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "convnextv2": picture("ConvNextV2", 32, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "resnet": picture("ResNet", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    "regnet": picture("RegNet", 32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4),
    "mobilevit": picture("MobileViT", 32, image_size=32, hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 16],
                         num_attention_heads=2),
    "poolformer": picture("PoolFormer", 32, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_encoder_blocks=4),
    "segformer": partial(
        build, "SegformerForSemanticSegmentation", "Segformer", partial(pixels, 32), num_labels=CLASSES, hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16, sr_ratios=[4, 2, 2, 1],
    ),
    "dpt": partial(
        build, "DPTForSemanticSegmentation", "DPT", partial(pixels, 32), num_labels=CLASSES, image_size=32, patch_size=8,
        **{**SMALL, "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8, reassemble_factors=[4, 2, 1, 0.5],
        use_auxiliary_head=True, is_hybrid=False,
    ),
    "videomae": partial(
        build, "VideoMAEForVideoClassification", "VideoMAE",
        lambda: {"pixel_values": torch.randn(BATCH, 4, 3, 16, 16), "labels": torch.randint(0, CLASSES, (BATCH,))},
        **TRANSFORMER, num_frames=4, tubelet_size=2, num_labels=CLASSES,
    ),
    "efficientnet": picture("EfficientNet", 32, image_size=32, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320,
                            drop_connect_rate=0.0),
    "upernet": lambda **how: build("UperNetForSemanticSegmentation", "UperNet", partial(pixels, 64), **how, num_labels=CLASSES,
                                   hidden_size=8, use_auxiliary_head=False, backbone_config=backbone()),
    # pictures and texts
    "clip": partial(build, "CLIPModel", "CLIP", pairs, **TOWERS, projection_dim=8),
    "siglip": partial(build, "SiglipModel", "Siglip", pairs, **TOWERS),
    # sound
    "wav2vec2": partial(build, "Wav2Vec2ForSequenceClassification", "Wav2Vec2", partial(sound, 400), **WAVES),
    "wavlm": partial(build, "WavLMForSequenceClassification", "WavLM", partial(sound, 400), **WAVES, num_buckets=8, max_bucket_distance=8),
    "ast": partial(build, "ASTForAudioClassification", "AST",
                   lambda: {"input_values": torch.randn(BATCH, 24, 16), "labels": torch.randint(0, CLASSES, (BATCH,))}, **SMALL,
                   patch_size=8, max_length=24, num_mel_bins=16, frequency_stride=8, time_stride=8, num_labels=CLASSES),
    "hubert": partial(build, "HubertForSequenceClassification", "Hubert", partial(sound, 400), **WAVES),
    "wav2vec2_ctc": partial(
        build, "Wav2Vec2ForCTC", "Wav2Vec2",
        lambda: {"input_values": torch.randn(BATCH, 400), "labels": torch.randint(1, WORDS, (BATCH, 5))},
        **{**WAVES, "ctc_loss_reduction": "mean"},
    ),
    "whisper": partial(
        build, "WhisperForConditionalGeneration", "Whisper",
        lambda: {"input_features": torch.randn(BATCH, 8, 32), "labels": _words(), "use_cache": False}, vocab_size=WORDS, d_model=16,
        num_mel_bins=8, max_source_positions=16, max_target_positions=16, decoder_start_token_id=1, begin_suppress_tokens=None,
        **IDS, **BOTH_SIDES,
    ),
    "speech_to_text": partial(
        build, "Speech2TextForConditionalGeneration", "Speech2Text",
        lambda: {"input_features": torch.randn(BATCH, 16, 8), "labels": _words(), "use_cache": False}, vocab_size=WORDS, d_model=16,
        input_feat_per_channel=8, conv_channels=16, max_source_positions=16, max_target_positions=16, decoder_start_token_id=1, **IDS,
        **BOTH_SIDES,
    ),
    # time series
    "patchtst": partial(
        build, "PatchTSTForPrediction", "PatchTST",
        lambda: {"past_values": torch.randn(BATCH, 16, 3), "future_values": torch.randn(BATCH, 4, 3)}, num_input_channels=3,
        context_length=16, patch_length=4, patch_stride=4, prediction_length=4, d_model=16, num_attention_heads=4, num_hidden_layers=2,
        ffn_dim=32, loss="mse",
    ),
    "time_series_transformer": partial(
        build, "TimeSeriesTransformerForPrediction", "TimeSeriesTransformer", partial(series, 8, 4, 2), **TIMES
    ),
    "patchtsmixer": partial(
        build, "PatchTSMixerForPrediction", "PatchTSMixer",
        lambda: {"past_values": torch.randn(BATCH, 16, 3), "future_values": torch.randn(BATCH, 4, 3)}, num_input_channels=3,
        context_length=16, patch_length=4, patch_stride=4, prediction_length=4, d_model=8, num_layers=2, loss="mse",
    ),
    "autoformer": partial(build, "AutoformerForPrediction", "Autoformer", partial(series, 8, 4, 2), **TIMES, label_length=2),
    # detection, with a matching that is given
    "detr": partial(fitted, "DetrForObjectDetection", "Detr", 32, lambda: {
        "d_model": 16, **BOTH_SIDES, "num_queries": 5, "num_labels": CLASSES, "backbone_config": backbone()}),
    "yolos": partial(fitted, "YolosForObjectDetection", "Yolos", 16, lambda: {
        **TRANSFORMER, "image_size": [16, 16], "num_detection_tokens": 5, "num_labels": CLASSES}),
}  # fmt: skip


def unpadded() -> dict[str, Any]:
    """A language model's ids and labels alone: the mask is the causal one."""
    return {"input_ids": _words(), "labels": _words(), "use_cache": False}


def batched(**how: Any) -> Built:
    """Mixtral that copies each token's matrices, instead of bringing the tokens of an expert together."""
    module, inputs = ARCHITECTURES["mixtral"](**how)
    module.config._experts_implementation = "batched_mm"  # type: ignore[union-attr]
    return module, inputs


_VARIANTS: dict[str, Callable[..., Built]] = {
    "llama_unpadded": causal("Llama", unpadded),
    "mistral_unpadded": causal("Mistral", unpadded, sliding_window=3),
    "mixtral_batched": batched,
}
_FAMILIES = ("gpt2", "llama", "bert", "vit", "swin", "resnet", "convnext", "t5", "bart", "whisper", "mixtral", "mamba", "fnet")
MODELS = {name: partial(made, dropout=True) for name, made in (*((name, ARCHITECTURES[name]) for name in _FAMILIES), *_VARIANTS.items())}
