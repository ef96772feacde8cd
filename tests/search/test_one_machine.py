from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.oracles.one_machine import Job, least_time_ns

JOBS = st.lists(st.builds(Job, st.integers(0, 20), st.integers(0, 10), st.integers(0, 30)), max_size=7)


@given(JOBS)
def test_it_is_the_most_that_any_set_of_jobs_asks_for(jobs: list[Job]) -> None:
    sets = (own for count in range(1, len(jobs) + 1) for own in combinations(jobs, count))
    least = [min(job.head_ns for job in own) + sum(job.work_ns for job in own) + min(job.tail_ns for job in own) for own in sets]
    assert least_time_ns(jobs) == max(least, default=0)


def test_what_is_urgent_interrupts_what_is_not() -> None:
    assert least_time_ns([Job(0, 10, 0), Job(4, 2, 20)]) == 26
    assert least_time_ns([Job(0, 10, 25), Job(4, 2, 20)]) == 35
    assert least_time_ns([]) == 0
