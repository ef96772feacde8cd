from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from soap.profiles.link_probes import LinkTiming, Operation, Probe
from soap.runtime.link_timing import LEAST_ROUNDS, measure_links
from tests.runtime.pool import Pool


def timed(probes: Sequence[Probe], ranks: int) -> tuple[list[LinkTiming], list[Probe]]:
    done: list[LinkTiming] = []
    known = probes if dist.get_rank() == 0 else probes[1:]  # another rank may know of what rank 0 does not
    found = measure_links(known, ranks, backend="gloo", seconds_per_probe=0.001, on_probe=done.append)
    return found, [timing.probe for timing in done]


@pytest.mark.slow
def test_all_ranks_see_the_same_times_of_all_probes(pool: Pool) -> None:
    probes = [Probe(operation, (0, 2), 4096) for operation in Operation]
    probes += [Probe(operation, (0, 1, 2), 4096) for operation in (Operation.ALL_REDUCE, Operation.ALL_TO_ALL)]
    results = pool.run(timed, probes, 3)
    assert results[0][0] == results[1][0] == results[2][0]
    assert [done for _, done in results] == [probes, [], []]
    for probe, timing in zip(probes, results[0][0], strict=True):
        assert timing.probe == probe and len(timing.seconds) >= LEAST_ROUNDS and min(timing.seconds) > 0
        assert timing.cpu_seconds > 0
