"""``hf:CONFIG``: a model of the ``transformers`` library from its configuration alone, with example inputs that have labels.

The configuration is a model type that the library knows (``gpt2``, ``llama``) with its default sizes, or a folder or file with
``config.json``. Nothing is downloaded, and no code of such a folder is run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from soap.errors import ModelError, first_line

if TYPE_CHECKING:
    import torch
    from torch import nn

PREFIX = "hf:"
SEQUENCE = 512
"""Default length of texts, if the model takes such long ones."""
LABELLED = 0.15
"""Share of words that masked language models are to find (Devlin et al., BERT, 2019)."""
IGNORED = -100
"""The library's label of what does not count."""


@dataclass(frozen=True)
class Sizes:
    """``sequence``: None for the default."""

    batch: int
    sequence: int | None


Inputs = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class Task:
    """What a model is trained for. ``auto``: the library's class that makes the model of a configuration. ``inputs``: with labels."""

    auto: str
    inputs: Callable[[Any, Sizes], Inputs]


def _texts(config: Any, sizes: Sizes) -> Inputs:
    words = _words(config, sizes)
    return {"input_ids": words, "labels": words.clone()}


def _masked(config: Any, sizes: Sizes) -> Inputs:
    import torch

    words = _words(config, sizes)
    labelled = torch.rand(words.shape) < LABELLED
    labelled[:, 0] = True  # each sample has one at least
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words.where(labelled, IGNORED)}


def _classified(config: Any, sizes: Sizes) -> Inputs:
    import torch

    words = _words(config, sizes)
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.randint(config.num_labels, (sizes.batch,))}


