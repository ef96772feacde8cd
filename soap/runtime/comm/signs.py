"""Waiting for ranks that take longer than others, for as long as they live (docs/internals/runtime.md, *Ranks that take long*)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from soap.runtime.comm.failures import RankLost, message_of

PREFIX = "soap-signs"
SIGN_S, SHARE = 5.0, 20
"""How often a rank gives a sign of life: every so many seconds, and at least so many times while others have patience."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S, PAUSES = 0.001, 0.25, 0.05
"""How long a rank that waits pauses until it looks again: such a share of the time that it has waited."""
LOOK_S = 1.0
"""How often a rank that waits looks for the signs of others."""
LEFT = "left"


class Silence:
    """For how long ranks have been silent while somebody looked: time in which all ranks were stopped (Ctrl-Z) does not count."""

    def __init__(self) -> None:
        self._signs: dict[int, bytes] = {}
        self._silent_s: dict[int, float] = {}
        self._looked_s = float("-inf")

    def look(self, signs: Mapping[int, bytes], now_s: float) -> dict[int, float]:
        """Rank -> seconds of its silence, given the ranks' last signs."""
        passed_s = min(now_s - self._looked_s, 2 * LOOK_S)
        self._looked_s = now_s
        self._silent_s = {
            rank: self._silent_s.get(rank, 0.0) + passed_s if self._signs.get(rank) == sign else 0.0 for rank, sign in signs.items()
        }
        self._signs = dict(signs)
        return self._silent_s


class Signs:
    """This rank's signs of life, until ``end``, and others'. ``patience_s``: how long a rank may be silent. ``store``: the group's."""

    def __init__(self, store: Any, rank: int, size: int, patience_s: float) -> None:
        self.store = store
        self._own = store.clone()  # a connection of its own: another thread may hold the store's for as long as it waits
        self._rank, self._size, self._patience_s = rank, size, patience_s
        begun = self._own.add(f"{PREFIX}/begun-{rank}", 1)  # of several groups in this store, one after the other
        self._prefix = f"{PREFIX}/{begun}"
        self._silence, self._meetings, self._looked_s = Silence(), 0, float("-inf")
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._give("0")
        threading.Thread(target=self._live, name="signs of life", daemon=True).start()

    def meet(self) -> None:
        """Wait until all ranks are here, in the same meeting. RankLost in one line if one has failed, has left, or is silent."""
        self._meetings += 1
        meeting = f"{self._prefix}/meeting-{self._meetings}"
        self._own.set(f"{meeting}/{self._rank}", b"")
        if self._own.add(meeting, 1) == self._size:
            self._own.set(f"{meeting}/all", b"")
        self.wait(lambda: bool(self._own.check([f"{meeting}/all"])), lambda rank: not self._own.check([f"{meeting}/{rank}"]))

    def wait(self, over: Callable[[], bool], late: Callable[[int], bool] = lambda rank: True) -> None:
        """Wait until ``over``, which only other ranks can bring about. RankLost as for ``meet`` if a rank that is ``late`` is gone."""
        begin_s = time.monotonic()
        while not over():
            self.require_life(late)
            time.sleep(min(max(SHORTEST_PAUSE_S, PAUSES * (time.monotonic() - begin_s)), LONGEST_PAUSE_S))

    def require_life(self, late: Callable[[int], bool] = lambda rank: True) -> None:
        """RankLost in one line if another rank that is ``late`` has failed, has left, or is silent. Looks only every ``LOOK_S`` seconds."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._looked_s < LOOK_S:
                return
            self._looked_s = now_s
            signs = self._signs(rank for rank in range(self._size) if rank != self._rank and late(rank))
            silent_s = self._silence.look(signs, now_s)
        for rank, sign in signs.items():
            said = sign.decode(errors="replace")
            if said and not said.isdigit():
                raise RankLost(f"rank {rank} {said}; expected it to go on until all ranks are done", rank)
            if silent_s[rank] > self._patience_s:
                raise RankLost(f"rank {rank} has given no sign of life for {silent_s[rank]:.0f} s; has it, or its machine, ended?", rank)

    def end(self, error: BaseException | None = None) -> None:
        """No more signs. Others that still wait for this rank are told that it has left, or why it has failed."""
        with suppress(RuntimeError):  # the store may have ended before
            self._give(LEFT if error is None else f"failed: {message_of(error)}", last=True)

    def _signs(self, ranks: Iterable[int]) -> dict[int, bytes]:
        keys = {rank: f"{self._prefix}/{rank}" for rank in ranks}
        return {rank: bytes(self._own.get(key)) if self._own.check([key]) else b"" for rank, key in keys.items()}

    def _live(self) -> None:
        number = 0
        with suppress(RuntimeError):  # the store has ended: others see that themselves
            while not self._ended.wait(min(SIGN_S, self._patience_s / SHARE)):
                number += 1
                self._give(str(number))

    def _give(self, sign: str, *, last: bool = False) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._own.set(f"{self._prefix}/{self._rank}", sign)
            if last:
                self._ended.set()


_here: Signs | None = None


def begin(patience_s: float) -> None:
    """Give signs of life in the process group that this rank is in. Nothing changes if it does so already; one that is alone gives none."""
    global _here
    store = dist.distributed_c10d._get_default_store()
    if _here is None or _here.store is not store:
        end()
        _here = Signs(store, dist.get_rank(), dist.get_world_size(), patience_s) if dist.get_world_size() > 1 else None


def end(error: BaseException | None = None) -> None:
    """See ``Signs.end``."""
    global _here
    if _here is not None:
        _here.end(error)
        _here = None


def meet() -> None:
    """Wait until all ranks are here, as long as they live; called on all ranks at once, before a collective for which one of them may come
    late by more than the collective's limit. RankLost in one line if a rank is gone."""
    if _here is not None:
        _here.meet()


def require_life() -> None:
    """RankLost in one line if another rank is gone; looks now and then."""
    if _here is not None:
        _here.require_life()


def wait(over: Callable[[], bool]) -> None:
    """Wait until ``over``, which only other ranks can bring about. RankLost in one line if one of them is gone."""
    assert _here is not None, "a rank that is alone waits for nobody"
    _here.wait(over)
