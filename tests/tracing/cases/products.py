"""Products and embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from tests.tracing.cases.probe import Shape, case, floats, ids


def _products() -> None:
    case("linear", F.linear, (5, 3, 4), weights=((6, 4), (6,)))
    case("linear, no bias", F.linear, (5, 4), weights=((3, 4),))
    case("linear, vector", F.linear, (4,), weights=((3, 4), (3,)))
    case("addmm", lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0), (5, 4), weights=((4, 3), (3,)))
    case("addmm, full bias", lambda x, w, b: torch.addmm(b, x, w), (5, 4), weights=((4, 3), (5, 3)))
    case("baddbmm", lambda a, b, c: torch.baddbmm(c, a, b, beta=2.0, alpha=0.5), (3, 5, 4), (3, 4, 2), (3, 5, 2))
    shapes: Sequence[tuple[Shape, Shape]] = [
        ((4,), (4,)), ((4,), (4, 3)), ((5, 4), (4,)), ((5, 4), (4, 3)), ((4,), (3, 4, 2)), ((3, 5, 4), (4,)), ((3, 5, 4), (4, 2)),
        ((5, 4), (3, 4, 2)), ((3, 5, 4), (3, 4, 2)), ((3, 1, 5, 4), (2, 4, 3)), ((1, 5, 4), (3, 4, 2)), ((2, 3, 5, 4), (2, 3, 4, 5)),
    ]  # fmt: skip
    for a, b in shapes:
        case(f"matmul {list(a)} {list(b)}", torch.matmul, a, b)
    case("bmm", torch.bmm, (3, 5, 4), (3, 4, 2))
    case("mm", torch.mm, (5, 4), (4, 3))
    case("mv", torch.mv, (5, 4), (4,))
    case("dot", torch.dot, (5,), (5,))
    case("outer", torch.outer, (5,), (4,))
    case("einsum", lambda a, b: torch.einsum("bij,kj->bki", a, b), (3, 5, 4), (2, 4))
    case("einsum, implicit", lambda a, b: torch.einsum("ij,jk", a, b), (5, 4), (4, 3))
    case("einsum, three", lambda a, b, c: torch.einsum("ij,jk,k->i", a, b, c), (5, 4), (4, 3), (3,))
    case("einsum, trace", lambda a: torch.einsum("bii->b", a), (3, 4, 4))
    case("einsum, ellipsis", lambda a, b: torch.einsum("...ij,...jk->...ik", a, b), (3, 5, 4), (3, 4, 2))
    case("embedding", lambda x, t, i: F.embedding(i, t) * x, (5, 4, 3), weights=((7, 3),), extra=(ids(7, 5, 4),))
    case(
        "embedding, padding_idx", lambda x, t, i: F.embedding(i, t, padding_idx=2) * x, (5, 4, 3), weights=((7, 3),), extra=(ids(4, 5, 4),)
    )
    case("embedding, negative padding_idx", lambda t, i: F.embedding(i, t, padding_idx=-5), (7, 3), extra=(ids(7, 6),))
    case("embedding, frequency", lambda t, i: F.embedding(i, t, scale_grad_by_freq=True), (7, 3), extra=(ids(3, 6),), whole=True)
    case("addmv, addr", lambda a, x, y: torch.addr(torch.addmv(y, a, x).unsqueeze(1) * y, y, y, beta=0.5), (5, 4), (4,), (5,))
    case("addbmm", lambda a, b, c: torch.addbmm(c, a, b, beta=2.0), (3, 5, 4), (3, 4, 2), (5, 2))
    case("inner, tensordot", lambda a, b: [torch.inner(a, b), torch.tensordot(a, b, dims=([0], [1]))], (4, 4), (3, 4))
    case("bilinear", lambda x, y, w, b: F.bilinear(x, y, w, b), (5, 4), (5, 3), weights=((6, 4, 3), (6,)))
    case("cdist", torch.cdist, (3, 5, 4), (3, 6, 4))
    interact = lambda x, y: [p[:, *torch.tril_indices(3, 3, -1)] for p in [torch.bmm(x, y.mT)]]  # noqa: E731
    case("feature interaction", interact, (5, 3, 4), (5, 3, 4))


def _bags() -> None:
    offsets = torch.tensor([0, 2, 2, 5])
    for mode in ("sum", "mean", "max"):
        bag = lambda x, t, i, o, m=mode: F.embedding_bag(i, t, o, mode=m) * x  # noqa: E731
        case(f"embedding_bag, {mode}", bag, (4, 3), weights=((7, 3),), extra=(ids(7, 8), offsets))
        flat = lambda t, i, m=mode: F.embedding_bag(i, t, mode=m)  # noqa: E731
        case(f"embedding_bag, rows of indices, {mode}", flat, (7, 3), extra=(ids(7, 4, 3),))
    rows = lambda t, w, i: F.embedding_bag(i, t, mode="sum", per_sample_weights=w)  # noqa: E731
    case("embedding_bag, rows of indices, weights", rows, (7, 3), (4, 3), extra=(ids(7, 4, 3),))
    padded_rows = lambda t, i: F.embedding_bag(i, t, padding_idx=-5)  # noqa: E731
    case("embedding_bag, rows of indices, padding_idx", padded_rows, (7, 3), extra=(ids(7, 4, 3),))
    for options in ({"padding_idx": 2}, {"padding_idx": 2, "mode": "mean"}, {"padding_idx": -5}):
        padded = lambda x, t, i, o, k=options: F.embedding_bag(i, t, o, **k) * x  # noqa: E731
        case(f"embedding_bag, {options}", padded, (4, 3), weights=((7, 3),), extra=(ids(7, 8), offsets))
    weighed = lambda x, t, i, o, w: F.embedding_bag(i, t, o, mode="sum", per_sample_weights=w) * x  # noqa: E731
    case("embedding_bag, weights", weighed, (4, 3), weights=((7, 3),), extra=(ids(7, 8), offsets, floats(8)))
    learned = lambda x, w, t, i, o: F.embedding_bag(i, t, o, mode="sum", per_sample_weights=w) * x  # noqa: E731
    case("embedding_bag, learned weights", learned, (4, 3), (8,), weights=((7, 3),), extra=(ids(7, 8), offsets))
    ends = lambda t, i, o: F.embedding_bag(i, t, o, include_last_offset=True)  # noqa: E731
    case("embedding_bag, last offset", ends, (7, 3), extra=(ids(7, 8), torch.tensor([0, 2, 2, 5, 8])))


_bags()
_products()
