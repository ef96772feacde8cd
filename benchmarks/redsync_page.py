"""The page of ``benchmarks.redsync``: gains, shares of a step, where methods change sides, and where equations (1) and (2) meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date

import soap
from benchmarks.redsync_cells import MEASURED, RADIX_PASSES, Cell, measured_passes
from benchmarks.redsync_equations import MOST, Gradient, dense_ns, sparse_ns, worthwhile

PAPER = {
    "alexnet": "about 3x at 4 to 16 GPUs", "vgg16": "about 2x at 4 to 64", "lstm_ptb": "about 3x at 2 to 16", "resnet50": "at most 1.2x",
}  # fmt: skip
"""What the text says of its Figures."""
LSTM = "lstm_ptb"
HEAD = f"""# RedSync's clusters, simulated

Written by `python -m benchmarks.redsync --results FILE --write docs/results/redsync.md` on {date.today():%Y-%m-%d}. Fang et al., JPDC 2019,
on the presets `piz-daint-N` (10 GB/s and 1 us to the network, all paths free) and `muradin`. Every figure is a prediction from
data sheets; none is fitted, and nothing was run on such machines.

Speed-ups are over all-reduced gradients, in buckets behind the backward pass, at NCCL's prices. The paper's baseline is
Horovod of 2018; what of the network its sums reached is not known here. Compressed are all parameters that the policy names,
at a density of 0.1%, also where that does not pay: a search leaves those alone. All-gathers are priced as direct exchanges. Of
`lstm_ptb` (encoder and decoder tied, as there) ranks clip their gradients, so that selecting waits for the backward pass.
Shares are of RGC's step; selecting and sending overlap with the backward pass in part. On one GPU compression is forced, as the
paper has it: by itself SOAP leaves a gradient with a single reader as it is.

*Naive* RGC selects exactly, by a radix select of all elements. Its first figure has the paper's own measurement (section 2.1: trimmed
top-k is {MEASURED} times as fast on 64 M elements), as {measured_passes():.0f} passes over memory. The second lets the whole GPU make the
{RADIX_PASSES} passes that a radix select takes. Between them lies one cause: until 1.12 PyTorch's `topk` gave a row to a single block
(github.com/pytorch/pytorch/pull/71081).

What the paper says, net by net, and nothing gained elsewhere:
"""


def page(cells: Sequence[Cell], gradients: Mapping[str, Mapping[str, Sequence[Gradient]]]) -> str:
    """The page as Markdown. ``gradients``: net -> method -> what is compressed, for the equations."""
    ordered = sorted(cells, key=lambda own: (list(PAPER).index(own.net), own.devices))
    here, there = ([own for own in ordered if own.cluster == cluster] for cluster in ("piz-daint", "muradin"))
    lines = [*HEAD.splitlines(), "", *(f"- {net}: {said}" for net, said in PAPER.items()), "- on one GPU compression is slower than dense"]
    lines += ["- naive RGC is slower than dense", "- ASQ loses to RGC for the LSTM below 16 GPUs, and wins for CNNs", ""]
    lines += FOUND.strip().splitlines()
    lines += [*gains(here, "Piz Daint: a P100 in each host"), *gains(there, "Muradin: TITAN V in one host"), *shares(here)]
    return "\n".join([*lines, *sides(here), *equations(gradients), ""])


FOUND = """
Here the LSTM gains nearly as much (1.5 times at 2 GPUs, 2.1 to 2.5 at 4 to 64), AlexNet 1.02 to 1.2 times from 4 GPUs on, VGG-16 and
ResNet-50 nothing. On one GPU compression is slower for all nets, naive RGC is so everywhere. What differs, and why:

- *AlexNet and VGG-16 gain less.* At NCCL's prices dense sums hide behind the backward pass: VGG-16's step grows by 0.7 ms from one GPU
  to 128. Where nothing overlaps, in equations (1) and (2), RGC's synchronization of VGG-16 takes a fifth of the dense one's at 16 GPUs.
- *ASQ is behind RGC for CNNs, too*, where the paper has it ahead: dense layers hold most of their parameters, and in these the policy
  searches in every step with ASQ, in every fifth without. For convolutions both cost the same.
