"""How many GPUs are worth it, from one number: the share of a step that they do not divide.

A step is computing, T_C, and overhead that nothing hides, T_O; R_O = T_O / T_C. On G GPUs computing
takes T_C / G and the overhead does not change:

    1 GPU    |cccccccccccccccc|oo|
    4 GPUs   |cccc|oo|                speedup 18 / 6 = 3, efficiency 3 / 4

    efficiency = (1 + R_O) / (1 + G R_O)          speedup = G * efficiency < 1 + 1 / R_O

It needs one measurement. It ignores that summing gradients takes longer the more GPUs there are,
and that a small share of a mini-batch is computed less well: see `anybatch.tools.loop`.

Source: guide, Lemma 3.1 and its proof, Equations 9 to 13.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from anybatch.tools.validation import ROUNDING, at_least, positive, positive_integer


@dataclass(frozen=True)
class Needed:
    """How many GPUs a goal takes.

    Attributes:
        gpus: the fewest; None where no number of them reaches it.
        limit: the speedup that more and more GPUs come to, or the best there is; may be infinite.
    """

    gpus: int | None
    limit: float

    def __str__(self) -> str:
        if self.gpus is not None:
            return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"
        return f"no number of GPUs: none gets beyond a speedup of {self.limit:.3g}"


def efficiency(overhead: float, gpus: int) -> float:
    """Return alpha = (1 + R_O) / (1 + G R_O), the part of G times the speed that G GPUs give.

    Args:
        overhead: R_O, seconds that nothing hides over seconds of computing on one GPU; at least 0.
        gpus: G, at least 1.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> round(efficiency(0.10, 4), 3)
        0.786

    Source: guide, Equation 13.
    """
    at_least(0, overhead=overhead)
    positive_integer(gpus=gpus)
    return (1 + overhead) / (1 + gpus * overhead)


def speedup(overhead: float, gpus: int) -> float:
    """Return alpha G, how many times as fast G GPUs are as one.

    Args:
        overhead: R_O, at least 0.
        gpus: G, at least 1.

    Raises:
        ValueError: a number is out of range.

    Source: guide, Equation 9.
    """
    return gpus * efficiency(overhead, gpus)


def speedup_limit(overhead: float) -> float:
    """Return 1 + 1 / R_O, the bound of every speedup; infinite without overhead.

    Raises:
        ValueError: `overhead` is below 0 or not finite.
    """
    at_least(0, overhead=overhead)
    return 1 + 1 / overhead if overhead > 0 else inf


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
