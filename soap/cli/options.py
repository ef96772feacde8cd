"""Options that several commands share, and the checks of their values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import TypedDict

from soap import api, outputs
from soap.api.float8 import SCALINGS
from soap.cli.command import OPTIONS, Parser
from soap.cluster.kinds import has_gpus
from soap.cluster.memory_budget import FIELD, read_budget, with_memory_budget
from soap.cluster.presets import LOCAL
from soap.cluster.topology import Topology
from soap.errors import StrategyError, TopologyError, asked
from soap.model.graph import SUM_DTYPES
from soap.search.record import MOST_FINALISTS
from soap.simulator.costs import COST_SOURCES
from soap.simulator.kernels import KERNELS
from soap.strategy.compression import Compression, parse
from soap.strategy.config import SyncConfig
from soap.strategy.named import check_name
from soap.strategy.sync import worded
from soap.strategy.sync_contracts import METHODS, words

MODEL_HELP = "a .pt2 file (torch.export.save, soap.export), or zoo:NAME[:SIZE][@BATCH]"
CLUSTER_HELP = (
    "a cluster.yaml, or a preset: local (this machine: its GPUs, or a few processes), local:N; one host (h100-8) or several "
    "(h100-4x8); a published cluster (p100-4x4); or emulated:HxD@RATE, such as emulated:4x1@200Mbit/s: this machine as H hosts with D "
    "devices each, for soap-run --emulate. "
    "An unknown name lists all presets"
)
AUTOCAST_HELP = "compute in this type what torch.autocast does; float16 with a scaled loss, as torch.amp.GradScaler does it"
LARGEST_COUNT = 10**9
ALPHA_BATCHES = 8
"""Default number of batches on which touched rows are counted: batches differ by a few percent only, because their rows are many."""


class Reading(TypedDict):
    """Arguments of ``api.load`` that change the graph, and so what a strategy fits."""

    batch_dims: Mapping[str, int] | None
    batch_norm: str
    autocast: str | None
    autocast_device: str
    matmul_precision: str | None
    sum_dtype: str | None
    imports: Sequence[str]


def add_model(parser: Parser, *, positional: bool) -> None:
    """Add MODEL, or ``--model MODEL``, and the options for reading it."""
    if positional:
        parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    else:
        parser.add_argument("--model", metavar="MODEL", required=True, help=MODEL_HELP)
    add_reading(parser)


def add_reading(parser: Parser) -> None:
    """Add the options for reading a model."""
    parser.add_repeatable(
        "--batch-dim",
        metavar="INPUT=DIM",
        type=batch_dim,
        help="dimension of an input that counts samples, where it is not 0; -1 for none (repeatable)",
    )
    parser.add_argument(
        "--batch-norm",
        choices=["global", "local"],
        default="global",
        help="normalise by the whole batch, as one process does, or each part of it by itself (default %(default)s)",
    )
    parser.add_argument("--autocast", choices=["bfloat16", "float16"], help=AUTOCAST_HELP)
    precision = "torch.set_float32_matmul_precision: below highest, GPUs multiply float32 matrices in TF32 (default: torch's, highest)"
    parser.add_argument("--matmul-precision", choices=["highest", "high", "medium"], help=precision)
    text = (
        "type in which partial results of split operators are made, sent and added up if their sum is of a 16-bit type: float32, or the "
        "sum's own, as in Megatron-LM (default: as the strategy was made; else float32 on CPUs, own on GPUs)"
    )
    parser.add_argument("--sum-dtype", choices=tuple(SUM_DTYPES), help=text)
    parser.add_repeatable(
        "--import",
        metavar="MODULE",
        dest="imports",
        type=module_name,
        help="import this module first, on every rank: it defines custom operators of the model (repeatable)",
    )


def add_float8(parser: Parser) -> None:
    """``--float8 SCALING``, of commands that run nothing."""
    text = "price linear layers in float8, scaled so, as Transformer Engine and torchao have them; soap-run computes in the model's type"
    parser.add_argument("--float8", choices=tuple(SCALINGS), help=text)


def add_cluster(parser: Parser, note: str = "", *, several: bool = False) -> None:
    """Add ``--cluster SPEC``, by default this machine, or None if ``note`` says what else. ``several``: its value is a list, or None."""
    action, default = "append" if several else "store", None if note else LOCAL
    parser.add_argument("--cluster", metavar="SPEC", default=default, action=action, help=f"{CLUSTER_HELP} ({note or f'default {LOCAL}'})")
    text = "measure this machine again, if the cluster is made of it: rates and links are measured once, failures kept for a day"
    parser.add_argument("--measure-again", action="store_true", help=text)


def add_costs(parser: Parser) -> None:
    """Add ``--costs SOURCE``."""
    parser.add_argument(
        "--costs",
        choices=COST_SOURCES,
        default=COST_SOURCES[0],
        help="auto: what soap-profile has measured for these devices, estimates for the rest, corrected by what soap-compare --calibrate "
        "has kept; estimate: estimates as they are (default %(default)s)",
    )


def add_kernels(parser: Parser) -> None:
    """Add ``--kernels KIND``."""
    parser.add_argument(
        "--kernels",
        default=KERNELS[0],
        metavar="KIND",
        help="what runs on GPUs, and what it keeps: each call by itself, as soap-run has it (eager); activations, norms, softmax and "
        "losses in one kernel an operator, as torch.compile makes them (compiled), or those that Apex, Megatron and Transformer Engine "
        "have by hand (fused); +overlap: products and attention run in parts with the collectives of what they gather and scatter; "
        "+flash2: FlashAttention-2 on Hopper, too, not cuDNN's; other than eager ones are estimated (default %(default)s)",
    )


def add_json(parser: Parser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def add_backend(parser: Parser) -> None:
    """``--backend NAME``."""
    parser.add_argument("--backend", choices=["auto", "gloo", "nccl"], default="auto", help="auto: nccl on GPUs, gloo on CPUs")


def add_explain(parser: Parser) -> None:
    """``--explain``."""
    text = "say for each operator what it costs beside data parallelism, what setting it back would do, and what binds it"
    parser.add_argument("--explain", action="store_true", help=text)


def add_outputs(parser: Parser, *, timeline: str) -> None:
    """Add ``--timeline FILE`` and ``--json``."""
    parser.add_output("--timeline", kind=outputs.TIMELINE, help=timeline)
    add_json(parser)


def add_rows(parser: Parser) -> None:
    """Add the options about sparse parameters: ``--data``, ``--alpha-batches``, ``--alpha``."""
    parser.add_argument(
        "--data",
        metavar="PKG.MOD:CALLABLE",
        type=data_spec,
        help="count on these batches (as soap-run's) how many rows of sparse parameters a batch touches (default: on the example inputs)",
    )
    parser.add_argument(
        "--alpha-batches", metavar="N", type=positive, default=ALPHA_BATCHES, help="of so many batches of --data (default %(default)s)"
    )
    whole = "what soap-preprocess wrote: count over all of it, and make zoo:dlrm's tables as long as its dictionaries"
    parser.add_argument("--alpha-from", metavar="OUT", help=whole)
    parser.add_repeatable(
        "--alpha",
        metavar="GLOB=SHARE",
        type=alpha,
        help="share of a sparse parameter's rows that a batch touches, instead of what is counted: 'embedding*=0.05' (repeatable)",
    )


def reading(args: argparse.Namespace, topology: Topology | None) -> Reading:
    """Arguments of ``api.load``, from the options of ``add_reading``, for a model that will be trained on these devices. Sums are as
    ``--strategy`` has them, if there is one and nothing else is asked for; files that do not say so are from when all were in float32."""
    strategy = getattr(args, "strategy", None)
    sum_dtype = args.sum_dtype or (api.load_strategy_header(strategy).sum_dtype or "float32" if strategy else None)
    return Reading(
        batch_dims=batch_dims(args.batch_dim),
        batch_norm=args.batch_norm,
        autocast=args.autocast,
        autocast_device="cuda" if topology is not None and has_gpus(topology) else "cpu",
        matmul_precision=args.matmul_precision,
        sum_dtype=sum_dtype,
        imports=args.imports,
    )


def reading_options(args: argparse.Namespace) -> list[str]:
    """The options of ``add_reading`` that were given, to be written down as a part of another command."""
    words = [word for name, dim in args.batch_dim for word in ("--batch-dim", f"{name}={dim}")]
    words += ["--batch-norm", args.batch_norm] if args.batch_norm != "global" else []
    words += ["--autocast", args.autocast] if args.autocast else []
    words += ["--matmul-precision", args.matmul_precision] if args.matmul_precision else []
    words += ["--sum-dtype", args.sum_dtype] if args.sum_dtype else []
    return words + [word for name in args.imports for word in ("--import", name)]


def batch_dims(pairs: Sequence[tuple[str, int]]) -> Mapping[str, int] | None:
    """The repeated ``--batch-dim`` options as one mapping; None if there are none."""
    return dict(pairs) or None


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def positive_number(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not (isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a number above 0")
    return value


def not_negative_number(text: str) -> float:
    """A finite number of at least 0."""
    value = _number(text)
    if not (isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a number of at least 0")
    return value


def batch_dim(text: str) -> tuple[str, int]:
    """Parse ``input=1``."""
    name, found, number = text.partition("=")
    try:
        dim = int(number)
    except ValueError:
        dim = -2
    if not found or not name or dim < -1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected INPUT=DIM, such as tokens=1, or tokens=-1 for no batch")
    return name, dim


def constraint(text: str) -> tuple[str, str]:
    """Parse ``layers.*=sample:4``. It is checked later, when the model is known."""
    pattern, found, spec = text.rpartition("=")
    if not found or not pattern or not spec:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected GLOB=SPEC, such as 'layers.*=sample:4' or '*=@3'")
    return pattern, spec


def sync_method(text: str) -> SyncConfig:
    """Parse ``parameter_server:4+local``, a way of synchronizing a parameter."""
    way, offload, more = text.partition("+offload")
    rest, local, end = way.partition("+local")
    method, found, partitions = rest.partition(":")
    number = partitions.isascii() and partitions.isdigit() and len(partitions) < 10  # of thousands of digits, int() raises
    if end or more or (found and not number):
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not allowed; expected one of {_sync_forms()}")
    try:
        sync = worded(method, int(partitions) if found else 1, "host" if local else "none")
        return replace(sync, offload=True) if offload else sync
    except StrategyError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: {error}; the forms are {_sync_forms()}") from None


def builtin(text: str) -> str:
    """The name of a strategy, such as ``megatron+zero1``."""
    try:
        check_name(text)
    except StrategyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def memory_budget(text: str) -> str:
    """``80%`` or ``20GB``: how much of a device's memory plans may use."""
    try:
        read_budget(text)
    except TopologyError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(f"{asked(FIELD)} ").removeprefix(f"{asked(FIELD)}: ")) from None
    return text


