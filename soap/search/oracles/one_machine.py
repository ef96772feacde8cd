"""Jobs on one machine: a lower bound of when the last of them is through with all that follows it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple


class Job(NamedTuple):
    """Not before ``head_ns``, takes ``work_ns`` of the machine; ``tail_ns`` must pass after its end, elsewhere. All at least 0."""

    head_ns: int
    work_ns: int
    tail_ns: int


def least_time_ns(jobs: Iterable[Job]) -> int:
    """When all jobs and what follows them are through at the earliest, if jobs may be interrupted; 0 without jobs.

    Jackson's preemptive schedule: of the jobs that are there, always the one with the longest tail. It is optimal, and equal to the largest
    value of least head + sum of work + least tail over all sets of jobs (Carlier, The one-machine sequencing problem, 1982).
    """
    waiting = sorted(jobs, reverse=True)
    there: list[tuple[int, int]] = []  # (-tail, work that is left)
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
