"""Trained networks attacked end to end: small, on seeds that nothing was tuned on."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recipe_problems import watched
from torch import Tensor

from exhume import data, methods, victims
from exhume.equation.domain import Box, Sphere, SphereInBox
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.evaluate import residual_at_truth, score
from exhume.methods import Exhume, Iurada2025, reconstruct
from exhume.methods.exhume import Found
from exhume.methods.tansley2026 import Reduced, Tansley2026, reduced
from exhume.search.moves import exchanged
from exhume.search.subspace import Subspace, estimate
from exhume.solvers import Outcome, solve
from exhume.solvers.levenberg_marquardt import LevenbergMarquardt
from nets import make
from problems import case, gaussian

SHORT = Exhume(patience=8, restarts=0)


def two_layer(d: int, n: int, width: int, seed: int, **options: Any) -> tuple[Any, data.Data]:
    known = data.sphere(d, n, seed)
    return victims.two_layer(known, width=width, seed=seed, **options), known


USUAL = (1e-9, 1e-2)  # where the floor lies
FLOORS: list[tuple[int, int, dict[str, Any], tuple[float, float]]] = [
    (1, 100, {}, USUAL),
    (4, 102, {}, USUAL),
    (4, 100, {"activation": "relu+tanh"}, USUAL),
    (5, 101, {"bias": True}, USUAL),
    (4, 102, {"optimizer": "sgd", "batch": 2}, USUAL),
    (4, 100, {"lazy": 1e2}, (1e-11, 1e-9)),  # between tolerance and close is a floor as well
    (4, 100, {"lazy": 1e4}, (1e-16, 1e-13)),
]


@pytest.mark.parametrize(("n", "seed", "how", "range_"), FLOORS)
def test_a_small_network_is_settled_at_its_floor(n: int, seed: int, how: Any, range_: Any) -> None:
    victim, known = two_layer(12, n, 120 * n, seed, **how)
    floor = residual_at_truth(victim.problem, known)
    assert range_[0] < floor < range_[1]
    found = reconstruct(victim.problem, n, seed)
    assert found.outcome is (Outcome.CONVERGED if floor < 1e-11 else Outcome.SETTLED)
    assert score(found.samples, known).recovered == 1
    assert floor > 1e-9 or score(found.samples, known).exact == 1
    assert floor < 1e-9 or 0.5 * floor < found.residual < 1.1 * floor


def test_what_has_no_floor_is_not_settled() -> None:
    for width, samples, seed, options in (
        (200, 4, 100, {"lazy": 3e-3, "steps": 1000}),  # samples themselves leave half of the change
        (480, 2, 101, {}),  # too few: trials come back to the same residual, which is far too large
    ):
        victim, known = two_layer(12, 4, width, seed, **options)
        moved = residual_at_truth(victim.problem, known) > 10 * victim.problem.drift
        assert moved == bool(options)
        found = reconstruct(victim.problem, samples, seed, method=SHORT)
        assert found.outcome is Outcome.STALLED and found.residual > victim.problem.drift
    problem = case(12, 4, 5, seed=100, dtype=torch.float32).problem  # of random features, never
    assert problem.drift == 0
    for samples in (4, 3, None):
        found, moves = watched(problem, samples, replace(SHORT, patience=2, rounds=20), 100)
        assert found.outcome is (Outcome.STALLED if samples == 3 else Outcome.CONVERGED)
        assert all(p.floor == p.returned == 0 for p in moves)


def test_one_sample_of_any_module_is_found_though_nothing_is_left_to_keep() -> None:
    known = data.sphere(12, 1, 100)
    victim = victims.mlp(known, widths=[50, 40], activation="gelu", seed=100, until=1e-6)
    problem = victim.posed("last")
    assert Exhume().count(problem, 1) == 1  # so a new trial drops the only candidate
    found = reconstruct(problem, 1, 100, method=replace(SHORT, patience=2))
    assert found.outcome is Outcome.STALLED  # none to spare, so nothing is said of a floor
    assert score(found.samples, known).recovered == 1


def outside(candidates: Tensor, basis: Tensor) -> float:
    return float((candidates - candidates @ basis @ basis.T).norm() / candidates.norm())


def test_the_subspace_recovers_where_the_full_space_has_too_few_equations() -> None:
    recovered = []
    for seed in (100, 101, 102):
        victim, known = two_layer(30, 4, 60, seed, lazy=10.0)
        found = reconstruct(victim.problem, 4, seed, method="tansley2026")
        recovered.append(score(found.samples, known).recovered)
        assert found.rank == 4 and found.samples.shape == (4, 30)
        assert outside(found.samples, torch.linalg.qr(known.inputs.T).Q) < 1e-6
        torch.testing.assert_close(Sphere().project(found.samples), found.samples)
    assert sum(recovered) >= 2 and victim.problem.ratio(4) == 0.5
    other = reconstruct(victim.problem, 4, seed, SHORT, product_limit=3000)
    assert other.rank is None and score(other.samples, known).recovered == 0


def test_the_number_of_samples_is_that_of_the_directions() -> None:
    victim, known = two_layer(20, 3, 300, 100, lazy=10.0, decay=1e-4)  # which is no harm
    found = reconstruct(victim.problem, method="tansley2026", product_limit=3000)
    assert len(found.samples) == found.rank == 3 and score(found.samples, known).recovered == 1
    few = Tansley2026(rank=3, search=SHORT, polish=0)  # a rank and a radius of one's own are taken
    small = replace(victim.problem, domain=Sphere(2.0))
    found = reconstruct(small, 2, method=few, product_limit=300)
    assert found.rank == 3 and found.samples.norm(dim=1).tolist() == pytest.approx([2.0, 2.0])


def test_the_directions_are_counted_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    victim, now = two_layer(20, 3, 300, 100)[0], [0.0]

    def slow(layer: Any) -> int:
        now[0] += 10
        return 3

    monkeypatch.setattr(methods, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(methods, "directions", slow)
    found = reconstruct(victim.problem, time_limit=5)
    assert found.seconds == 10 and found.steps == 0 and len(found.samples) == 3


def spoiled(problem: Problem, size: float) -> tuple[Reduced, Tensor]:
    """The problem in the coordinates of a basis that is off by about that angle."""
    right = estimate(problem.first_layer)
    noise = size / 4 * gaussian(problem.dim, right.rank, seed=3)
    basis = torch.linalg.qr(right.basis + noise).Q
    return reduced(problem, Subspace(basis, right.spectrum, 1.0, right.gap)), basis


def test_a_spoiled_basis_is_made_good_for_in_the_full_space_and_an_exact_one_is_kept() -> None:
    victim, known = two_layer(16, 4, 640, 100)
    wrong, basis = spoiled(victim.problem, 0.03)
    rough = reconstruct(wrong, 4, 100, method=Tansley2026(polish=0))
    found = reconstruct(wrong, 4, 100, method="tansley2026")
    floor = residual_at_truth(victim.problem, known)
    assert outside(rough.samples, basis) < 1e-9 < 1e-2 < outside(found.samples, basis)
    assert (rough.rank, found.rank) == (4, None)  # what was refined is no longer confined
    assert found.residual < 1.1 * floor < 10 * floor < rough.residual
    assert score(found.samples, known).exact == 1 > score(rough.samples, known).exact
    right, basis = spoiled(victim.problem, 0.0)
    kept = reconstruct(right, 4, 100, method="tansley2026")
    assert outside(kept.samples, basis) < 1e-9
    solver = LevenbergMarquardt(tolerance=1e-14, damping=1e-3, patience=3)
    freer = solve(solver, victim.problem, kept.samples, 30).fit  # a little, which is no evidence
    assert 0.5 * kept.residual < freer.value < kept.residual
    victim, _ = two_layer(40, 4, 224, 100, lazy=10.0)  # too few equations for the full space
    assert victim.problem.ratio(4) == 1.4
    wrong, basis = spoiled(victim.problem, 0.03)
    found = reconstruct(wrong, 4, 100, method=Tansley2026(search=SHORT))
    assert outside(found.samples, basis) < 1e-9


def test_random_features_have_the_moment_for_a_start_and_for_nothing_more() -> None:
    truth = case(60, 2, 40, "polynomial:0,0,1", seed=100)
    problem, span = truth.problem, torch.linalg.qr(truth.inputs.T).Q

    def inside(method: Exhume | Tansley2026) -> float:
        x = torch.cat([method.init(problem, 2, seed).candidates for seed in range(10)]).double()
        return float((x @ span).square().sum() / x.square().sum())

    assert Tansley2026().view(problem) is problem
    assert inside(Exhume()) < 2 * 2 / 60
    assert inside(Tansley2026()) > 0.5 * 2 / 8  # of 8 directions two are right
    truth = case(20, 4, 6, seed=100, dtype=torch.float32)
    start = Tansley2026().init(truth.problem, 4, 100).candidates.double()
    found = reconstruct(truth.problem, 4, 100, method="tansley2026")
    assert found.outcome is Outcome.CONVERGED and found.rank is None
    assert score(found.samples, truth.inputs).exact == 1
    assert outside(found.samples, torch.linalg.qr(start.T).Q) > 0.3


def test_what_has_no_subspace_is_refused() -> None:
    dense, box = two_layer(12, 3, 60, 100)[0].problem, Box(-3, 3)
    for problem, words in (
        (make("resnet").problem(), "needs a dense first layer.*convolution, patches.*'exhume'"),
        (replace(dense, domain=box), "works on a sphere, but"),
        (replace(dense, domain=SphereInBox(Sphere(), box)), "works on a sphere, but"),
        (dense, "spans 3 directions, but 2 samples.*Adam"),
    ):
        with pytest.raises(InputError, match=words):
            reconstruct(problem, 2, method="tansley2026")


def test_all_parameters_recover_where_the_last_layer_has_too_few() -> None:
    known = data.sphere(12, 3, 102)
    victim = victims.two_layer(known, width=24, activation="gelu", lazy=1e5, seed=102)
    every, last = victim.posed("all"), victim.posed("last")
    assert last.ratio(3) < 1 < 5 < every.ratio(3)
    found, wrong = reconstruct(every, 3, 102), reconstruct(last, 3, 102)
    assert found.outcome is wrong.outcome is Outcome.CONVERGED  # the one with wrong candidates
    assert score(found.samples, known).exact == 1 > score(wrong.samples, known).recovered == 0


def test_the_published_recipe_lowers_the_residual_of_a_network() -> None:
    victim, _ = two_layer(12, 3, 360, 100)
    recipe, z = Iurada2025(rate=4.0, steps=150), torch.tensor([-1.0, 2.0]).double()
    for problem, slopes in ((victim.problem, [0, 1]), (case(5, 2, 9).problem, [0.02, 1])):
        sigma = recipe.view(problem).features.activation  # plain in a network
        assert sigma.slope(z).tolist() == pytest.approx(slopes)
    start = recipe.init(recipe.view(victim.problem), 3, 0).residual
    assert reconstruct(victim.problem, 3, method=recipe).residual < 0.2 * start


def test_candidates_stay_in_the_domain() -> None:
    box, small = Box(-1, 1), SphereInBox(Sphere(0.8 * 10**0.5), Box(-1, 1))
    known = replace(data.sphere(10, 3, 100), inputs=small.project(gaussian(3, 10, seed=100)))
    victim = victims.two_layer(known, width=400, activation="relu+tanh", seed=100)
    for domain in (box, small):
        problem = replace(victim.problem, domain=domain)
        found, moves = watched(problem, 3, SHORT, 100, product_limit=3000)
        assert len(moves) > 20
        for candidates in (found.samples, *(move.candidates for move in moves)):
            assert (candidates.abs() <= 1 + 1e-9).all()
    torch.testing.assert_close(small.sphere.project(found.samples), found.samples)
    assert score(found.samples, known).recovered == 1


def test_patches_that_were_found_in_other_places_are_put_right() -> None:
    """A solve from there ends in the minimum of the wrong arrangement; exchanges lead out."""
    problem = make("vit", dim=32).problem("last", "initial")
    truth = problem.domain.start(1, 16, torch.Generator().manual_seed(0))
    target = problem.features.linearize(truth).combine(torch.ones(1, 2, dtype=torch.float64))
    problem = replace(problem, target=target)
    start = exchanged(problem, truth, 2)
    method, at = Exhume(surplus=1), {"phase": "settle", "best": Found(start, 1.0)}
    progress, ends = replace(method.begin(problem, 1, 0, start), **at), []
    while not ends or progress.phase == "arrange":
        before, progress = progress, method.advance(problem, progress)
        if progress.rounds > before.rounds:
            ends.append(before.residual)
    assert ends[0] > 1e-7  # then come exchanges, to the end of the last six that did not help
    assert len(ends) == 1 + 3 + 6
    assert progress.phase == "explore"
    assert progress.best_residual == progress.lowest < ends[0] / 2
    assert (start - truth).norm() > truth.norm()
    assert (progress.candidates - truth).norm() < 0.05 * truth.norm()
