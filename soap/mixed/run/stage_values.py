"""A stage's part of its worker's values: which minibatch begins with what, and which sums go to servers when."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from soap.elastic.waves import Push, WorkerWeights


class StageValues:
    """``pulled``: the stage's parameters of ``version``, end to end. ``begun``: as for ``WorkerWeights``.

    A stage is done with a minibatch before those in front of it are, and the worker has finished it when the first one is. A minibatch
    begins with what the worker had finished then, which its first stage says: later updates wait here. A wave is pushed as soon as it is
    complete here.
    """

    def __init__(self, wave: int, pulled: Tensor, version: int = 0, begun: tuple[int, Tensor] | None = None) -> None:
        self._weights = WorkerWeights(wave, pulled, version, begun)
        self._ended: deque[Tensor] = deque()
        self._wave, self._done = wave, self._weights.finished_minibatches
        self._sum = None if begun is None else begun[1]
        self._whole: dict[int, Tensor] = {}
        """Sums of waves that are complete here, and that the worker has not finished."""

    @property
    def version(self) -> int:
        """Of the values last pulled."""
        return self._weights.version

    def ended(self, update: Tensor) -> Push[Tensor] | None:
        """The next minibatch is done here. Returns its wave if that is complete."""
        self._ended.append(update)
        self._sum = update if self._sum is None else self._sum + update
        self._done += 1
        if self._done % self._wave:
            return None
        push = Push(self._done // self._wave - 1, self._wave, self._sum)
        self._whole[push.wave], self._sum = self._sum, None
        return push

    def values(self, finished: int, pulled: Tensor | None, version: int) -> Tensor:
        """What a minibatch begins with, when the worker has finished so many. ``pulled``: what servers have given for it, of this version,
        which has none of the worker's own waves that are not finished; None if it goes on with what it had."""
        while (number := self._weights.finished_minibatches) < finished:
            whole = self._whole.pop(number // self._wave) if (number + 1) % self._wave == 0 else None
            self._weights.finished(self._ended.popleft(), whole)
        if pulled is not None:
            self._weights.pull(pulled, version)
        return self._weights.values()

    @property
    def incomplete(self) -> tuple[int, Tensor] | None:
        """Of the wave that is not complete: how many minibatches are done here, and the sum of their updates; None if there are none."""
        return None if self._sum is None else (self._done % self._wave, self._sum)

    def last(self) -> Push[Tensor] | None:
        """There are no more minibatches. Returns the last wave if it is incomplete and has any."""
        left = self.incomplete
        return None if left is None else Push(self._done // self._wave, *left)
