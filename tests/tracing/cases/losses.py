"""Losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.tracing.cases.probe import case, floats, ids

aten = torch.ops.aten


def _losses() -> None:
    labels, space = ids(4, 6), ids(4, 3, 2, 5)
    ignored = labels.clone()
    ignored[1::2] = -100
    weights = floats(4) + 0.2
    for how in ("none", "mean", "sum"):
        case(f"cross_entropy, {how}", lambda x, t, h=how: F.cross_entropy(x, t, reduction=h), (6, 4), extra=(labels,))
        case(f"cross_entropy, ignored, {how}", lambda x, t, h=how: F.cross_entropy(x, t, reduction=h), (6, 4), extra=(ignored,))
        case(
            f"cross_entropy, ignore_index, {how}",
            lambda x, t, h=how: F.cross_entropy(x, t, ignore_index=1, reduction=h),
            (6, 4),
            extra=(labels,),
        )
        case(
            f"cross_entropy, weights, {how}", lambda x, t, w, h=how: F.cross_entropy(x, t, w, reduction=h), (6, 4), extra=(ignored, weights)
        )
        smooth = lambda x, t, h=how: F.cross_entropy(x, t, label_smoothing=0.2, reduction=h)  # noqa: E731
        case(f"cross_entropy, smoothed, {how}", smooth, (6, 4), extra=(ignored,))
        both = lambda x, t, w, h=how: F.cross_entropy(x, t, w, ignore_index=2, label_smoothing=0.2, reduction=h)  # noqa: E731
        case(f"cross_entropy, weights, smoothed, {how}", both, (6, 4), extra=(labels, weights))
        case(f"cross_entropy, space, {how}", lambda x, t, h=how: F.cross_entropy(x, t, reduction=h), (3, 4, 2, 5), extra=(space,))
        soft = lambda x, y, h=how: F.cross_entropy(x, y.softmax(1), reduction=h)  # noqa: E731
        case(f"cross_entropy, probabilities, {how}", soft, (6, 4), (6, 4))
        blurred = lambda x, y, w, h=how: F.cross_entropy(x, y.softmax(1), w, label_smoothing=0.1, reduction=h)  # noqa: E731
        case(f"cross_entropy, probabilities, weights, space, {how}", blurred, (3, 4, 5), (3, 4, 5), extra=(weights,))
        nll = lambda x, t, w, h=how: F.nll_loss(x.log_softmax(1), t, w, reduction=h)  # noqa: E731
        case(f"nll_loss, {how}", nll, (6, 4), extra=(ignored, weights))
        case(f"nll_loss, space, {how}", nll, (3, 4, 2, 5), extra=(space, weights))
        case(f"mse_loss, {how}", lambda x, y, h=how: F.mse_loss(x, y, reduction=h), (5, 4), (5, 4))
        case(f"l1_loss, {how}", lambda x, y, h=how: F.l1_loss(x, y, reduction=h), (5, 4), (5, 4))
        case(f"smooth_l1_loss, {how}", lambda x, y, h=how: F.smooth_l1_loss(x, y, reduction=h, beta=0.5), (5, 4), (5, 4))
        case(f"huber_loss, {how}", lambda x, y, h=how: F.huber_loss(x, y, reduction=h, delta=0.5), (5, 4), (5, 4))
        bce = lambda x, t, w, h=how: F.binary_cross_entropy(x.sigmoid(), t, w, reduction=h)  # noqa: E731
        case(f"binary_cross_entropy, {how}", bce, (5, 4), extra=(floats(5, 4), floats(5, 1, seed=2)))
        logits = lambda x, t, h=how: F.binary_cross_entropy_with_logits(x, t, reduction=h)  # noqa: E731
        case(f"binary_cross_entropy_with_logits, {how}", logits, (5, 4), extra=(floats(5, 4),))
        weighted = lambda x, t, w, p, h=how: F.binary_cross_entropy_with_logits(x, t, w, pos_weight=p, reduction=h)  # noqa: E731
        extra = (floats(5, 4), floats(5, 1, seed=2), floats(4, seed=8))
        case(f"binary_cross_entropy_with_logits, weights, {how}", weighted, (5, 4), extra=extra)
        case(
            f"soft_margin_loss, {how}",
            lambda x, t, h=how: F.soft_margin_loss(x, t, reduction=h),
            (5, 4),
            extra=(floats(5, 4).sub(0.5).sign(),),
        )
        case(f"kl_div, {how}", lambda x, t, h=how: F.kl_div(x, t, reduction=h), (5, 4), extra=(floats(5, 4),))
        case(f"poisson_nll_loss, {how}", lambda x, t, h=how: F.poisson_nll_loss(x, t, reduction=h), (5, 4), extra=(floats(5, 4),))
        rank = lambda x, y, t, h=how: F.margin_ranking_loss(x, y, t, 0.5, reduction=h)  # noqa: E731
        case(f"margin_ranking_loss, {how}", rank, (5,), (5,), extra=(floats(5).sub(0.5).sign(),))
        hinge = lambda x, t, h=how: F.hinge_embedding_loss(x, t, reduction=h)  # noqa: E731
        case(f"hinge_embedding_loss, {how}", hinge, (5, 4), extra=(floats(5, 4).sub(0.5).sign(),))
    case("kl_div, batchmean", lambda x, t: F.kl_div(x, t, reduction="batchmean", log_target=True), (5, 4), extra=(floats(5, 4).log(),))
    case("cross_entropy, one sample", lambda x, t: F.cross_entropy(x, t), (4,), extra=(torch.tensor(2),))
    for how in ("none", "mean", "sum"):
        signs = (floats(5).sub(0.5).sign(),)
        cosine = lambda x, y, t, h=how: F.cosine_embedding_loss(x, y, t, 0.2, reduction=h)  # noqa: E731
        case(f"cosine_embedding_loss, {how}", cosine, (5, 4), (5, 4), extra=signs)
        triplet = lambda a, p, n, h=how: F.triplet_margin_loss(a, p, n, swap=True, reduction=h)  # noqa: E731
        case(f"triplet_margin_loss, {how}", triplet, (5, 4), (5, 4), (5, 4))
        case(f"multi_margin_loss, {how}", lambda x, t, h=how: F.multi_margin_loss(x, t, reduction=h), (6, 4), extra=(labels,))
        several = torch.tensor([[0, 2, -1, 1], [3, -1, 0, 0], [1, 0, 2, 3], [2, -1, 0, 1], [0, 1, -1, 2]])
        case(f"multilabel_margin_loss, {how}", lambda x, t, h=how: F.multilabel_margin_loss(x, t, reduction=h), (5, 4), extra=(several,))
        soft_margin = lambda x, t, h=how: F.multilabel_soft_margin_loss(x, t, reduction=h)  # noqa: E731
        case(f"multilabel_soft_margin_loss, {how}", soft_margin, (5, 4), extra=(floats(5, 4).round(),))
    case("nll_loss2d", lambda x, t: aten.nll_loss2d.default(x.log_softmax(1), t), (3, 4, 2, 5), extra=(space,))
    case("nll_loss, flat", lambda x, t: aten.nll_loss.default(x.log_softmax(1), t), (6, 4), extra=(labels,))


_losses()
