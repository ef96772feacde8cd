"""``soap-export``: a ``.pt2`` file of a function's module, or of a configuration of the ``transformers`` library.

The configuration is a model type that the library knows (``gpt2``, ``llama``) with its default sizes, or a folder or file with
``config.json``. Nothing is downloaded, and no code of such a folder is run.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from soap import api, outputs
from soap.cli.command import Parser, UsageError, entry_point
from soap.cli.options import module_name, positive
from soap.cli.updating import VALUES, imported, setting
from soap.errors import ModelError, did_you_mean, first_line
from soap.units import format_bytes

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


FLOATING = ("float32", "float64", "bfloat16", "float16")
WHOLE = ("int64", "int32", "uint8", "bool")
FORM = "NAME=TYPE[SIZE,…], whole numbers with <N behind it, such as 'ids=int64[8,128]<50257'"
_INPUT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<dtype>\w+)\[(?P<shape>[0-9,]*)\](?:<(?P<below>[0-9]{1,18}))?", re.ASCII)
MOST_ELEMENTS = 2**32


@dataclass(frozen=True)
class ExampleInput:
    """``below``: whole numbers are drawn from 0 to below that; 1: they are zeros."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    below: int = 1

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{','.join(map(str, self.shape))}]"


def example_input(text: str) -> ExampleInput:
    """Parse one ``--input``."""
    found = _INPUT.fullmatch("".join(text.split()))
    if found is None:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not allowed; expected {FORM}")
    dtype, below, sizes = found["dtype"], found["below"], found["shape"].split(",") if found["shape"] else []
    if dtype not in (*FLOATING, *WHOLE):
        raise argparse.ArgumentTypeError(f"type {dtype!r} in {text[:100]!r}; expected one of {', '.join((*FLOATING, *WHOLE))}")
    if not all(0 < len(size) < 10 for size in sizes):
        raise argparse.ArgumentTypeError(f"sizes [{found['shape'][:50]}] in {text[:100]!r}; expected {FORM}")
    shape = tuple(map(int, sizes))
    if 0 in shape or prod(shape) > MOST_ELEMENTS:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} has {prod(shape)} elements; expected 1 to {MOST_ELEMENTS}")
    if below is not None and (dtype in FLOATING or int(below) < 1):
        raise argparse.ArgumentTypeError(f"'<{below}' in {text[:100]!r}; expected a limit of at least 1, behind whole numbers alone")
    return ExampleInput(found["name"], dtype, shape, 1 if below is None else int(below))


def drawn(inputs: Sequence[ExampleInput], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tensors of these types and shapes: floating-point numbers of a normal distribution, whole ones below their limit."""
    import torch

    found = {}
    for own in inputs:
        dtype: torch.dtype = getattr(torch, own.dtype)
        if own.dtype in FLOATING:
            found[own.name] = torch.randn(own.shape, generator=generator).to(dtype)
        else:
            found[own.name] = torch.randint(own.below, own.shape, generator=generator).to(dtype)
    return found


PROG = "soap-export"
OUTPUT = "model.pt2"
RETURNS = "(module, args), (module, args, kwargs), or with --input the module alone"
BATCH = 8
SEED = 0


def make_parser() -> Parser:
    """The command's options."""
    parser = Parser(
        PROG,
        "Write a training model to a .pt2 file, which the other commands read.",
        f"{PROG} mypackage.models:small -o model.pt2\n  {PROG} hf:gpt2 --set n_layer=4 --batch 8 --sequence 256",
    )
    text = (
        f"package.module:function, called without arguments, which returns {RETURNS}; or {PREFIX}CONFIG: a model type of transformers "
        f"({PREFIX}llama), or a folder or file with its config.json"
    )
    parser.add_argument("source", metavar="SOURCE", help=text)
    parser.add_output("-o", "--output", kind=outputs.MODEL, default=OUTPUT, help="where the model goes (default %(default)s)")
    own = parser.add_argument_group("of a function")
    text = f"an example input of the module by the name of forward's argument: {FORM} (0 otherwise) (repeatable)"
    own.add_argument("--input", metavar="NAME=TYPE[SIZES]", dest="inputs", type=example_input, action="append", default=[], help=text)
    text = "which of the module's outputs is the loss, by name or number, such as loss, 1 or out.0 (default: loss, else the first)"
    own.add_argument("--loss", metavar="FIELD", help=text)
    library = parser.add_argument_group(f"of {PREFIX}CONFIG")
    text = "what it is trained for (default: what the configuration names, else the first of these that there is)"
    library.add_argument("--task", choices=list(TASKS), help=text)
    library.add_argument("--batch", metavar="N", type=positive, help=f"samples (default {BATCH})")
    library.add_argument("--sequence", metavar="N", type=positive, help="words of each sample (default 512, or fewer if it has fewer)")
    text = f"another value in the configuration: {VALUES} (repeatable)"
    library.add_argument("--set", metavar="KEY=VALUE", dest="settings", type=setting, action="append", default=[], help=text)
    text = "draw weights as the library does (default: none: soap-run then needs --weights, and nothing large is allocated)"
    library.add_argument("--initialize", action="store_true", help=text)
    parser.add_argument("--dynamic-batch", action="store_true", help="leave the number of samples open, for a smaller last batch")
    parser.add_argument("--no-verify", action="store_true", help="do not compare a step of the file with one of the module")
    text = "this module defines custom operators of the model; commands then need --import, too (repeatable)"
    parser.add_repeatable("--import", metavar="MODULE", dest="imports", type=module_name, help=text)
    return parser


def execute(args: argparse.Namespace) -> int:
    """Make the module and its inputs, export, report."""
    _refuse_options(args)
    import torch

    torch.manual_seed(SEED)
    name, field = args.source, args.loss
    given: tuple[Sequence[Any], Mapping[str, Any]]
    if args.source.startswith(PREFIX):
        settings = dict(args.settings)
        sizes = Sizes(args.batch or BATCH, args.sequence)
        module, inputs, task = library_model(args.source, task=args.task, settings=settings, sizes=sizes, initialize=args.initialize)
        given = ((), inputs)
        name, field = f"{args.source} ({task})", "loss"
    else:
        module, positional, named = _made(args)
        given = (positional, named)
    chosen = api.export(
        module, *given, path=args.output, loss=None if field is None else loss_field(field), dynamic_batch=args.dynamic_batch,
        verify=not args.no_verify, imports=args.imports,
    )
    print(_report(args, name, module, given, chosen if field is None else f"output {field}"))
    return 0


def _refuse_options(args: argparse.Namespace) -> None:
    """UsageError if options of one kind of source are given for the other, or twice."""
    if args.source.startswith(PREFIX):
        wrong = [option for option, value in (("--input", args.inputs), ("--loss", args.loss)) if value]
        expected = f"package.module:function, or none of them for {PREFIX}CONFIG, which has inputs and a loss"
    else:
        known = ("task", "batch", "sequence", "settings", "initialize")
        wrong = [f"--{name.replace('settings', 'set')}" for name in known if getattr(args, name)]
        expected = f"{PREFIX}CONFIG; a function says this itself"
    if wrong:
        raise UsageError(f"{wrong[0]} with {args.source}; expected it with {expected}")
    for option, names in (("--input", [own.name for own in args.inputs]), ("--set", [key for key, _ in args.settings])):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"{option} {twice} is given twice; expected it once")


