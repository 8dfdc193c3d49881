"""Evidence: what is claimed after each outcome, what is not, and what a reader is told of both."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from exhume.auditing import evidence
from exhume.auditing.evidence import verdict
from exhume.equation.problem import Premise
from exhume.methods import Reconstruction
from exhume.solvers import Outcome
from problems import case, gaussian
from runs import result_of

PROBLEM = case(10, 2, 3.0).problem  # 60 equations, 10 unknowns a candidate
CHANGE, MARGIN, DECAY, _ = Premise
PREMISES = CHANGE, MARGIN, DECAY
MOVED, KINKS, UNKNOWN = "Features moved in training", "kinks of ReLU", "not known without the truth"
FEW, CHANCE, AGAIN = "Nothing can be claimed", "not met by chance", "found them again at the same"
MAYBE, WEAK, MORE = "Some candidates may be", "weak evidence", "4 candidates explained"
KINDS = {FEW, CHANCE, AGAIN, MAYBE, WEAK, MORE}


def found(count: int, **changes: Any) -> Reconstruction:
    rows, told = torch.ones(count, 1, dtype=torch.float64), (2.5e-3, Outcome.STALLED, "exhume")
    return replace(Reconstruction(gaussian(count, 10), rows, *told, 0, 1, 1, 1.0), **changes)


@pytest.mark.parametrize(
    ("premise", "count", "changes", "kinds", "words"),
    [
        (CHANGE, 2, {"outcome": Outcome.CONVERGED, "residual": 2.5e-13}, {CHANCE}, "2.5e-13"),
        # half-precision weights are met to rounding long before they are met by the samples alone
        (CHANGE, 2, {"outcome": Outcome.CONVERGED, "residual": 1e-4}, {MAYBE}, "1.0e-04"),
        (CHANGE, 2, {"outcome": Outcome.SETTLED, "explained": 4}, {AGAIN}, "no proof"),
        (CHANGE, 2, {"explained": 4}, {MAYBE, MORE}, "3.22 equations"),
        *((CHANGE, 2, {"outcome": x}, {MAYBE}, "2.5e-03") for x in list(Outcome)[2:]),
        *((MARGIN, 2, {"outcome": x}, {WEAK}, "no candidate can be called") for x in Outcome),
        (DECAY, 2, {"residual": 2.5e-13}, {WEAK}, "3.22 equations"),
        *((x, 6, {"outcome": Outcome.CONVERGED}, {FEW}, "1.00 equations") for x in PREMISES),
        (Premise.REPLAY, 6, {}, {FEW}, "1.11 equations"),  # labels take up none
        (CHANGE, 6, {"rank": 9}, {FEW}, "1.12 equations"),
        (CHANGE, 6, {"rank": 4}, {MAYBE}, "of dimension 10 in a subspace of dimension 4"),
    ],
)
def test_claims(premise: Premise, count: int, changes: Any, kinds: set[str], words: str) -> None:
    problem = replace(PROBLEM, premise=premise)
    claims = " ".join(evidence.claims(problem, found(count, **changes)))
    assert {kind for kind in KINDS if kind in claims} == kinds and words in claims
    assert "recovered" not in claims and ("residual" in claims) == (FEW not in kinds)
    assert evidence.ratio(PROBLEM, 6, rank=4) == 2.5


@pytest.mark.parametrize(
    ("premise", "drift", "rank", "said", "unsaid"),
    [
        (CHANGE, 0.0, None, [], [MOVED, KINKS, UNKNOWN, "directions"]),
        (CHANGE, 0.0, 4, ["in the 4 directions"], [MOVED, KINKS]),
        (CHANGE, 1e-2, None, [MOVED, UNKNOWN], [KINKS, "leave a trace"]),
        (MARGIN, 1e-2, None, ["on the margin leave a trace", "label", KINKS, UNKNOWN], [MOVED]),
        (DECAY, 1e-2, None, ["has a slope leave a trace", "either sign", KINKS], [MOVED, "margin"]),
    ],
)
def test_limits(premise: Premise, drift: float, rank: Any, said: Any, unsaid: Any) -> None:
    problem = replace(PROBLEM, premise=premise, drift=drift)
    limits = " ".join(evidence.limits(problem, found(2, rank=rank)))
    assert [words for words in (*said, *unsaid) if words in limits] == said
    assert limits.endswith("does not show that the model is safe: a better one may succeed.")


@pytest.mark.parametrize("rows", [1, 3])
def test_a_candidate_with_one_tiny_row_of_several_is_no_small_one(rows: int) -> None:
    blocks = torch.zeros(3, rows, 2, dtype=torch.float64)
    blocks[:, -1, 1] = torch.tensor([3.0, 0.03, 0.3])
    blocks[:, 0, 0] += 1e-9
    limits = evidence.limits(PROBLEM, found(3, coefficients=blocks.flatten(0, 1)))
    assert any("is 0.01 of the largest" in limit for limit in limits)


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
        (CHANGE, 1e-3, 1e-8, 0, 0.8, TOO_FEW),
        (CHANGE, 1e-2, 2e-2, 7, 4.0, "7 of 8 samples recovered. The attack fits below the floor"),
        (CHANGE, 1e-12, 1e-30, 2, 4.0, "fits as well as the samples do with wrong candidates"),
        (CHANGE, 5e-4, 1e-4, 7, 4.0, "7 of 8|fits nearly as well|what was missed is too small"),
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
    said = verdict(residual, floor, recovered, 8, ratio, {"final": 1e-9}, premise)
    assert all(part in said for part in words.split("|"))
    assert ("at the point 'final'" in said) == (words is NO_TRACE)


def test_where_a_verdict_turns_and_the_point_that_it_names() -> None:
    floor = 0.1 * evidence.NO_TRACE
    for factor, words in ((0.99, "fits"), (1.01, "failed although")):
        assert words in verdict(factor * evidence.ABOVE * floor, floor, 0, 8, 4.0)
    for factor, words in ((0.99, "failed although"), (1.01, "no such trace")):
        assert words in verdict(1.0, factor * evidence.NO_TRACE, 0, 8, 4.0)
    assert "'both' they leave 1.0e-05" in verdict(1e-3, 0.3, 0, 8, 4.0, FLOORS)
    assert "at the point" not in verdict(1e-3, 0.3, 0, 8, 4.0, {"initial": 0.3})
    assert "at the point" not in verdict(1e-3, 5e-3, 0, 8, 0.5, FLOORS)


def scored(recovered: float, exact: float, look_alikes: float = 0.0) -> dict[str, Any]:
    """What score.json holds of eight samples, as far as it is read here."""
    bars = {"recovered": 0.1, "exact": 0.01}
    score = {"samples": 8, "recovered": recovered, "exact": exact, "thresholds": bars}
    chance = {"sphere": {"error": 1.3}, "neighbour": {"error": 0.9, "recovered": look_alikes}}
    return {"score": score, "chance": chance}


def seen(own: int, other: int | None) -> dict[str, Any]:
    """The same of eight images of which none was recovered and so many can be recognised."""
    counts = {"samples": 8, "cosine80": 0, "cosine90": 0, "ssims": [], "cosines": [0.7, None]}
    control = None if other is None else counts | {"ssim": other, "control": None}
    p = None if other is None else 0.001 if own > 4 else 0.5
    return scored(0, 0) | {"recognised": counts | {"ssim": own, "control": control, "p_value": p}}


@pytest.mark.parametrize(
    ("changes", "truth", "tone", "words"),
    [
        ({}, None, "open", "8 candidates explain the weights to a residual of"),
        ({"candidates": 1}, None, "open", "1 candidate explains the weights"),
        ({"outcome": "settled"}, None, "open", "Settled: 8 candidates, found again by independent"),
        ({"outcome": "stalled"}, None, "open", "Not converged: 8 candidates, and a residual"),
        ({"premise": "decay"}, None, "open", "many other sets may do so as well"),
        ({"premise": "change"}, None, "open", "enough numbers to leave no other explanation"),
        ({}, scored(0, 0), "calm", "None of 8 training samples recovered."),
        ({}, scored(0, 0), "calm", "not that the data are safe"),
        ({"premise": "margin"}, scored(0, 0), "calm", "have 0.90 to 0.94 at best"),
        ({}, seen(7, 0), "exposed", "recovered, 7 of 8 recognisable (held-out: 0 of 8)."),
        ({}, seen(2, 1), "calm", "recovered, 2 of 8 recognisable (held-out: 1 of 8)."),
        ({}, seen(7, None), "calm", "7 of 8 recognisable (held-out: none at hand)."),
        ({}, scored(0.5, 0), "exposed", "4 of 8 training samples recovered, none exactly."),
        ({}, scored(1, 0.25), "exposed", "8 of 8 training samples recovered, 2 exactly."),
        ({}, scored(1, 1), "exposed", "0.9 (the nearest other training sample) or 1.3 (random"),
    ],
)
def test_the_headline(changes: Any, truth: Any, tone: str, words: str) -> None:
    sentence, meaning, said = evidence.headline(result_of(8, (10,), **changes), truth)
    assert said == tone and words in f"{sentence} {meaning}"
    assert ("nobody may say “recovered”" in meaning) == (truth is None)


def test_what_recognisable_images_are_worth() -> None:
    for own, other, words in ((7, 0, "than chance"), (1, 1, "may be chance"), (7, None, "at hand")):
        said = evidence.recognition(seen(own, other)["recognised"])
        assert said.startswith("The best cosine of a training image") and "is 0.7." in said
        assert words in said
    assert evidence.by_recognition(result_of(8, (10,)), seen(0, 0))
    assert not evidence.by_recognition(result_of(8, (10,)), scored(0, 0))
    some = seen(0, 0) | {"score": scored(0.5, 0)["score"]}
    assert not evidence.by_recognition(result_of(8, (10,)), some)
    assert evidence.by_recognition(result_of(8, (10,), premise="decay"), some)


LOW = result_of(8, (10,))["problem"] | {"ratio": 0.4}


@pytest.mark.parametrize(
    ("changes", "truth", "words"),
    [
        ({}, scored(1, 1), None),
        ({"outcome": "settled", "sentence": "So."}, None, "A residual is left. So."),
        ({"outcome": "stalled", "sentence": "So."}, None, "The search did not converge. So."),
        ({"problem": LOW}, None, "The ratio of 0.4 is under 1.2, near or below the counting limit"),
        ({"problem": LOW, "rank": 2}, None, None),
        ({"premise": "margin"}, None, "a small residual is weak evidence"),
        ({"premise": "margin"}, scored(1, 1), None),
        ({}, scored(1, 1, look_alikes=0.25), "Look-alikes: for 25\u00a0% of the training samples"),
    ],
)
def test_cautions(changes: dict[str, Any], truth: dict[str, Any] | None, words: str | None) -> None:
    said = evidence.cautions(result_of(8, (10,), **changes), truth)
    assert len(said) == (words is not None) and all(words in caution for caution in said)


def test_the_ratio_is_that_of_the_subspace() -> None:
    assert evidence.ratio_of(result_of(8, (100,))) == 4.0
    assert evidence.ratio_of(result_of(8, (100,), rank=8)) == 50.0
    assert evidence.ratio_of({"problem": LOW | {"ratio": None}}) is None
