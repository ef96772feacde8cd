"""Whether all ranks were asked to train the same: else they would wait for each other forever, or add up what does not belong together."""

from __future__ import annotations

from collections.abc import Mapping

from soap.errors import RuntimeFailure
from soap.runtime.comm.redistribute import Communicator

AGREED = ("dtype", "accumulate", "clip_norm", "scaler", "compressing", "lazy_sparse", "seed")
"""Fields of ``Trainer`` that change what is computed or exchanged."""


def require_agreement(comm: Communicator, asked: str, own: Mapping[str, str]) -> None:
    """RuntimeFailure on all ranks unless these are alike on all. ``asked``: ``Asked.digest``. ``own``: this rank's options, in words."""
    digests = comm.gather((asked, dict(own)))
    for rank, (digest, options) in enumerate(digests):
        if digest != digests[0][0]:
            raise RuntimeFailure(f"rank {rank} has another model, strategy or order than rank 0; expected the same on all ranks")
        for name, first in digests[0][1].items():
            if options[name] != first:
                told = f"rank {rank} trains with {name} {options[name]}, rank 0 with {first}"
                raise RuntimeFailure(f"{told}; expected the same on all ranks")
