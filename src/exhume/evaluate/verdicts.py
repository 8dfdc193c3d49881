"""Why a run ended as it did, once the truth is known: a sentence from its score and the floor."""

import math
from collections.abc import Mapping

from exhume.auditing.evidence import ENOUGH
from exhume.equation.problem import Premise

NO_TRACE = 1e-2
"""Residual at the truth from which the model is said to hold no trace of the kind looked for."""

BROKEN = 0.2
"""The same for trained weights alone: kinks of ReLU leave up to a tenth where the premise holds."""

ABOVE = 10.0
"""A residual so many times the floor is well above it: a sample is missing."""

ROUNDING = 1e-9
"""Residuals below this are taken to be equal: all of them explain the weights."""


def verdict(
    residual: float | None,
    floor: float,
    recovered: int,
    samples: int,
    ratio: float,
    floors: Mapping[str, float] | None = None,
    premise: Premise = Premise.CHANGE,
) -> str:
    """What was recovered and, where that is not all, whose fault it is.

    Args:
        residual: at the end of the run; None where it diverged.
        floor: the residual at the truth, of the same problem.
        recovered: how many true samples were.
        samples: how many there are.
        ratio: equations for each unknown of the run.
        floors: the floor at each point at which features may be taken, where they moved.
        premise: of the problem.

    Example:
        >>> print(verdict(1e-3, 1e-8, recovered=0, samples=10, ratio=4))
        None of 10 samples recovered. The attack failed although the trace is there: it ended at a
        residual of 1.0e-03, and the samples themselves leave 1.0e-08. A better search could
        succeed.
    """
    if recovered >= samples:
        return f"All {samples} samples recovered; they leave a residual of {floor:.1e} themselves."
    found = f"{recovered or 'None'} of {samples} samples recovered. "
    ended = math.inf if residual is None else residual
    if ratio < ENOUGH:
        return (
            f"{found}{ratio:.2f} equations for each unknown are too few: candidates that are not "
            f"samples explain the weights as well (residual {ended:.1e}, floor {floor:.1e}), and "
            "no search could tell them apart."
        )
    if premise is not Premise.CHANGE:
        return found + _of_weights_alone(ended, floor, premise, recovered > 0)
    return found + _reason(ended, floor, ratio, floors or {}, recovered > 0)


def _of_weights_alone(residual: float, floor: float, premise: Premise, recovered: bool) -> str:
    if not floor < BROKEN and not recovered:
        return (
            f"The premise {premise.value} does not hold for this model: the samples themselves "
            f"leave a residual of {floor:.1e} of its weights, where {BROKEN:g} is the most that "
            "kinks of ReLU account for. Training ended too early, or the initial weights are still "
            "there."
        )
    if residual > ABOVE * max(floor, ROUNDING):
        return _missed(residual, floor)
    than = "better than" if residual < floor else "about as well as"
    return (
        f"Candidates that are not samples explain the weights {than} the samples do (residual "
        f"{residual:.1e}, floor {floor:.1e}). With trained weights alone many sets do, and only a "
        "prior on the inputs could tell them apart."
    )


def _missed(residual: float, floor: float) -> str:
    return (
        "The attack failed although the trace is there: it ended at a residual of "
        f"{residual:.1e}, and the samples themselves leave {floor:.1e}. A better search could "
        "succeed."
    )


def _reason(
    residual: float, floor: float, ratio: float, floors: Mapping[str, float], recovered: bool
) -> str:
    if not floor < NO_TRACE and not recovered:
        return (
            "The model holds no such trace at this width or laziness: the samples themselves leave "
            f"a residual of {floor:.1e}, where less than {NO_TRACE:g} is asked for, so no search "
            f"of this kind can be relied on.{_elsewhere(floors)}"
        )
    if residual > ABOVE * max(floor, ROUNDING):
        return _missed(residual, floor)
    below = "below the floor" if residual < floor else "as well as the samples do"
    if residual > max(floor, ROUNDING):
        below = "nearly as well as the samples do"
    fits = f"The attack fits {below} with wrong candidates ({residual:.1e}, floor {floor:.1e}): "
    return fits + (
        f"there are {ratio:.2f} equations for each unknown, but the trace of what was missed is "
        "too small to be told from the floor."
    )


def _elsewhere(floors: Mapping[str, float]) -> str:
    """Where the trace is clearer, if it is."""
    clear = {point: value for point, value in floors.items() if value < NO_TRACE}
    if not clear:
        return ""
    point = min(clear, key=clear.__getitem__)
    return f" With features at the point '{point}' they leave {clear[point]:.1e}: audit it there."
