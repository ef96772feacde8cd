"""How long tiles take on a device (compiled). The counterpart of ``cluster.device_clock``. No cold penalty: the only point is (0, 0)."""

from __future__ import annotations

from soap.simulator.compiled.jit import compiled, inlined
from soap.simulator.compiled.state import Groups
from soap.simulator.compiled.trial import Trial


@inlined
def tile_end(R: Groups, T: Trial, device: int, start: int, duration: int) -> int:
    """End in ns of a tile that starts at ``start`` and takes ``duration`` on a warm device. Advances the device's clock."""
    end = start + duration
    if start > T.computed[device]:
        T.behind[device] = T.message[device]
        T.slower[device] = _lasts(R.cold_behind_messages if T.message[device] else R.cold_penalty)
    if T.slower[device] > 0:
        penalty = R.cold_behind_messages if T.behind[device] else R.cold_penalty
        lasts = _lasts(penalty)
        end -= _longer_ns(penalty, lasts - T.slower[device])
        T.slower[device] = max(0, T.slower[device] - duration)
        end += _longer_ns(penalty, lasts - T.slower[device])
    T.computed[device] = end
    return end


@inlined
def _lasts(penalty):  # type: ignore[no-untyped-def]
    """For how many ns of tiles there is more of it."""
    return penalty[len(penalty) - 2]


@compiled
def _longer_ns(penalty, computed):  # type: ignore[no-untyped-def]
    """``ColdPenalty.longer_ns``."""
    i = 2
    while i < len(penalty) and penalty[i] <= computed:
        i += 2
    before, less = penalty[i - 2], penalty[i - 1]
    return less if i == len(penalty) else less + (penalty[i + 1] - less) * (computed - before) // (penalty[i] - before)