def add_memory_budget(parser: Parser) -> None:
    """``--memory-budget`` and ``--batches``."""
    text = "how much of each device's memory plans may use: a share such as 80%%, or a size such as 20GB (default: all that there is)"
    parser.add_argument(OPTIONS[FIELD], metavar="SHARE", type=memory_budget, help=text)
    text = "what each device is given of a batch: all of it (default), or the samples that it reads, as where ranks read data by samples"
    parser.add_argument("--batches", choices=("whole", "parts"), default="whole", help=text)


def cluster_of(args: argparse.Namespace, spec: str) -> Topology:
    """The cluster of this name or file, with the options of ``add_memory_budget``."""
    return with_memory_budget(api.load_cluster(spec, own_samples=args.batches == "parts"), args.memory_budget)


def _sync_forms() -> str:
    """What ``sync_method`` can parse, by what each method's contract allows."""
    found = []
    for word in words():
        own = [contract for contract in METHODS if word in (contract.word, contract.host_word)]
        partitions = "[:PARTITIONS]" if any(contract.most_partitions > 1 for contract in own) else ""
        local = "[+local]" if any("host" in contract.within and not contract.host_word for contract in own) else ""
        offload = "[+offload]" if any(contract.offloads for contract in own) else ""
        found.append(word + partitions + local + offload)
    return ", ".join(found)