- *ASQ does not pass RGC for the LSTM, neither near 16 GPUs nor up to 512.* Selections are priced as torch's kernels took them on an H200
  ([selection.md](selection.md)), with this GPU's memory and launches: for a matrix of 6000 x 1500 a search 4.0 ms, a sampled one 1.5 on
  average, an exact one 2.1. The paper's own kernels search in a few passes. At 16 GPUs ASQ sends 1.1 MB less of that matrix, which these
  links carry in 0.1 ms. By the same prices exact selection by the whole GPU is level with RGC, and ahead for the LSTM.
- *At 128 GPUs* restoring is the largest part of ResNet-50's overhead, as the paper says; sending and restoring are that of the LSTM.
  Sampled selections are padded to 2 k elements, so both are twice what k elements would take: from 256 on exact selection is ahead.
"""


def gains(cells: Sequence[Cell], title: str) -> Iterator[str]:
    """Times, and how many times as fast as dense ones they are."""
    yield from ("", f"## {title}", "")
    yield "| net | GPUs | dense | RGC | speed-up | ASQ's | naive RGC's | by the whole GPU |"
    yield "|---|---|---|---|---|---|---|---|"
    for own in cells:
        times = f"{own.times_ns['dense'] / 1e6:.1f} ms | {own.times_ns['RGC'] / 1e6:.1f} ms"
        ratios = " | ".join(f"{own.gain(name):.2f}" for name in ("RGC", "ASQ", "naive", "naive, whole GPU"))
        yield f"| {own.net} | {own.devices} | {times} | {ratios} |"


def shares(cells: Sequence[Cell]) -> Iterator[str]:
    """Where RGC's step goes."""
    yield from ("", "## Where RGC's step goes, on Piz Daint", "")
    yield "| net | GPUs | select | send | restore | update |"
    yield "|---|---|---|---|---|---|"
    for own in cells:
        yield f"| {own.net} | {own.devices} | {' | '.join(f'{share:.0%}' for share in own.shares)} |"


def sides(cells: Sequence[Cell]) -> Iterator[str]:
    """ASQ beside RGC for the LSTM."""
    own = [cell for cell in cells if cell.net == LSTM and cell.devices > 1]
    if not own:
        return
    yield from ("", "## ASQ beside RGC for the LSTM", "")
    yield "| GPUs | RGC | ASQ | ASQ is as many times as fast |"
    yield "|---|---|---|---|"
    for cell in own:
        rgc, asq = cell.times_ns["RGC"], cell.times_ns["ASQ"]
        yield f"| {cell.devices} | {rgc / 1e6:.1f} ms | {asq / 1e6:.1f} ms | {rgc / asq:.3f} |"
    faster = [cell.devices for cell in own if cell.times_ns["ASQ"] < cell.times_ns["RGC"]]
    said = f"is faster from {faster[0]} GPUs on" if faster else f"is not faster up to {own[-1].devices} GPUs"
    yield from ("", f"ASQ {said}; in the paper from about 16 on.")


def equations(gradients: Mapping[str, Mapping[str, Sequence[Gradient]]]) -> Iterator[str]:
    """Where (1) and (2) meet."""
    topology = soap.load_cluster("piz-daint-2")
    yield from ("", "## Where equations (1) and (2) meet", "")
    yield "Nothing overlaps there, recursive doubling gathers, Rabenseifner's algorithm sums: of all compressed parameters one after the"
    yield "other, on Piz Daint's links. *Pays* says for how many GPUs (1) is below (2)."
    yield ""
    yield "| net | method | (1) at 2 | (2) | (1) at 16 | (2) | (1) at 128 | (2) | pays |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for net, by_method in gradients.items():
        for method, own in by_method.items():
            pairs = (f"{f(own, topology, peers) / 1e6:.1f} ms" for peers in (2, 16, 128) for f in (sparse_ns, dense_ns))
            found = worthwhile(own, topology)
            end = "" if found is None else f"{found[0]} to {found[1]}" if found[1] < MOST else f"{found[0]} and more"
            yield f"| {net} | {method} | {' | '.join(pairs)} | {end or 'never'} |"
