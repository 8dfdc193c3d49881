"""Judgement: what a run shows without the truth, and how sure that is."""

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from exhume import data, victims
from exhume.auditing import judgement
from exhume.auditing.evidence import headline
from exhume.auditing.judgement import SIGNS, SURE, Asked, advice, judge
from exhume.equation.objective import fitted
from exhume.equation.problem import FirstLayer, Premise, Problem
from exhume.methods import Reconstruction, reconstruct
from exhume.solvers import Outcome
from exhume.theory.support import support
from problems import case, gaussian
from runs import result_of

KNOWN = case(10, 4, 3.0, dtype=torch.float32)
FOUND = reconstruct(KNOWN.problem, 4)


def test_what_is_pinned_down_is_reconstructed() -> None:
    judged = judge(KNOWN.problem, FOUND)
    assert judged.verdict == "reconstructed" and judged.advice == []
    assert judged.probabilities.shape == (4,) and judged.sure == 4
    # the same at a residual that all right candidates have when time runs out
    moved = KNOWN.inputs + 1e-3 * gaussian(4, 10)
    cut = replace(FOUND, samples=moved, residual=2e-6, outcome=Outcome.BUDGET)
    assert judge(KNOWN.problem, cut).verdict in ("reconstructed", "partly")


def wrong(**changes: Any) -> Reconstruction:
    """Random candidates that leave most of the weights."""
    told = {"samples": gaussian(4, 10, seed=9), "residual": 0.88, "outcome": Outcome.STALLED}
    return replace(FOUND, **{**told, **changes})


@pytest.mark.parametrize(
    ("changes", "verdict", "reason", "advice"),
    [
        ({}, "cannot tell", "Nothing explains the weights", "initial weights, the optimiser"),
        ({"outcome": Outcome.BUDGET}, "cannot tell", "cut off before it ended", "more time"),
        ({"residual": torch.inf, "outcome": Outcome.DIVERGED}, "cannot tell", "too few", "bound"),
        ({"samples": gaussian(20, 10), "coefficients": gaussian(20, 1)}, "cannot tell",
         "equations for each unknown are too few", "known of the inputs"),
    ],
)  # fmt: skip
def test_failures_say_why_and_what_to_try(
    changes: Any, verdict: str, reason: str, advice: str
) -> None:
    judged = judge(KNOWN.problem, wrong(**changes))
    assert judged.verdict == verdict and reason in judged.reason
    assert advice in " ".join(judged.advice) and judged.sure == 0


def test_nothing_is_complete_that_leaves_much() -> None:
    """However many equations there are: an error is not known better than where it was learnt."""
    exact = support(KNOWN.problem, FOUND)
    sure = replace(exact, errors=torch.full((4,), 1e-6, dtype=torch.float64))
    left = replace(FOUND, residual=0.7, outcome=Outcome.STALLED)
    judged = judge(KNOWN.problem, left, sure)
    assert (
        judged.sure == 4 and judged.verdict == "partly" and "must come from others" in judged.reason
    )
    many = replace(sure, equations=10_000 * exact.equations)
    assert (judge(KNOWN.problem, left, many).probabilities < judged.probabilities).all()


def test_floors_and_weights_alone() -> None:
    moved = replace(KNOWN.problem, drift=1.0)
    assert judge(moved, wrong()).verdict == "no evidence"
    alone = replace(KNOWN.problem, premise=Premise.DECAY)
    judged = judge(alone, FOUND)
    assert judged.verdict == "cannot tell" and "--target change" in judged.advice[0]
    started = replace(alone, start=torch.zeros_like(alone.target))  # they were given
    assert "initial" not in " ".join(judge(started, FOUND).advice)
    assert "--resume" not in judgement.LONGER  # a run that is over refuses it


def test_what_cannot_be_measured_is_not_told(monkeypatch) -> None:
    failed = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(sys.modules["exhume.theory.support"], "_measured", failed)
    monkeypatch.setattr("exhume.auditing.judgement.drop_costs", failed)
    judged = judge(KNOWN.problem, FOUND)
    assert failed.call_count == 2 and judged.sure == 0 and judged.verdict == "cannot tell"
    assert "could not be measured" in judged.reason and "memory" in judged.advice[0]
    assert judged.probabilities.isfinite().all()


def test_signs_of_more_samples_than_were_asked_for() -> None:
    less = replace(FOUND, outcome=Outcome.SETTLED, explained=6)
    judged = judge(KNOWN.problem, less)
    assert judged.verdict == "partly" and "6 candidates explained" in judged.reason
    assert judged.advice[0] == "There may be more samples: ask for 6 (--samples 6)."
    for rank, verdict, words in ((7, "partly", "in 7 directions"), (4, "reconstructed", "All 4")):
        rows = torch.cat([KNOWN.inputs, gaussian(3, 10, seed=2)])[:rank]
        judged = judge(replace(KNOWN.problem, first_layer=moved_along(rows)), less)
        assert judged.verdict == verdict and words in judged.reason
    few = judge(KNOWN.problem, reconstruct(KNOWN.problem, 2, product_limit=400))
    assert few.verdict in ("cannot tell", "no evidence")


def moved_along(rows: Tensor) -> FirstLayer:
    """Return a first layer whose change spans these rows."""
    initial = gaussian(30, rows.shape[1])
    return FirstLayer(initial, initial + 1e-2 * gaussian(30, len(rows), seed=1) @ rows)


