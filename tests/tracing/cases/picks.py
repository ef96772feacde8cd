"""Reading and writing by index or position."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.tracing.cases.probe import case, floats, ids


def _picks() -> None:
    rows = torch.tensor([2, 0, 1])
    case("scatter", lambda x, y, i: x.scatter(1, i, y), (4, 5), (4, 3), extra=(floats(4, 5).argsort(1)[:, :3],))
    case("scatter, value", lambda x, i: x.scatter(1, i, 2.0), (4, 5), extra=(ids(5, 4, 3),))
    case("scatter_add", lambda x, y, i: x.scatter_add(0, i, y), (4, 5), (6, 5), extra=(ids(4, 6, 5),))
    case("scatter_reduce", lambda x, y, i: x.scatter_reduce(1, i, y, "amax"), (4, 5), (4, 3), extra=(ids(5, 4, 3),))
    case("index_add", lambda x, y, i: x.index_add(0, i, y, alpha=2), (4, 5), (3, 5), extra=(ids(4, 3),))
    case("index_copy", lambda x, y, i: x.index_copy(0, i, y), (4, 5), (3, 5), extra=(rows,))
    case("index_fill", lambda x, i: x.index_fill(0, i, 0.3), (4, 5), extra=(rows,))
    case("index_put", lambda x, y, i: x.index_put((i,), y), (4, 5), (3, 5), extra=(rows,))
    case("index_put, sums", lambda x, y, i: x.index_put((i,), y, True), (4, 5), (3, 5), extra=(torch.tensor([2, 0, 2]),))
    case("index_put, mask", lambda x, m: x.index_put((m,), torch.tensor(0.5, dtype=x.dtype)), (4, 5), extra=(ids(2, 4, 5).bool(),))
    rewritten = lambda x, y, m: x.index_put((m,), y)  # noqa: E731
    case("index_put, mask, values", rewritten, (4, 3), (4, 3), extra=(torch.ones(4, dtype=torch.bool),), whole=True)
    case("take_along_dim, take", lambda x, i: [x.take_along_dim(i, 1), x.take(i)], (4, 5), extra=(ids(5, 4, 3),))
    case("masked_scatter", lambda x, y, m: x.masked_scatter(m, y), (4, 5), (20,), extra=(ids(2, 4, 5).bool(),))
    edges = (torch.tensor([0.0, 1.0], dtype=torch.float64),)
    case("bucketize, isin", lambda x, e: [x, torch.bucketize(x, e), torch.isin((x * 2).long(), e.long())], (3, 4), extra=edges)
    case("index_select", lambda x, i: x.index_select(1, i), (3, 5), extra=(ids(5, 4),))
    case("gather", lambda x, i: x.gather(1, i), (4, 5), extra=(ids(5, 4, 3),))
    case("gather, smaller", lambda x, i: x.gather(1, i), (4, 5, 3), extra=(ids(5, 2, 3, 2),))
    case("gather, to one row", lambda x, i: x.gather(0, i), (4, 5), extra=(ids(4, 1, 1),))
    case("index", lambda x, i: x[i], (5, 4), extra=(ids(5, 3),))
    case("index, 2-d", lambda x, i: x[:, i], (3, 5), extra=(ids(5, 2, 4),))
    case("index, pairs", lambda x, i, j: x[i, :, j], (5, 3, 4), extra=(ids(5, 4), ids(4, 4)))
    case("index, adjacent, broadcast", lambda x, i, j: x[:, i, j], (3, 5, 4), extra=(ids(5, 2, 1), ids(4, 3)))
    case("one_hot", lambda x, i: x.unsqueeze(-1) * F.one_hot(i, 4), (3, 5), extra=(ids(4, 3, 5),))
    for diagonal in (-1, 0, 2):
        case(f"tril {diagonal}", lambda x, d=diagonal: x.tril(d), (2, 5, 4))
        case(f"triu {diagonal}", lambda x, d=diagonal: x.triu(d), (4, 6))
    case("tril, of a product", lambda x, y: (x @ y).tril(), (4, 3), (3, 5))
    case("repeat", lambda x: x.repeat(3, 2, 1), (4, 5))
    case("repeat, of one", lambda x: x.repeat(4, 2), (1, 3))
    case("tile", lambda x: x.tile(2), (3, 4))
    case("repeat_interleave", lambda x: x.repeat_interleave(3, 1), (4, 5))
    case("repeat_interleave, all", lambda x: x.repeat_interleave(2), (4, 5))
    case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (2, 12, 3, 5))
    case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (2, 3, 6, 4))


_picks()
