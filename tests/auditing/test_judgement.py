"""Judgement: what a run shows without the truth, and how sure that is."""

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import exhume
from exhume.auditing.judgement import (
    LONGER,
    SIGNS,
    SURE,
    beforehand,
    calibration,
    judge,
    probabilities,
)
from exhume.equation.problem import FirstLayer, Premise
from exhume.methods import Reconstruction, reconstruct
from exhume.solvers import Outcome
from problems import case, gaussian

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
         "equations for each unknown are too few", "--parameters all"),
    ],
)  # fmt: skip
def test_failures_say_why_and_what_to_try(
    changes: Any, verdict: str, reason: str, advice: str
) -> None:
    judged = judge(KNOWN.problem, wrong(**changes))
    assert judged.verdict == verdict and reason in judged.reason
    assert advice in " ".join(judged.advice) and judged.sure == 0


def test_floors_and_weights_alone() -> None:
    moved = replace(KNOWN.problem, drift=1.0)
    assert judge(moved, wrong()).verdict == "no evidence"
    alone = replace(KNOWN.problem, premise=Premise.DECAY)
    judged = judge(alone, FOUND)
    assert judged.verdict == "cannot tell" and "--target change" in judged.advice[0]
    started = replace(alone, start=torch.zeros_like(alone.target))  # they were given
    assert "initial" not in " ".join(judge(started, FOUND).advice)
    assert "--resume" not in LONGER  # a run that is over refuses it


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
    before, rows = gaussian(30, 10), gaussian(30, 7, seed=1) @ gaussian(7, 10, seed=2)
    layer = replace(KNOWN.problem, first_layer=FirstLayer(before, before + 1e-2 * rows))
    judged = judge(layer, replace(less, explained=None))
    assert judged.verdict == "partly" and "in 7 directions" in judged.reason
    few = judge(KNOWN.problem, reconstruct(KNOWN.problem, 2, product_limit=400))
    assert few.verdict in ("cannot tell", "no evidence")


def test_a_hopeless_run_is_announced_before_it_begins() -> None:
    fine, poor = beforehand(KNOWN.problem, 4), beforehand(KNOWN.problem, 20)
    assert fine == ["4 samples of 10 entries are 40 unknowns, for which there are 116 equations "
                    "at most: 2.90 for each"]  # fmt: skip
    assert "0.50 for each" in poor[0] and "too few" in poor[1] and "--parameters all" in poor[1]
    several = Mock(spec=KNOWN.problem.features, outputs=3, width=120, dim=10)
    for premise, count in ((Premise.DECAY, 108), (Premise.MARGIN, 116)):  # one multiplier will do
        posed = Mock(target=KNOWN.problem.target, dim=10, features=several, premise=premise)
        assert f"{count} equations at most" in beforehand(posed, 4)[0]


def test_the_model_is_what_its_file_says() -> None:
    learnt = calibration()
    assert set(learnt["weights"]) == set(SIGNS) and "exhume bench calibration" in learnt["made by"]
    assert learnt["learnt from"]["seeds"][1] < learnt["tested on"]["seeds"][0]
    sure = [row for row in learnt["tested on"]["reliability"] if row["low"] >= SURE]
    assert all(row["true"] >= 0.95 for row in sure) and sum(row["count"] for row in sure) >= 100
    drawn = [row for row in learnt["tested on"]["sketched"] if row["low"] >= SURE]
    assert all(row["true"] >= 0.95 for row in drawn) and sum(row["count"] for row in drawn) >= 50
    rows = torch.zeros(3, len(SIGNS), dtype=torch.float64)
    rows[:, 0] = torch.tensor([-6.0, -1.0, 2.0])  # the less it may be off, the more likely
    assert probabilities(rows).diff().lt(0).all()


def test_an_audit_from_python_has_it_all() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1)), torch.ones(1, 3)
    before = {name: w.clone() for name, w in model.state_dict().items()}
    model(x).backward()
    after = {name: (w - 1e-5 * w.grad).detach() for name, w in model.named_parameters()}
    found = exhume.audit(model, before, after, (3,), samples=1, norm="sqrt_d", device="cpu")
    assert found.verdict == "reconstructed" and found.probabilities.shape == (1,)
    assert found.advice == [] and found.probabilities[0] > SURE
