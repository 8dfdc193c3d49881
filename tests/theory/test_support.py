"""Support: what redundant features leave open is never claimed, and what is determined is."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exhume import data, victims
from exhume.auditing.evidence import claims
from exhume.equation.domain import Box
from exhume.equation.objective import fitted
from exhume.equation.problem import Problem
from exhume.features.activations import activation
from exhume.features.random import RandomFeatures
from exhume.features.weights import Stored
from exhume.methods import Reconstruction, reconstruct
from exhume.solvers import Outcome
from exhume.theory import local_identifiability
from exhume.theory.support import support
from problems import THREAT, case, dense_phi, gaussian, on_sphere

MODULE = sys.modules["exhume.theory.support"]  # the package has a function of that name
CHANCE, OTHERS, FEW = "not met by chance", "and so do others", "That is too few"
DIM, COUNT = 12, 4


def at(problem: Problem, samples: Tensor, residual: float = 1e-12) -> Reconstruction:
    """What an attack that ended at these samples would report."""
    rows = fitted(problem, samples).coefficients
    told = (residual, Outcome.CONVERGED, "exhume", 0, 1, 500, 1.0)
    return Reconstruction(samples, rows, *told)


def posed(v: Tensor, outputs: int = 1, name: str = "tanh") -> tuple[Problem, Tensor]:
    """Δ = σ(XVᵀ)ᵀA with Gaussian A, and the samples X, which explain it wholly."""
    features, x = RandomFeatures(Stored(v), activation(name)), on_sphere(COUNT, DIM)
    target = dense_phi(features, x).T @ gaussian(COUNT, outputs, seed=5)
    return Problem(target, features, THREAT, (DIM,)), x


def rows(count: int, dim: int = DIM) -> Tensor:
    return gaussian(count, dim, seed=7) / dim**0.5


NARROW = rows(50)  # fewer than the 44 + 4 that are needed 1.2 times over
REDUNDANT = {
    "zero rows": (torch.cat([NARROW, torch.zeros(70, DIM).double()]), FEW),
    "repeated rows": (NARROW.repeat(4, 1), FEW),
    "repeated rows at other scales": (torch.cat([NARROW, -NARROW, NARROW]), FEW),
    "a bottleneck": (rows(150, DIM // 2) @ rows(DIM // 2), OTHERS),
    "pooling": (rows(150, DIM // 2).repeat_interleave(2, 1), OTHERS),
    "an input that nothing sees": (rows(150) * (torch.arange(DIM) > 0), OTHERS),
}


@pytest.mark.parametrize("sketched", [False, True])
@pytest.mark.parametrize("name", REDUNDANT)
def test_redundant_features_are_not_claimed(name: str, sketched: bool, monkeypatch) -> None:
    monkeypatch.setattr(MODULE, "DENSE", 0 if sketched else 500)
    v, words = REDUNDANT[name]
    problem, samples = posed(v)
    said = " ".join(claims(problem, at(problem, samples)))
    assert words in said and CHANCE not in said


@pytest.mark.parametrize("sketched", [False, True])
@pytest.mark.parametrize(
    ("outputs", "name", "box"), [(1, "tanh", False), (3, "relu", False), (9, "gelu", True)]
)
def test_what_is_determined_is_claimed(
    outputs: int, name: str, box: bool, sketched: bool, monkeypatch
) -> None:
    monkeypatch.setattr(MODULE, "DENSE", 0 if sketched else 500)
    problem, samples = posed(rows(120), outputs, name)
    problem = replace(problem, domain=Box(-9.0, 9.0)) if box else problem
    found = at(problem, samples)
    rests = support(problem, found)
    assert rests.equations == min(outputs, COUNT) * (120 - COUNT)
    assert rests.unknowns == COUNT * (DIM - (not box)) and rests.slack.max() < 1e-3
    assert CHANCE in " ".join(claims(problem, found, rests))


def test_the_reported_case_of_more_outputs_than_samples() -> None:
    victim = victims.random_features(data.load("digits", 5), 51, "tanh")  # p·m/(d·n) is 1.6
    found = reconstruct(victim.problem, 5)
    rests = support(victim.problem, found)
    assert found.outcome is Outcome.CONVERGED and (rests.equations, rests.unknowns) == (230, 315)
    said = " ".join(claims(victim.problem, found, rests))
    assert FEW in said and "0.73 equations" in said and CHANCE not in said


def test_untrained_heads_are_not_claimed() -> None:
    victim = case(20, 8, 1.5, "tanh", outputs=8)
    noise = replace(victim.problem, target=gaussian(*victim.problem.target.shape))
    said = " ".join(claims(noise, at(noise, victim.inputs)))
    assert FEW in said and CHANCE not in said


def test_slack_is_what_the_rank_test_says_and_how_far_candidates_are_off() -> None:
    known = case(10, 4, 3.0)
    moved = known.inputs + 1e-5 * gaussian(4, 10, seed=3)
    problem = known.problem
    found = at(problem, moved, fitted(problem, problem.domain.project(moved)).value)
    off = (moved - known.inputs).norm(dim=1) / known.inputs.norm(dim=1)
    rests = support(problem, found)
    assert (off <= 2 * rests.slack).all() and (rests.slack < 100 * off).all()
    assert local_identifiability(problem, known.inputs, within=True).holds
    for sample in (torch.nan, torch.inf):
        broken = replace(found, samples=torch.full_like(moved, sample))
        assert support(problem, broken).slack.isinf().all() and not support(problem, broken).enough
