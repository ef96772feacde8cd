"""How many bytes a rank has moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """Payload bytes that this rank has moved in training steps.

    ``sent``, ``received``: pieces of activations and of their gradients; ``exchanged``: the part that exchanges received. ``reduced``: sums
    over groups, by size of the buffer, counted on every member; ``scattered``: the part in which each member has a cell.
    ``synchronized``: all-reduced gradients.

    Sent and received together: ``pulled``: values or rows from owners; ``pushed``: gradients to owners; ``handed``: both between a leader
    and the other members of its host; ``gathered``: row gradients that readers give each other; ``index``: row numbers and counts of these;
    ``compressed``: messages of compressed gradients.

    To no other rank: ``offloaded``: what operators keep, copied to the host; ``restored``: copied back.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    exchanged_bytes: int = 0
    reduced_bytes: int = 0
    scattered_bytes: int = 0
    synchronized_bytes: int = 0
    pulled_bytes: int = 0
    pushed_bytes: int = 0
    handed_bytes: int = 0
    gathered_bytes: int = 0
    index_bytes: int = 0
    compressed_bytes: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0