def _made(args: argparse.Namespace) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    """What the function returns, with the inputs of ``--input`` where it returns a module alone. ModelError in one line."""
    from torch import nn

    from soap.tracing.torch_parts import user_line

    function: Callable[[], Any] = imported(args.source, "SOURCE", f"returns {RETURNS}", ModelError)
    try:
        made = function()
    except (Exception, SystemExit) as cause:
        place = user_line(cause)
        where = f" at {place}" if place else ""
        raise ModelError(f"{args.source} raised {type(cause).__name__}{where}: {first_line(cause)}; expected {RETURNS}") from cause
    module, *rest = made if isinstance(made, (tuple, list)) and made else (made,)
    if not isinstance(module, nn.Module) or len(rest) > 2:
        found = f"({', '.join(type(own).__name__ for own in made)})" if isinstance(made, (tuple, list)) else type(made).__name__
        raise ModelError(f"{args.source} returned {found}; expected {RETURNS}")
    if not rest:
        if not args.inputs:
            raise ModelError(f"{args.source} returned a module without inputs; expected --input for each argument of forward: {FORM}")
        import torch

        return module, (), drawn(args.inputs, torch.Generator().manual_seed(SEED))
    if args.inputs:
        raise ModelError(f"{args.source} returned inputs of its own; expected no --input, or a function that returns the module alone")
    positional, named = rest[0], rest[1] if len(rest) == 2 else {}
    if isinstance(positional, Mapping) and len(rest) == 1:
        positional, named = (), positional
    if not isinstance(positional, (tuple, list)) or not isinstance(named, Mapping):
        raise ModelError(
            f"{args.source} returned arguments {type(positional).__name__} and {type(named).__name__}; expected "
            "a tuple of positional ones, then a dictionary of named ones"
        )
    return module, tuple(positional), dict(named)


def loss_field(name: str) -> Callable[[Any], Any]:
    """Takes a part of a module's output by attributes, keys and numbers: ``loss``, ``1``, ``out.0``. ModelError if there is none."""

    def take(output: Any) -> Any:
        found = output
        for step in name.split("."):
            found = _step(found, step, name)
        return found

    return take


def _step(output: Any, step: str, name: str) -> Any:
    known: Sequence[str]
    if isinstance(output, Mapping):
        known = [*map(str, output)]
        found = output.get(step)
    elif isinstance(output, (tuple, list)) and not hasattr(output, "_fields"):
        known = [str(number) for number in range(len(output))]
        found = output[int(step)] if step in known else None
    else:
        known = [*getattr(output, "_fields", ())]
        found = getattr(output, step, None)
    if found is None:
        expected = f"one of {', '.join(known)}{did_you_mean(step, known)}" if known else "a module that returns several"
        kind = type(output).__name__.removeprefix("Fake")  # of tensors while they are traced
        raise ModelError(f"--loss {name}: the output is a {kind} without {step!r}; expected {expected}")
    return found


def _report(args: argparse.Namespace, name: str, module: nn.Module, given: tuple[Sequence[Any], Mapping[str, Any]], loss: str) -> str:
    import torch

    parameters = {id(own): own for own in module.parameters()}.values()
    count = sum(own.numel() for own in parameters)
    without = " without values" if any(own.is_meta for own in parameters) else ""
    bound = inspect.signature(module.forward).bind(*given[0], **given[1]).arguments
    shapes = [
        f"{name}{torch.utils._pytree.keystr(path)} {str(own.dtype).removeprefix('torch.')}[{','.join(map(str, own.shape))}]"
        for name, value in bound.items()
        for path, own in torch.utils._pytree.tree_flatten_with_path(value)[0]
        if isinstance(own, torch.Tensor)
    ]
    size = format_bytes(Path(args.output).stat().st_size)
    lines = [
        f"{name}: {type(module).__name__}, {count:,} parameters{without}",
        f"inputs: {', '.join(shapes)}",
        *([f"loss: {loss}"] if loss else []),
        f"wrote {args.output} ({size}); next: soap-search {args.output}",
    ]
    return "\n".join(lines)


main = entry_point(make_parser, execute)

if __name__ == "__main__":
    sys.exit(main())
