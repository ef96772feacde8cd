"""Jobs on one machine: a lower bound of when the last of them, and what follows it, is done."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple


class Job(NamedTuple):
    """A job that starts no earlier than ``head_ns``, takes ``work_ns`` of the machine, and is followed by ``tail_ns`` elsewhere. All at
    least 0."""

    head_ns: int
    work_ns: int
    tail_ns: int


def least_time_ns(jobs: Iterable[Job]) -> int:
    """The earliest time at which all jobs and what follows them are done, if jobs may be interrupted; 0 without jobs.

    Jackson's preemptive schedule: of the available jobs, always the one with the longest tail. It is optimal, and equal to the largest
    value of least head + sum of work + least tail over all sets of jobs (Carlier, The one-machine sequencing problem, 1982).
    """
    waiting = sorted(jobs, reverse=True)
    there: list[tuple[int, int]] = []  # (-tail, remaining work)
    now = least = 0
    while waiting or there:
        if not there:
            now = max(now, waiting[-1].head_ns)
        while waiting and waiting[-1].head_ns <= now:
            job = waiting.pop()
            heapq.heappush(there, (-job.tail_ns, job.work_ns))
        negative_tail, work = heapq.heappop(there)
        until = min(now + work, waiting[-1].head_ns) if waiting else now + work
        if until - now < work:
            heapq.heappush(there, (negative_tail, work - (until - now)))
        else:
            least = max(least, until - negative_tail)
        now = until
    return least
