"""Evidence: what is claimed after each outcome, what is not, and what a reader is told of both."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from exhume.auditing import evidence
from exhume.auditing.answers import QUESTIONS, answers
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


def scored(recovered: float, exact: float, look_alikes: float = 0.0, **grades: Any) -> Any:
    """What score.json holds of eight samples, as far as it is read here."""
    bars = {"recovered": 0.1, "exact": 0.01}
    score = {"samples": 8, "recovered": recovered, "exact": exact, "thresholds": bars} | grades
    chance = {"sphere": {"error": 1.3}, "neighbour": {"error": 0.9, "recovered": look_alikes}}
    return {"score": score, "chance": chance}


def seen(own: int, other: int | None) -> dict[str, Any]:
    """The same of eight images of which none was recovered and so many can be recognised."""
    ssims = [0.9] * own + [None] * (8 - own)
    counts = {"samples": 8, "cosine80": 0, "cosine90": 0, "ssims": ssims, "cosines": [0.7, None]}
    control = None if other is None else counts | {"ssim": other, "control": None}
    p = None if other is None else 0.001 if own > 4 else 0.5
    recognised = counts | {"ssim": own, "control": control, "p_value": p}
    return scored(0, 0, rows=[{"grade": "not found"}] * 8) | {"recognised": recognised}


def verdict(word: str, sure: int) -> dict[str, Any]:
    """What result.json holds of a verdict on eight candidates, so many of them likely."""
    chances = [0.99] * sure + [0.3] * (8 - sure)
    return {"verdict": word, "reason": "So it is.", "probabilities": chances}


@pytest.mark.parametrize(
    ("changes", "truth", "tone", "words"),
    [
        (verdict("reconstructed", 8), None, "exposed", "Reconstructed: all 8 candidates are"),
        (verdict("partly", 3), None, "exposed", "Partly: 3 of 8 candidates are very likely"),
        (verdict("no evidence", 0), None, "calm", "No evidence: none of 8 candidates"),
        (verdict("cannot tell", 0), None, "open", "Cannot tell whether any of 8 candidates is"),
        (verdict("cannot tell", 0), None, "open", "So it is. The training data were not given"),
        ({}, scored(0, 0), "calm", "None of 8 training samples came back."),
        ({}, scored(0, 0), "calm", "not that the data are safe"),
        ({"premise": "margin"}, scored(0, 0), "calm", "have 0.90 to 0.94 at best"),
        ({}, seen(2, 1), "calm", "came back; 2 of 8 are alike in SSIM (held-out: 1 of 8)."),
        ({}, seen(0, None), "calm", "0 of 8 are alike in SSIM (held-out: none at hand)."),
        ({}, seen(7, None), "open", "Not measured: 7 of 8 training samples may be recognisable"),
        ({}, scored(0.5, 0), "exposed", "4 of 8 training samples came back: 4 recovered."),
        ({}, scored(1, 0.25), "exposed", "8 of 8 training samples came back: 2 exact, 6 recovered"),
        # all legible, and one under the threshold
        ({}, scored(0.125, 0, recognisable=1.0), "exposed", "1 recovered, 7 recognisable."),
        ({}, scored(1, 1), "exposed", "0.9 (the nearest other training sample) or 1.3 (random"),
    ],
)
def test_the_headline(changes: Any, truth: Any, tone: str, words: str) -> None:
    sentence, meaning, said = evidence.headline(result_of(8, (10,), **changes), truth)
    assert said == tone and words in f"{sentence} {meaning}"
    assert ("data were not given" in meaning) == (truth is None)


@pytest.mark.parametrize(
    ("changes", "truth", "leaks", "sure", "todo"),
    [
        (verdict("reconstructed", 8), None, "Yes, very likely: all", "8 of 8", "Handle the"),
        (verdict("partly", 3), None, "Yes, very likely: not all", "3 of 8", "--seed"),
        (verdict("no evidence", 0), None, "does not show it", "for safety", "--seed"),
        (verdict("cannot tell", 0), None, "cannot tell", "0 of 8 candidates", "--seed"),
        ({"advice": []}, None, "cannot tell", "0 of 8 candidates", "exhume score"),
        ({}, scored(0.5, 0, error=0.1), "Yes: 4 of 8", "other sample has 0.9", "Handle"),
        ({}, seen(7, None), "Not measured", "pictures with no others", "--held-out"),
        ({}, scored(0, 0), "Not to this attack", "a better attack may", "--seed"),
    ],
)
def test_three_questions_are_answered(
    changes: Any, truth: Any, leaks: str, sure: str, todo: str
) -> None:
    result = result_of(8, (10,), **({"advice": ["Try another --seed."]} | changes))
    found = dict(answers(result, truth))
    for question, words in zip(QUESTIONS, (leaks, sure, todo), strict=True):
        assert words in found[question]


def test_what_recognisable_images_are_worth() -> None:
    for own, other, words in (
        (7, 0, "held-out"),
        (1, 1, "may be chance"),
        (7, None, "at hand"),
    ):
        said = evidence.recognition(seen(own, other)["recognised"])
        assert said.startswith("The best cosine of a training image") and "is 0.7." in said
        assert words in said
    assert evidence.by_recognition(result_of(8, (10,)), seen(0, 0))
    assert not evidence.by_recognition(result_of(8, (10,)), scored(0, 0))
    some = seen(0, 0) | {"score": scored(0.5, 0)["score"]}
    assert not evidence.by_recognition(result_of(8, (10,)), some)
    assert evidence.by_recognition(result_of(8, (10,), premise="decay"), some)


LOW = result_of(8, (10,))["support"] | {"equations": 32}


@pytest.mark.parametrize(
    ("changes", "truth", "words"),
    [
        ({}, scored(1, 1), None),
        ({"outcome": "settled", "sentence": "So."}, None, "A residual is left. So."),
        ({"outcome": "stalled", "sentence": "So."}, None, "The search did not converge. So."),
        ({"support": LOW}, None, "The ratio of 0.4 is under 1.2, near or below the counting limit"),
        ({"premise": "margin"}, None, "a small residual is weak evidence"),
        ({"premise": "margin"}, scored(1, 1), None),
        ({}, scored(1, 1, look_alikes=0.25), "Look-alikes: for 25\u00a0% of the training samples"),
    ],
)
def test_cautions(changes: dict[str, Any], truth: dict[str, Any] | None, words: str | None) -> None:
    said = evidence.cautions(result_of(8, (10,), **changes), truth)
    assert len(said) == (words is not None) and all(words in caution for caution in said)
