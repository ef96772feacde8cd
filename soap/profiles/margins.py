"""How far predictions of gains may be wrong, by where the costs come from. A plan that has not been run replaces data parallelism only
if its predicted gain is above this.

The error of a gain is predicted gain ÷ measured gain, where a gain is data parallelism's time over a plan's. A plan whose predicted
gain does not exceed the largest known error may in truth be slower than data parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log

from soap.profiles.lookup import Source

MEASURED_ERROR = 1.16
"""docs/accuracy.md, *All plans*: computations and links measured. 115 plans beside data parallelism of the same model and cluster; the
largest error is 1.151 (rnnlm's random 2 on four hosts at 200 Mbit/s, predicted 1.193, measured 1.036); 95% are within 1.10."""
ESTIMATED_ERROR = 2.05
"""docs/benchmarks.md, *Predicted and measured, end to end*: computations and links estimated from a quick measurement of the machine.
30 plans beside data parallelism. Of those predicted to be up to three times as fast the largest error is 2.029 (gpt-wide's one weird
trick, predicted 1.40, measured 0.69). Those predicted to be seven times as fast and more erred by up to 3.44 (dlrm), and won: no plan
that was predicted to win by more than this lost."""
ERRORS: Mapping[str, float] = {
    Source.MEASURED.value: MEASURED_ERROR,
    Source.INTERPOLATED.value: MEASURED_ERROR,
    Source.CALIBRATED.value: ESTIMATED_ERROR,  # no table shows what it is worth by itself
    Source.ESTIMATED.value: ESTIMATED_ERROR,
}


def least_gain(shares: Mapping[str, float], *, links_measured: bool) -> float:
    """The gain that a plan must be predicted to exceed: the geometric mean of the errors by source, weighted by their shares of the
    compute time (``profiles.shares``). If links are not measured it is that of estimates, however well computations are known: what
    made plans lose were messages and sums that took many times their estimates."""
    known = sum(shares.values())
    if not links_measured or known <= 0:
        return ESTIMATED_ERROR
    return exp(sum(share * log(ERRORS[source]) for source, share in shares.items()) / known)
