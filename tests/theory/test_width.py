"""The finite-width bound: every constant against brute force, and the guarantee against attacks."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import optimize
from torch.nn.functional import normalize

from exhume.experiments.cells.fitting import Failure
from exhume.features.activations import activation as named
from exhume.theory import hermite, width
from exhume.theory.width import Setting, WidthBound, kernel_gap, smallest_hit, width_bound
from problems import gaussian, refusals

LOOSE: dict[str, float] = {"tolerance": 0.5, "separation": 1.1}


@pytest.mark.parametrize(("sigma", "rank"), [("relu", 2), ("relu", 6), ("erf", 3), ("tanh", 3)])
def test_no_solution_that_misses_a_sample_is_nearer_than_the_gap(sigma: str, rank: int) -> None:
    smallest, first = math.inf, torch.eye(rank, dtype=torch.float64)[:1]
    for seed in range(200):
        draw, near = gaussian(2, 2, rank, seed=seed), seed % 10 < 7
        true = torch.cat([first, width.apart(draw[1, :1], 0.7)])
        guess = width.apart(first + 0.4 * draw[0] if near else draw[0], 0.3)
        c, b = gaussian(2, seed=seed).sign(), gaussian(2, seed=seed + 1).clamp(-1, 1)
        atoms, weights = torch.cat([true, guess]), torch.cat([c, -b])
        gram = hermite.kernel(sigma, (atoms @ atoms.T).clamp(-1, 1))
        smallest = min(smallest, float(weights @ gram @ weights))  # E G², from the kernel
    assert 0 < kernel_gap(sigma, rank, 0.3, 3) <= smallest


@pytest.mark.parametrize("samples", [2, 3])
def test_the_gap_is_close_to_the_best_solution_that_misses_a_sample(samples: int) -> None:
    """In the plane, for ReLU: 2n − 1 atoms outside the caps, moved to make E G² small."""
    tolerance, count = 0.3, 2 * samples - 1
    edge = 2 * math.asin(tolerance / 2)
    generator = np.random.default_rng(samples)

    def squared(unknowns: np.ndarray, side: np.ndarray) -> float:
        angles = edge + (math.pi - 2 * edge) * (1 + np.sin(unknowns[:count])) / 2 + side * math.pi
        angles, weights = np.append(angles, 0.0), np.append(-np.sin(unknowns[count:]), 1.0)
        between = np.arccos(np.clip(np.cos(angles[:, None] - angles), -1, 1))
        gram = (np.sin(between) + (math.pi - between) * np.cos(between)) / (2 * math.pi)
        return float(weights @ gram @ weights)

    best = math.inf
    for _ in range(25):
        start, side = generator.standard_normal(2 * count), generator.integers(0, 2, count)
        found = optimize.minimize(squared, start, side, method="BFGS", options={"maxiter": 200})
        best = min(best, found.fun)
    gap = kernel_gap("relu", 2, tolerance, count)
    assert gap < best < 2 * gap


def test_the_gap_of_one_atom_is_the_closed_form_and_what_it_depends_on() -> None:
    """T = 1 and ReLU: the best is one atom, or a pair about u, at the edge, at full weight."""
    edge = 1 - 0.3**2 / 2
    own, side = (float(hermite.kernel("relu", torch.tensor(x))) for x in (1.0, edge))
    across = float(hermite.kernel("relu", torch.tensor(2 * edge**2 - 1)))
    pair = own - 2 * side + (own + across) / 2  # half on either side, r = 2
    assert kernel_gap("relu", 2, 0.3, 1.0) == pytest.approx(pair, rel=1e-3)
    usual = kernel_gap("relu", 3, 0.3, 3)
    masses, ranks = ((3, 0.3, 1), (3, 0.3, 9)), ((2, 0.3, 3), (1000, 0.3, 3))
    for larger, smaller in (masses, ranks, ((3, 0.6, 3), (3, 0.1, 3))):
        assert kernel_gap("relu", *larger) > usual > kernel_gap("relu", *smaller) > 0


@pytest.mark.parametrize("rank", [2, 3, 4, 9])
def test_the_average_over_rings_is_that_of_random_points_on_them(rank: int) -> None:
    s, t = 0.8, -0.3
    one, other = normalize(gaussian(2, 50_000, rank - 1), dim=2)
    inner = s * t + math.sqrt((1 - s**2) * (1 - t**2)) * (one * other).sum(1)
    averaged = width.ring_kernel(np.exp, rank, np.array([s]), np.array([t]))[0, 0]
    off = 5 * float(inner.exp().std()) / len(inner) ** 0.5
    assert averaged == pytest.approx(float(inner.exp().mean()), abs=off)


def hit(sigma: str, setting: Setting, tau: float | None = None, **options: int) -> float:
    if tau is None:
        gap = kernel_gap(sigma, setting.rank, setting.tolerance, 2 * setting.samples - 1)
        tau = math.sqrt(gap / 8)
    return smallest_hit(named(sigma), setting, tau, **options)


def test_the_search_for_the_smallest_hit() -> None:
    plane, space = Setting(2, 2, 0.3, 0.7), Setting(2, 3, 0.3, 0.7)
    searched, random = (hit("relu", plane, starts=30, steps=steps) for steps in (150, 0))
    assert 0.02 < searched < 0.8 * random
    hits = [hit("relu", space, seed=seed, starts=24, steps=150) for seed in range(2)]
    assert 0.15 < hits[0] < 0.3
    assert hits[1] == pytest.approx(hits[0], rel=0.1)  # from other starts
    one, few = Setting(1, 2, 0.3, 0.7), {"starts": 24, "steps": 100}
    wider = [hit("erf", one, tau, **few) for tau in (0.01, 0.05, 0.1)]
    assert wider[0] > wider[1] > wider[2]


@pytest.fixture(scope="module")
def bound() -> WidthBound:
    return width_bound(2, 2, "erf", **LOOSE)


def test_the_ways_to_the_bound_are_ordered_and_keep_the_probability(bound: WidthBound) -> None:
    assert 4 < bound.numerical < bound.certified < bound.hoeffding
    assert bound.failure_at(int(bound.certified)) <= bound.failure
    assert bound.failure_at(int(bound.certified) - 1) > bound.failure
    assert bound.failure_at(int(bound.numerical), numerical=True) <= bound.failure
    assert bound.failure_at(1) == 1.0
    assert width.fourth_moment(named("relu")) == pytest.approx(1.5, rel=1e-9)
    assert [width.steepest(named(name)) for name in ("relu", "tanh")] == [1, 1]
    assert len(bound.assumptions) == 6


def test_what_the_width_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(width, "smallest_hit", lambda *setting, **options: 0.2)
    bounded = partial(width_bound, samples=2, dim=2, activation="erf", **LOOSE)
    plain, inside, strict = bounded(), bounded(dim=50, subspace=2), bounded(failure=1e-9)
    assert inside.certified == plain.certified < bounded(dim=4).certified  # r takes the place of d
    assert "subspace of dimension 2" in " ".join(inside.assumptions)
    assert plain.certified < strict.certified < 2 * plain.certified
    assert strict.certified / 100 < bounded(samples=1, failure=1e-320).certified < math.inf
    # coefficients matter by their ratio alone, and the gap by their square
    doubled = bounded(coefficients=(2.0, 2.0))
    assert doubled.gap == pytest.approx(4 * plain.gap)
    assert doubled.hit_certified == pytest.approx(plain.hit_certified)
    assert bounded(coefficients=(0.5, 1.0)).gap < plain.gap


def test_exact_solutions_are_the_samples_above_the_width_and_not_below(bound: WidthBound) -> None:
    above = [Failure(width=int(bound.numerical), starts=2, seed=s).run("cpu") for s in range(8)]
    assert sum(run["exact"] > 0 for run in above) >= 7
    assert not any(run["failed"] or run["wrong"] for run in above)
    below = [Failure(width=2, starts=4, seed=seed).run("cpu") for seed in range(5)]
    assert sum(run["wrong"] for run in below) >= 4
    assert all(run["residual"] < 1e-11 for run in below)
    for seed in range(20):  # samples are drawn as assumed
        truth = Failure(samples=3, dim=4, separation=0.9, seed=seed).drawn() / 2
        cosines = (truth @ truth.T).abs().fill_diagonal_(0)
        assert truth.norm(dim=1).sub(1).abs().max() < 1e-12
        assert 2 - 2 * cosines.max() >= 0.81


test_what_has_no_bound_is_refused = refusals(
    ({"samples": 0}, "samples"),
    ({"dim": 1}, "dim"),
    ({"subspace": 9}, "subspace"),
    ({"tolerance": 0.0}, "tolerance"),
    ({"separation": 0.5}, "separation"),
    ({"coefficients": (2.0, 1.0)}, "floor"),
    ({"failure": 1.0}, "failure"),
    ({"activation": "polynomial:0,0,1"}, "slope"),
    ({"activation": "nothing"}, "nothing"),
    ({"activation": "erf", "samples": 100, "tolerance": 0.1, "separation": 0.3}, "kernel gap"),
    call=partial(width_bound, samples=2, dim=3, tolerance=0.3, separation=0.7),
)
