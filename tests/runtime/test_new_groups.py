"""What process groups of members alone rest on: torch names a group by a count that can be set."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from soap.errors import RuntimeFailure
from soap.runtime.comm.redistribute import Groups, make_groups
from tests.runtime.pool import Pool

MINUTE = timedelta(seconds=60)


def names_and_sums() -> tuple[int, list[tuple[str, float]]]:
    """Ranks 0 and 1 make group 0, ranks 1 and 2 group 1, each its own alone: names behind the count before, and sums within groups."""
    rank, wanted = dist.get_rank(), {0: (0, 1), 1: (1, 2)}
    before, known = distributed_c10d._world.group_count, Groups()
    make_groups(known, {number: own for number, own in wanted.items() if rank in own}, len(wanted), MINUTE)
    found = []
    for group in known.values():
        assert group is not None
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total, group=group)
        found.append((str(int(group.group_name) - before), float(total)))
    after = distributed_c10d._world.group_count - before
    dist.barrier()
    for group in known.values():
        dist.destroy_process_group(group)
    return after, found


def test_members_make_their_groups_alone_and_agree_on_names(pool: Pool) -> None:
    assert pool.run(names_and_sums) == [(2, [("0", 3.0)]), (2, [("0", 3.0), ("1", 5.0)]), (2, [("1", 5.0)])]


def unknown_count() -> str:
    """As a torch of which we know nothing."""
    plain, distributed_c10d._world = distributed_c10d._world, object()  # type: ignore[assignment]
    try:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeFailure) as caught:
            patch.setattr(dist, "get_rank", lambda: 0)
            patch.setattr("soap.runtime.comm.redistribute.all_make_all", lambda: False)
            make_groups({}, {0: (0,)}, 1, MINUTE)
        return str(caught.value)
    finally:
        distributed_c10d._world = plain


def test_another_torch_is_refused_in_one_line() -> None:
    assert unknown_count() == f"torch {torch.__version__} counts process groups in a way that we do not know; expected torch 2.11 to 2.13"
