"""Evidence: what is claimed after each outcome, and what is said not to be shown."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exhume.auditing import evidence
from exhume.equation.problem import Premise
from exhume.methods import Reconstruction
from exhume.solvers import Outcome
from problems import case, gaussian

PROBLEM = case(10, 2, 3.0).problem  # 60 equations, 10 unknowns a candidate


def found(
    count: int,
    outcome: Outcome = Outcome.CONVERGED,
    residual: float = 2.5e-3,
    rank: int | None = None,
    coefficients: Tensor | None = None,
) -> Reconstruction:
    """What an attack might have found."""
    rows = torch.ones(count, 1, dtype=torch.float64) if coefficients is None else coefficients
    return Reconstruction(
        gaussian(count, 10), rows, residual, outcome, "exhume", 0, 1, 1, 1.0, rank=rank
    )


@pytest.mark.parametrize("outcome", list(Outcome))
def test_each_outcome_is_given_its_own_words(outcome: Outcome) -> None:
    residual = 2.5e-13 if outcome is Outcome.CONVERGED else 2.5e-3
    claims = " ".join(evidence.claims(PROBLEM, found(2, outcome, residual)))
    assert "3.00 equations" in claims and f"{residual:.1e}" in claims and "recovered" not in claims
    assert ("explain the weights" in claims) == (outcome is Outcome.CONVERGED)
    assert ("found them again at the same residual" in claims) == (outcome is Outcome.SETTLED)
    assert ("no proof" in claims) == (outcome is Outcome.SETTLED)
    assert ("Some candidates may be" in claims) == (
        outcome not in (Outcome.CONVERGED, Outcome.SETTLED)
    )


@pytest.mark.parametrize("outcome", list(Outcome))
def test_too_few_equations_prove_nothing_whatever_the_outcome(outcome: Outcome) -> None:
    claims = evidence.claims(PROBLEM, found(6, outcome))
    assert "Nothing can be claimed" in claims[-1] and len(claims) == 2


def test_a_coarse_tolerance_is_no_claim() -> None:
    """Half-precision weights are met to rounding long before they are met by the samples alone."""
    claims = " ".join(evidence.claims(PROBLEM, found(2, Outcome.CONVERGED, 1e-4)))
    assert "not met by chance" not in claims and "Some candidates may be" in claims


def test_more_that_explained_than_were_asked_for_are_told_of() -> None:
    stalled = replace(found(2, Outcome.STALLED), explained=4)
    assert "4 candidates explained" in " ".join(evidence.claims(PROBLEM, stalled))
    settled = replace(found(2, Outcome.SETTLED), explained=4)
    assert "4 candidates" not in " ".join(evidence.claims(PROBLEM, settled))


def test_in_a_subspace_its_dimension_counts_the_unknowns() -> None:
    assert evidence.ratio(PROBLEM, 6) == 1.0
    assert evidence.ratio(PROBLEM, 6, rank=4) == 2.5
    full = " ".join(evidence.claims(PROBLEM, found(6)))
    assert "Nothing can be claimed" in full and "subspace" not in full
    within = " ".join(evidence.claims(PROBLEM, found(6, rank=4)))
    assert "dimension 10 in a subspace of dimension 4" in within and "2.50 equations" in within
    assert "Nothing can be claimed" not in within
    few = " ".join(evidence.claims(PROBLEM, found(6, rank=9)))
    assert "Nothing can be claimed" in few and "1.11 equations" in few
    assert "4 directions" in " ".join(evidence.limits(PROBLEM, found(6, rank=4)))
    assert "directions" not in " ".join(evidence.limits(PROBLEM, found(6)))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_smallest_coefficient_is_that_of_a_candidate(rows: int) -> None:
    """With k rows each, a candidate with one tiny row and one large one is not a small one."""
    sizes = torch.tensor([3.0, 0.03, 0.3], dtype=torch.float64)
    blocks = torch.zeros(3, rows, 2, dtype=torch.float64)
    blocks[:, -1, 1] = sizes
    blocks[:, 0, 0] += 1e-9
    limits = evidence.limits(PROBLEM, found(3, coefficients=blocks.flatten(0, 1)))
    assert any("is 0.01 of the largest" in limit for limit in limits)


@pytest.mark.parametrize("premise", [Premise.MARGIN, Premise.DECAY])
@pytest.mark.parametrize("outcome", list(Outcome))
def test_trained_weights_alone_prove_nothing_whatever_the_residual(
    outcome: Outcome, premise: Premise
) -> None:
    problem = replace(PROBLEM, premise=premise, drift=1e-2)
    claims = " ".join(evidence.claims(problem, found(2, outcome, 2.5e-13)))
    assert "3.00 equations" in claims and "2.5e-13" in claims
    assert "weak evidence" in claims and "no candidate can be called" in claims
    assert "by chance" not in claims and "found them again" not in claims
    few = evidence.claims(problem, found(6, outcome))
    assert "Nothing can be claimed" in few[-1]


def test_each_premise_has_limits_of_its_own() -> None:
    change, margin, decay = (
        " ".join(evidence.limits(replace(PROBLEM, premise=premise, drift=1e-2), found(2)))
        for premise in Premise
    )
    assert "on the margin leave a trace" in margin and "label" in margin
    assert "still has a slope leave a trace" in decay and "either sign" in decay
    for limits in (margin, decay):
        assert "kinks of ReLU" in limits and "Features moved in training" not in limits
    assert "Features moved in training" in change and "kinks" not in change


def test_a_floor_is_named_where_features_moved() -> None:
    moved = replace(PROBLEM, drift=1e-2)
    floor = "not known without the truth"
    assert floor in " ".join(evidence.limits(moved, found(2)))
    assert floor not in " ".join(evidence.limits(PROBLEM, found(2)))
    for problem in (PROBLEM, moved):
        assert "does not show that the model is safe" in evidence.limits(problem, found(2))[-1]