def lossy_method(text: str) -> Compression:
    """Parse ``rgc:0.001``, a way of compressing gradients."""
    try:
        return parse(text)
    except StrategyError as error:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not allowed: {error}") from None


def add_compressed_training(parser: Parser, when: str = "", lossy: str = "") -> None:
    """Clipping, and what a plan that compresses has beside the optimizer. ``when``, ``lossy``: what helps begin with."""
    parser.add_argument("--clip-norm", metavar="X", type=positive_number, help=f"{when}scale gradients to at most this global norm")
    parser.add_argument(
        "--correct-momentum",
        metavar="M",
        type=momentum,
        help=f"{lossy}{when}momentum of all parameters (with --optimizer sgd); to compressed ones it is applied before compression, and "
        "not to what was sent (DGC)",
    )
    parser.add_argument(
        "--warm-up",
        metavar="DENSE[,EACH]",
        type=warm_up,
        default=(0, 0),
        help=f"{lossy}{when}of compressed parameters: DENSE steps send everything, then EACH steps send 25%%, 6.25%%, 1.6%%, 0.4%%, 0.1%% "
        "(default: none)",
    )


def warm_up(text: str) -> tuple[int, int]:
    """Parse ``100`` or ``100,50``: dense steps, and steps at each density of a warm-up."""
    dense, comma, each = text.partition(",")
    try:
        return not_negative(dense), not_negative(each) if comma else 0
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not allowed; expected DENSE or DENSE,EACH steps, such as 100,50") from None


