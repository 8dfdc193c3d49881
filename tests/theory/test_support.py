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
from exhume.equation.problem import Premise, Problem
from exhume.features.activations import activation
from exhume.features.random import RandomFeatures
from exhume.features.weights import Seeded, Stored
from exhume.methods import Reconstruction
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


@pytest.mark.parametrize("dense", [0, 500])
@pytest.mark.parametrize("name", REDUNDANT)
def test_redundant_features_are_not_claimed(name: str, dense: int) -> None:
    v, words = REDUNDANT[name]
    problem, samples = posed(v)
    found = at(problem, samples)
    said = " ".join(claims(problem, found, support(problem, found, dense)))
    assert words in said and CHANCE not in said


@pytest.mark.parametrize("dense", [0, 500])
@pytest.mark.parametrize(
    ("outputs", "name", "box"), [(1, "tanh", False), (3, "relu", False), (9, "gelu", True)]
)
def test_what_is_determined_is_claimed(outputs: int, name: str, box: bool, dense: int) -> None:
    problem, samples = posed(rows(120), outputs, name)
    problem = replace(problem, domain=Box(-9.0, 9.0)) if box else problem
    found = at(problem, samples)
    rests = support(problem, found, dense)
    assert rests.equations == min(outputs, COUNT) * (120 - COUNT)
    assert rests.unknowns == COUNT * (DIM - (not box)) and rests.slack.max() < 1e-3
    assert CHANCE in " ".join(claims(problem, found, rests))


def test_the_reported_case_of_more_outputs_than_samples() -> None:
    known = data.load("digits", 5)
    problem = victims.random_features(known, 51, "tanh").problem  # p·m/(d·n) is 1.6
    found = at(problem, known.inputs)  # a search converges elsewhere, and as well
    rests = support(problem, found, dense=0)
    assert (rests.equations, rests.unknowns) == (230, 315)
    said = " ".join(claims(problem, found, rests))
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


@pytest.mark.parametrize("step", ["_at", "_equations", "_inverse"])
@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), MemoryError()])
def test_what_takes_too_much_memory_is_not_known(step: str, error: Exception, monkeypatch) -> None:
    def failed(*given: object) -> None:
        raise error

    monkeypatch.setattr(MODULE, step, failed)
    problem, samples = posed(rows(120))
    rests = support(problem, found := at(problem, samples))
    assert not rests.measured and rests.errors.isnan().all() and rests.enough
    said = " ".join(claims(problem, found, rests))
    assert "could not be measured" in said and CHANCE not in said


def test_slack_is_not_measured_where_it_decides_nothing_nor_where_the_matrix_is_large(
    monkeypatch,
) -> None:
    problem, samples = posed(rows(120))
    cut = replace(at(problem, samples, 0.5), outcome=Outcome.BUDGET)
    assert not support(problem, cut).measured and support(problem, cut).enough
    assert support(problem, replace(cut, outcome=Outcome.STALLED)).measured
    assert not support(replace(problem, premise=Premise.DECAY), at(problem, samples)).measured
    monkeypatch.setattr(MODULE, "_inverse", None)  # is not called
    monkeypatch.setattr(MODULE, "COLUMNS", COUNT * (DIM - 1) * 120 - 1)
    assert support(problem, at(problem, samples)).slack.max() < 1e-3


def test_features_are_drawn_once(monkeypatch) -> None:
    victim = victims.random_features(data.sphere(10, 4), 120)
    found, draw, drawn = at(victim.problem, victim.truth.inputs), Seeded.rows, []
    monkeypatch.setattr(Seeded, "rows", lambda *given: drawn.append(1) or draw(*given))
    assert support(victim.problem, found).measured and len(drawn) == 1


def test_a_sketch_is_never_surer_than_its_largest_direction() -> None:
    problem, samples = posed(rows(120))
    found = at(problem, samples)
    whole, sketch = (support(problem, found, dense) for dense in (500, 0))
    spare = whole.equations - whole.unknowns
    assert (sketch.errors * spare**0.5 >= 0.999 * sketch.slack).all()
    assert (sketch.errors > 0.1 * whole.errors).all() and (sketch.errors < 10 * whole.errors).all()