def _pictures(config: Any, sizes: Sizes) -> Inputs:
    import torch

    found = getattr(config, "image_size", None) or 224
    height, width = (found, found) if isinstance(found, int) else found
    pixels = torch.randn(sizes.batch, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": pixels, "labels": torch.randint(config.num_labels, (sizes.batch,))}


TASKS: Mapping[str, Task] = {
    "seq2seq-lm": Task("AutoModelForSeq2SeqLM", _texts),
    "masked-lm": Task("AutoModelForMaskedLM", _masked),
    "causal-lm": Task("AutoModelForCausalLM", _texts),
    "image-classification": Task("AutoModelForImageClassification", _pictures),
    "sequence-classification": Task("AutoModelForSequenceClassification", _classified),
}
"""In the order in which they are tried where neither the user nor the configuration names one."""


def _words(config: Any, sizes: Sizes) -> torch.Tensor:
    import torch

    most = _longest(config)
    if sizes.sequence is not None and most is not None and sizes.sequence > most:
        raise ModelError(f"--sequence {sizes.sequence}: {config.model_type} takes at most {most} words; expected no more, or --set")
    length = sizes.sequence or min(SEQUENCE, most or SEQUENCE)
    return torch.randint(config.get_text_config().vocab_size, (sizes.batch, length))


def _longest(config: Any) -> int | None:
    """Words that a model has positions for; None if it does not count them."""
    text = config.get_text_config()
    found = getattr(text, "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        return None
    offset = (text.pad_token_id or 0) + 1 if "roberta" in text.model_type else 0  # RoBERTa's positions begin behind its padding's
    return max(1, found - offset)


def library_model(
    spec: str, *, task: str | None, settings: Mapping[str, Any], sizes: Sizes, initialize: bool
) -> tuple[nn.Module, Inputs, str]:
    """The model behind ``hf:CONFIG`` in training mode, its example inputs, and the task. ``settings``: of the configuration, by name.
    ``initialize``: give parameters random values as the library does; else they have none (``soap.without_weights``).

    ModelError in one line if the library is missing, the configuration is none, or no task that has a loss takes it.
    """
    config = _config(spec, settings)
    name, kind = _task(spec, config, task)
    from soap.tracing.without_values import without_weights

    try:
        with nullcontext() if initialize else without_weights():
            model: nn.Module = getattr(_library(spec), kind.auto).from_config(config).train()
        inputs = kind.inputs(config, sizes)
    except ModelError:
        raise
    except Exception as cause:
        why = f"{type(cause).__name__}: {first_line(cause)}"
        raise ModelError(f"{spec}: no model of this configuration ({why}); expected settings that go together") from cause
    return model, inputs, name


def _library(spec: str) -> ModuleType:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported: nothing is downloaded
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError as cause:
        raise ModelError(f"{spec}: {first_line(cause)}; expected the library of these models: pip install transformers") from cause
    library: ModuleType = transformers
    return library


def _config(spec: str, settings: Mapping[str, Any]) -> Any:
    """The configuration, with the settings."""
    given, library = spec.removeprefix(PREFIX), _library(spec)
    path = Path(given)
    where = path / "config.json" if path.is_dir() else path
    if where.is_file():

        def make(**options: Any) -> Any:
            return library.AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False, **options)
    else:
        _require_type(spec, given, library, path)

        def make(**options: Any) -> Any:
            return library.AutoConfig.for_model(given, **options)

    try:
        plain = make()
        known = sorted(key for key in plain.to_dict() if key != "model_type")
        for key in settings:
            if not hasattr(plain, key) or key == "model_type":
                near = get_close_matches(key, known, 3) or known[:8]
                raise ModelError(f"--set {key}: {type(plain).__name__} has no such setting; expected one such as {', '.join(near)}")
        config = make(**settings)
    except ModelError:
        raise
    except Exception as cause:
        why = f"{type(cause).__name__}: {first_line(cause)}"
        raise ModelError(f"{spec}: {why}; expected a configuration that transformers {library.__version__} reads") from cause
    text = config.get_text_config()
    for own in {id(one): one for one in (config, text)}.values():
        if getattr(own, "use_cache", None):
            own.use_cache = False  # caches are for generating
        if getattr(own, "is_encoder_decoder", False) and getattr(own, "decoder_start_token_id", None) is None:
            own.decoder_start_token_id = own.pad_token_id or 0  # labels are shifted behind it
    return config


def _require_type(spec: str, given: str, library: ModuleType, path: Path) -> None:
    known = list(library.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    if given in known:
        return
    if path.exists():
        raise ModelError(f"{spec}: the folder has no config.json; expected a folder or file with a configuration of transformers")
    near = get_close_matches(given.split("/")[-1].lower(), known, 3) or ["gpt2", "llama", "bert"]
    raise ModelError(
        f"{spec}: neither a folder or file that is there, nor a model type of transformers {library.__version__}; expected one such as "
        f"{', '.join(near)}, or a folder with config.json (nothing is downloaded)"
    )


def _task(spec: str, config: Any, wanted: str | None) -> tuple[str, Task]:
    """The task that was asked for, or that of the class that the configuration names, or the first that takes it."""
    library = _library(spec)
    able: dict[str, str] = {}
    for name, task in TASKS.items():
        mapping = getattr(library, task.auto)._model_mapping
        if type(config) in mapping and (name != "seq2seq-lm" or getattr(config, "is_encoder_decoder", False)):
            found = mapping[type(config)]
            able[name] = (found[0] if isinstance(found, tuple) else found).__name__
    if wanted is not None and wanted not in able:
        raise ModelError(f"{spec}: no {wanted} model of {config.model_type}; expected {_listed(able)}")
    if not able:
        raise ModelError(
            f"{spec}: {config.model_type} has no model with a loss for {', '.join(TASKS)}; expected package.module:function, which returns "
            "your module and its inputs"
        )
    named = [name for name, own in able.items() if own in (getattr(config, "architectures", None) or ())]
    chosen = wanted or (named or list(able))[0]
    return chosen, TASKS[chosen]


def _listed(able: Mapping[str, str]) -> str:
    return f"one of {', '.join(able)}" if able else "package.module:function: no task that has a loss takes it"
