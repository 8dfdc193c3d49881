"""With the truth at hand: each cause of a miss is named where it is the true one."""

import math
import re

import pytest

from exhume.auditing import hindsight
from exhume.auditing.hindsight import Missed, Posed, verdict
from exhume.equation.problem import Premise

CHANGE, MARGIN, *_ = Premise
FLOORS = {"initial": 0.3, "final": 0.4, "midpoint": 5e-3, "both": 1e-5}
NONE, TRACE = "None of 8 samples recovered. ", "The attack failed although the trace is there"
TOO_FEW, NO_TRACE = "0.80 equations for each unknown are too few", "no such trace at this width or"


@pytest.mark.parametrize(
    ("premise", "residual", "floor", "recovered", "ratio", "words"),
    [
        (CHANGE, 1e-12, 1e-13, 8, 4.0, "All 8 samples recovered"),
        (CHANGE, 1e-3, 1e-8, 0, 4.0, NONE + TRACE),
        (CHANGE, 1e-3, 1e-8, 5, 4.0, f"5 of 8 samples recovered. {TRACE}"),
        (CHANGE, None, 1e-8, 0, 4.0, "ended at a residual of inf"),
        (CHANGE, 1e-3, 1e-2, 0, 4.0, NO_TRACE),
        (CHANGE, 1e-3, math.nan, 0, 4.0, NO_TRACE),
        (CHANGE, 1e-3, 9e-3, 0, 4.0, "fits below the floor with wrong candidates"),
        (CHANGE, 0.47, 2e-13, 0, 0.8, f"{TOO_FEW}: what was found does not even explain the w"),
        (CHANGE, 1e-12, 2e-13, 0, 0.8, f"{TOO_FEW}: candidates that are not samples explain"),
        (CHANGE, 1e-2, 2e-2, 7, 4.0, "7 of 8 samples recovered. The attack fits below the floor"),
        (CHANGE, 1e-12, 1e-30, 2, 4.0, "fits as well as the samples do with wrong candidates"),
        (CHANGE, 5e-4, 1e-4, 7, 4.0, "7 of 8|The attack failed although"),
        (MARGIN, 1e-7, 0.07, 0, 4.0, "explain the weights better than the samples do"),
        (MARGIN, 0.1, 0.07, 3, 4.0, "3 of 8|Candidates that are not samples|about as well as"),
        (MARGIN, 0.5, 0.01, 0, 4.0, TRACE),
        (MARGIN, 1e-3, 0.6, 0, 4.0, "The premise margin does not hold for this model"),
        (MARGIN, 1e-3, 0.07, 0, 0.8, TOO_FEW),
    ],
)
def test_a_verdict_tells_the_attack_from_the_model(
    premise: Premise, residual: float | None, floor: float, recovered: int, ratio: float, words: str
) -> None:
    said = verdict(residual, floor, recovered, 8, ratio, Posed(premise, floors={"final": 1e-9}))
    assert all(part in said for part in words.split("|"))
    better = premise is CHANGE and recovered < 8 and ratio > 1 and not floor < 1e-8
    assert ("at the point 'final'" in said) == better


def test_where_a_verdict_turns_and_the_point_that_it_names() -> None:
    floor = 0.1 * hindsight.NO_TRACE
    for factor, words in ((0.99, "fits"), (1.01, "failed although")):
        assert words in verdict(factor * hindsight.ABOVE * floor, floor, 0, 8, 4.0)
    for factor, words in ((0.99, "failed although"), (1.01, "no such trace")):
        assert words in verdict(1.0, factor * hindsight.NO_TRACE, 0, 8, 4.0)
    assert "'both' they leave 1.0e-05" in verdict(1e-3, 0.3, 0, 8, 4.0, Posed(floors=FLOORS))
    assert "at the point" not in verdict(1e-3, 0.3, 0, 8, 4.0, Posed(floors={"initial": 0.3}))
    assert "at the point" not in verdict(1e-3, 5e-3, 0, 8, 0.5, Posed(floors=FLOORS))


@pytest.mark.parametrize(
    ("missed", "floor", "words"),
    [
        (Missed(0.9999, 0.7), 1e-4, "Only their size is off.*cosine 0.9999.*norm, or the range"),
        (Missed(0.5, 0.03), 1e-4, "at most 0.03 of the largest, a trace too small"),
        (Missed(0.5, 0.69), 1e-4, "the floor hides what was missed, though coefficients are up to"),
        (Missed(0.5, 0.69), 1e-12, "explained in more than one way"),
    ],
)
def test_what_was_missed_says_why(missed: Missed, floor: float, words: str) -> None:
    said = verdict(floor / 2, floor, 5, 8, 4.0, missed=missed)
    assert re.search(words, said) and ("too small" in said) == (missed.coefficient < 0.1)


def test_a_better_point_is_named_whatever_was_missed() -> None:
    for residual, recovered in ((1e-3, 0), (2e-3, 7)):
        said = verdict(
            residual, 1e-3, recovered, 8, 4.0, Posed(floors={"both": 1e-6, "initial": 1e-3})
        )
        assert "at the point 'both' they leave 1.0e-06: audit it there" in said
    assert "point" not in verdict(1e-3, 1e-3, 7, 8, 4.0, Posed(floors={"both": 9e-4}))


def test_what_can_be_recognised_is_not_called_missed() -> None:
    seen = Missed(0.93, 0.5, recognisable=7)
    for floor in (0.07, 0.6):  # where the premise seems to fail, too
        said = verdict(1e-3, floor, 0, 8, 4.0, Posed(MARGIN, "weights"), seen)
        assert said.startswith("None of 8 samples recovered, 7 recognisable. With the premise")
        assert "does not hold" not in said and "not samples" not in said
    assert "1 more recognisable" in verdict(1e-3, 1e-8, 2, 8, 4.0, missed=Missed(0.5, 0.5, 1))


def test_what_is_still_there_depends_on_the_target() -> None:
    for target, there in (("weights", True), ("change", False)):
        said = verdict(1e-3, 0.6, 0, 8, 4.0, Posed(MARGIN, target))
        assert "ended too early" in said and ("initial weights are still there" in said) == there