def share(text: str) -> float:
    """A share from 0 to 1."""
    value = not_negative_number(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a share from 0 to 1, such as 0.9")
    return value


def momentum(text: str) -> float:
    """A momentum, from 0 to below 1."""
    value = not_negative_number(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a momentum from 0 to below 1, such as 0.9")
    return value


def finalists(text: str) -> int:
    """Parse how many strategies to run: at most as many as a search keeps; 0 for none."""
    count = not_negative(text)
    if count > MOST_FINALISTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected at most {MOST_FINALISTS} strategies")
    return count


def data_spec(text: str) -> str:
    """Check ``package.module:callable`` or ``zoo:NAME``. It is imported later."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected PACKAGE.MODULE:CALLABLE, such as mydata:batches")
    return text


def module_name(text: str) -> str:
    """Check a dotted name. It is imported later."""
    if not all(part.isidentifier() for part in text.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a module, such as mypackage.operators")
    return text


def alpha(text: str) -> tuple[str, float]:
    """Parse ``embedding*=0.05``. Whether a batch can touch so many rows is checked when the model is known."""
    pattern, found, number = text.rpartition("=")
    share = _number(number)
    if not found or not pattern or not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected GLOB=SHARE, such as 'embedding*=0.05', above 0 and at most 1")
    return pattern, share


def _number(text: str) -> float:
    """The number that a text is; none (NaN) for other texts."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def part_of_the_box(text: str) -> float:
    """A number above 0 and at most 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a number above 0 and at most 1")
    return value


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value > LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a whole number of at most {LARGEST_COUNT}")
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a whole number of at least {least}")
    return value
