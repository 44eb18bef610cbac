"""Lemma 3.1 solved for the overhead and for the GPUs, as the guide's examples ask for it."""

from __future__ import annotations

from math import ceil, inf

from anybatch.tools.gpus import ROUNDING, Needed, positive, positive_integer, speedup_limit


def overhead_limit(efficiency: float, gpus: int) -> float:
    """Return the largest R_O at which G GPUs have an efficiency: (1 - alpha) / (alpha G - 1).

    Args:
        efficiency: alpha, above 0 and at most 1.
        gpus: G, at least 1.

    Returns:
        R_O; infinite where alpha G <= 1, since G GPUs are never slower than one here.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> round(overhead_allowed(0.80, 4), 3)  # "must not exceed 9 %"
        0.091

    Source: guide, Equation 12.
    """
    positive_integer(gpus=gpus)
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency must be above 0 and at most 1, not {efficiency!r}")
    spare = efficiency * gpus - 1
    return (1 - efficiency) / spare if spare > 0 else inf


def gpus_for(speedup: float, overhead: float) -> Needed:
    """Return the fewest GPUs that are so many times as fast as one.

    From G (1 + R_O) / (1 + G R_O) >= s follows G >= s / (1 + R_O - s R_O), if that is above 0. A
    billionth of the speedup may be missing: that is rounding.

    Args:
        speedup: s, above 0.
        overhead: R_O, at least 0.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> str(gpus_for(3, 0.10)), str(gpus_for(12, 0.10))
        ('4 GPUs', 'no number of GPUs: none gets beyond a speedup of 11')

    Source: guide, section 3.2.
    """
    positive(speedup=speedup)
    limit = speedup_limit(overhead)
    wanted = speedup * (1 - ROUNDING)
    divisor = 1 + overhead - wanted * overhead
    if speedup >= limit or divisor <= 0:
        return Needed(None, limit)
    return Needed(max(1, ceil(wanted / divisor)), limit)
