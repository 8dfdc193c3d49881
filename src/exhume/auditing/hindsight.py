"""What a run missed, and why: computed with the truth at hand, for score.json."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from exhume.equation.problem import Premise
from exhume.theory.support import ENOUGH

# If the samples themselves leave this residual, no search for what they explain can be trusted
NO_TRACE = 1e-2
# The same for trained weights alone: kinks of ReLU leave up to a tenth where the premise holds
BROKEN = 0.2
ABOVE = 3.0  # A residual this many times the floor is above it, so something better is there
BETTER = 0.1  # A point of linearisation with this share of the floor is worth another audit
ROUNDING = 1e-9  # Residuals below this are taken to be equal: all of them explain the weights
ALONG = 0.999  # Cosine from which a candidate has its sample's direction, and only the size is off
SMALL = 0.1  # A coefficient of this share of the largest is small: its sample is the first to go


@dataclass(frozen=True)
class Missed:
    """These are the samples that did not come back, as far as it tells why."""

    cosine: float  # the least, of those with their candidates
    # the largest of theirs in the fit of the true samples, over that of all; None without any
    coefficient: float | None = None
    recognisable: int = 0  # how many of them can be recognised all the same


@dataclass(frozen=True)
class Posed:
    """This is what the weights were asked to show."""

    premise: Premise = Premise.CHANGE
    target: str | None = None  # of margin and decay: weights, or their change
    # where features moved, the floor for each point at which they may be taken
    floors: Mapping[str, float] = field(default_factory=dict)


LAZY = Posed()  # the change of the weights, with features that did not move


def verdict(
    residual: float | None,
    floor: float,
    recovered: int,
    samples: int,
    ratio: float,
    posed: Posed = LAZY,
    missed: Missed | None = None,
) -> str:
    """Say what was recovered and, where that is not all, whose fault it is.

    The residual is None where the run diverged. The floor is the residual that the true samples
    leave in the same problem. The ratio is that of equations to unknowns in the run.
    """
    if recovered >= samples:
        return f"All {samples} samples recovered; they leave a residual of {floor:.1e} themselves."
    ended = math.inf if residual is None else residual
    both, alone = f"residual {ended:.1e}, floor {floor:.1e}", posed.premise.weights_alone
    seen = 0 if missed is None else missed.recognisable
    above = ended > ABOVE * max(floor, ROUNDING)
    if missed is not None and missed.cosine >= ALONG:
        why = (
            f"Only their size is off: every candidate has its sample's direction (cosine "
            f"{missed.cosine:.4f} or more). Tell the right norm, or the range, of the inputs."
        )
    elif ratio < ENOUGH:
        found = "candidates that are not samples explain the weights as well"
        found = "what was found does not even explain the weights" if above else found
        why = (
            f"{ratio:.2f} equations for each unknown are too few: {found} ({both}), and no search "
            "could tell samples from others."
        )
    elif alone and seen:
        why = (
            f"With the premise {posed.premise.value} weights show what samples look like, and do "
            f"not settle their size and every detail ({both})."
        )
    elif not floor < (BROKEN if alone else NO_TRACE) and not recovered + seen:
        why = _no_trace(floor, posed)
    elif above:
        why = (
            "The attack failed although the trace is there: it ended at a residual of "
            f"{ended:.1e}, and the samples themselves leave {floor:.1e}. A better search could "
            "succeed."
        )
    elif alone:
        than = "better than" if ended < floor else "about as well as"
        why = (
            f"Candidates that are not samples explain the weights {than} the samples do ({both}). "
            "With this premise many sets do, and only a prior on the inputs could tell them apart."
        )
    else:
        why = _beside_the_floor(ended, floor, both, missed)
    helps = ratio >= ENOUGH and not alone
    why += _elsewhere(floor, posed.floors) if helps else ""
    also = f", {seen} {'more ' if recovered else ''}recognisable" if seen else ""
    return f"{recovered or 'None'} of {samples} samples recovered{also}. {why}"


def _beside_the_floor(ended: float, floor: float, both: str, missed: Missed | None) -> str:
    """Say why wrong candidates fit as well as the samples do."""
    below = "below the floor" if ended < floor else "as well as the samples do"
    said = f"The attack fits {below} with wrong candidates ({both}): "
    largest = None if missed is None else missed.coefficient
    if largest is not None and largest < SMALL:
        return (
            f"{said}what was missed has coefficients of at most {largest:.2g} of the "
            "largest, a trace too small to be told from the floor."
        )
    if floor <= ROUNDING:
        return f"{said}the weights are explained in more than one way."
    size = "" if largest is None else f", though coefficients are up to {largest:.2g}"
    return f"{said}the floor hides what was missed{size}."


def _no_trace(floor: float, posed: Posed) -> str:
    """Say that the samples do not explain the weights."""
    if posed.premise.weights_alone:
        start = "" if posed.target == "change" else ", or the initial weights are still there"
        return (
            f"The premise {posed.premise.value} does not hold for this model: the samples "
            f"themselves leave a residual of {floor:.1e} of its weights, where {BROKEN:g} is the "
            f"most that kinks of ReLU account for. Training ended too early{start}."
        )
    return (
        "The model holds no such trace at this width or laziness: the samples themselves leave "
        f"a residual of {floor:.1e}, where less than {NO_TRACE:g} is asked for, so no search "
        "of this kind can be relied on."
    )


def _elsewhere(floor: float, floors: Mapping[str, float]) -> str:
    """Name the point at which the samples explain the weights far better, if there is one."""
    clear = [at for at, x in floors.items() if x < NO_TRACE and not x > BETTER * floor]
    if not clear or floor <= ROUNDING:
        return ""
    point = min(clear, key=floors.__getitem__)
    return f" With features at the point '{point}' they leave {floors[point]:.1e}: audit it there."
