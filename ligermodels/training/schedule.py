"""Learning-rate schedules: the share of the peak rate at a step, a pure function, so that resuming needs no state."""

from __future__ import annotations

import math

from ligermodels.errors import LigerError

SCHEDULES = ("cosine", "wsd", "linear", "constant")


def schedule(
    step: int, steps: int, *, kind: str = "cosine", warmup: int = 0, decay: int | None = None, final: float = 0.1
) -> float:
    """Share of the peak learning rate for the update number ``step`` (from 0) of ``steps``.

    The first ``warmup`` updates rise linearly; update ``warmup`` - 1 has the whole rate. Then
        "cosine"    half a cosine down to ``final`` (Loshchilov & Hutter 2017)
        "wsd"       warmup, stable, decay: the whole rate until the last ``decay`` updates, which fall by 1 - √x
                    (Hu et al. 2024; Hägele et al. 2024); ``decay`` is a fifth of the steps unless given
        "linear"    a straight line down to ``final``
        "constant"  the whole rate to the end
    The last update has the share ``final``. Raises LigerError for a kind or for numbers that make no schedule.
    """
    if kind not in SCHEDULES:
        raise LigerError(f"schedule must be one of {', '.join(SCHEDULES)}, found {kind!r}")
    decay = (max(1, steps // 5) if decay is None else decay) if kind == "wsd" else steps - warmup
    if steps < 1 or warmup < 0 or decay < 0 or warmup + decay > steps or not 0 <= final <= 1:
        raise LigerError(
            f"a {kind} schedule of {steps} steps cannot have {warmup} of warmup, {decay} of decay and a final share "
            f"of {final}: warmup + decay must not exceed the steps, the share must be between 0 and 1"
        )
    if step < 0:
        raise LigerError(f"step must be counted from 0, found {step}")
    if step < warmup:
        return (step + 1) / warmup
    if kind == "constant" or decay == 0:
        return 1.0
    progress = (step + 1 - (steps - decay)) / decay  # 1 at the last update
    progress = min(max(progress, 0.0), 1.0)
    if kind == "cosine":
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    if kind == "linear":
        return final + (1 - final) * (1 - progress)
    return final + (1 - final) * (1 - math.sqrt(progress))