def test_the_first_layer_speaks_against_candidates_outside_its_span() -> None:
    rests, at = support(KNOWN.problem, FOUND), SIGNS.index("outside")

    def outside(rows: Tensor, **changes: Any) -> Tensor:
        problem = replace(KNOWN.problem, first_layer=moved_along(rows))
        return judgement.signs(problem, replace(FOUND, **changes), rests)[:, at]

    assert not outside(KNOWN.inputs).any()  # to be inside is no merit
    others = gaussian(4, 10, seed=3)
    basis = torch.linalg.qr(others.double().T)[0]
    shares = (FOUND.samples - FOUND.samples @ basis @ basis.T).norm(dim=1) / 10**0.5
    torch.testing.assert_close(outside(others), (10 * shares).log10(), atol=1e-4, rtol=1e-4)
    assert (outside(others) > 0).all()
    lost = torch.full((4, 10), torch.nan).double()
    assert not outside(others, samples=lost).any()


def test_the_smallest_coefficients_are_the_first_to_be_doubted() -> None:
    shares = KNOWN.coefficients.sign() * torch.tensor([[1.0], [1.0], [1.0], [1e-3]])
    target = KNOWN.problem.features.linearize(KNOWN.inputs.float()).combine(shares.float())
    problem = replace(KNOWN.problem, target=target, drift=1e-2)
    wrong = KNOWN.inputs.clone()
    wrong[3] = gaussian(10, seed=7)
    wrong = problem.domain.project(wrong.float()).double()
    fit = fitted(problem, wrong.float())
    found = replace(FOUND, samples=wrong, coefficients=fit.coefficients.cpu(), residual=fit.value,
                    outcome=Outcome.SETTLED)  # fmt: skip
    judged = judge(problem, found)
    assert judged.verdict == "partly" and judged.probabilities.argmin() == 3
    assert judged.sure == 3 and "3 of 4 candidates are pinned down" in judged.reason


def test_eight_of_twenty_samples_are_not_all() -> None:
    known = data.load("digits", 20, classes="parity")
    made = victims.two_layer(known, width=800, steps=50)
    problem = made.posed("last", "midpoint").to("cpu")
    found = reconstruct(problem, 8, product_limit=40)
    right = replace(found, samples=known.inputs[:8], residual=1e-9, outcome=Outcome.SETTLED)
    for each in (found, replace(found, outcome=Outcome.SETTLED), right):
        judged = judge(problem, each, asked=Asked(point="midpoint", samples=8))
        assert judged.verdict != "reconstructed" and "in 20 directions" in judged.reason
        assert "samples: leave the number out, or ask for 20 (--samples 20)." in judged.advice[0]
        result = result_of(8, (8, 8), verdict=judged.verdict, reason=judged.reason)
        said, why, _ = headline(result | {"probabilities": judged.probabilities.tolist()}, None)
        assert said.startswith(("Partly", "Cannot tell", "No evidence")) and "20 dir" in why


def test_advice_names_only_what_was_not_used() -> None:
    made = victims.two_layer(data.sphere(6, 3), width=40, steps=20)
    problem = made.posed("last", "midpoint")

    def tips(posed: Problem = problem, rank: int | None = None, **asked: Any) -> dict[str, str]:
        return advice(posed, replace(FOUND, rank=rank), Asked(**asked))

    fresh, every, span = tips(point="midpoint"), tips(parameters="all"), "--method tansley2026"
    for words in ("--parameters all", span):
        assert words in fresh["other"] and words in fresh["wider"]
    assert "--point both" in fresh["other"] and "another --seed" in fresh["other"]
    assert "--parameters" not in every["other"] + every["wider"]
    assert "--point" not in tips(point="both")["other"]
    assert span not in tips(rank=3)["other"] + tips(rank=3)["wider"]
    assert tips(KNOWN.problem)["other"] == "Try another --seed."  # random features have one block
    assert tips(KNOWN.problem)["recipe"] == "" and "--premise replay" in fresh["recipe"]
    replayed = tips(replace(problem, premise=Premise.REPLAY))
    assert replayed["recipe"] == "" and "--" not in replayed["check"] + replayed["wider"]
    assert "--premise replay" in fresh["check"] and "--target change" in fresh["start"]
    assert tips(replace(problem, start=problem.target))["start"] == ""
    assert "--device" not in fresh["memory"]


def test_the_model_is_what_its_file_says() -> None:
    learnt = judgement.calibration()
    assert set(learnt["weights"]) == set(SIGNS) and "exhume bench calibration" in learnt["made by"]
    assert learnt["learnt from"]["seeds"][1] < learnt["tested on"]["seeds"][0]
    sure = [row for row in learnt["tested on"]["reliability"] if row["low"] >= SURE]
    assert all(row["true"] >= 0.95 for row in sure) and sum(row["count"] for row in sure) >= 100
    drawn = [row for row in learnt["tested on"]["sketched"] if row["low"] >= SURE]
    assert all(row["true"] >= 0.95 for row in drawn) and sum(row["count"] for row in drawn) >= 50
    neither, *one, both = learnt["tested on"]["signs"]  # left out of those not always known
    low, high = neither["log_likelihood"], both["log_likelihood"]
    assert all(low < x["log_likelihood"] < high for x in one)
    assert both["sure"] > neither["sure"] and both["wrong"] <= 0.05 * both["sure"]
    rows = torch.zeros(3, len(SIGNS), dtype=torch.float64)
    rows[:, 0] = torch.tensor([-6.0, -1.0, 2.0])  # the less it may be off, the more likely
    assert judgement.probabilities(rows).diff().lt(0).all()
