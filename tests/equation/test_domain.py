"""Domains: projections against slow oracles, tangents against dense projectors, solves inside."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exhume.equation.domain import Box, Composed, Domain, Sphere, Subspace
from exhume.equation.objective import fitted
from exhume.solvers import Outcome, run
from exhume.solvers.levenberg_marquardt import LevenbergMarquardt, damped_step
from problems import (
    case,
    cosines,
    dense_complement,
    dense_jacobian,
    dense_phi,
    gaussian,
    make_features,
    make_problem,
)

seeds = st.integers(0, 2**31 - 10)
counts, dims = st.integers(1, 4), st.integers(2, 9)
fast = settings(max_examples=10, deadline=None)
KINDS = ["sphere", "box", "subspace"]
PAIRS = ["sphere box", "box sphere", "sphere subspace", "box subspace"]
ALL = [*KINDS, *PAIRS, "sphere box subspace"]


def subspace(d: int, r: int, seed: int = 0) -> Subspace:
    return Subspace(torch.linalg.qr(gaussian(d, r, seed=seed)).Q)


def make(kinds: str, d: int, seed: int = 0) -> Domain:
    """A domain by its name; the box has bounds of its own for each entry, all around 0."""
    spread = torch.rand(2, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parts = {
        "sphere": Sphere(),
        "box": Box(-1.2 - spread[0], 1.2 + spread[1]),
        "subspace": subspace(d, d - d // 4, seed),
    }
    chosen = [parts[kind] for kind in kinds.split()]
    return chosen[0] if len(chosen) == 1 else Composed(tuple(chosen))


def parts(domain: Domain) -> dict[str, Domain]:
    domains = domain.domains if isinstance(domain, Composed) else (domain,)
    return {type(part).__name__: part for part in domains}


def dense_tangent(domain: Domain, x: Tensor, held: Tensor) -> Tensor:
    """Projector (d, d) to all directions at one point x (d,) that every domain allows."""
    d = len(x)
    eye = torch.eye(d, dtype=x.dtype)
    forbidden = [torch.zeros(1, d, dtype=x.dtype)]
    for part in parts(domain).values():
        if isinstance(part, Sphere):
            forbidden.append(x[None])
        elif isinstance(part, Box):
            forbidden.append(eye[held])
        elif isinstance(part, Subspace):
            forbidden.append(eye - part.basis @ part.basis.T)
    vectors, values, _ = torch.linalg.svd(torch.cat(forbidden).T, full_matrices=False)
    span = vectors[:, values > 1e-9]
    return eye - span @ span.T


# What holds for every domain


@pytest.mark.parametrize("kinds", ALL)
@fast
@given(seed=seeds, n=counts, d=dims, size=st.sampled_from([0.1, 1.0, 5.0]))
def test_projections_lie_in_every_domain(
    kinds: str, seed: int, n: int, d: int, size: float
) -> None:
    domain = make(kinds, d, seed)
    x = domain.project(size * gaussian(n, d, seed=seed))
    assert x.shape == (n, d)
    slack = 1e-12 if kinds in KINDS or "subspace" not in kinds or "box" not in kinds else 1e-3
    for name, part in parts(domain).items():
        off = (part.project(x) - x).abs().max()
        assert off <= (slack if name == "Subspace" else 1e-12)
    if slack == 1e-12:
        torch.testing.assert_close(domain.project(x), x, rtol=0, atol=1e-12)
        one = domain.project(x[:1] + 0.1)  # rows do not see each other
        torch.testing.assert_close(one, domain.project(x + 0.1)[:1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kinds", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_precision_of_the_candidates_is_kept(kinds: str, dtype: torch.dtype) -> None:
    domain = make(kinds, 8)
    x = domain.project(gaussian(3, 8).to(dtype))
    direction = gaussian(3, 8, seed=1).to(dtype)
    moved = domain.tangent(x, direction, direction)
    assert x.dtype == moved.dtype == domain.tangent(x, direction).dtype == dtype
    assert x.device == moved.device
    for part in parts(domain).values():
        assert (part.project(x) - x).abs().max() < 1e-5
    assert domain.start(2, 8, torch.Generator()).dtype == torch.float64


@pytest.mark.parametrize("kinds", ALL)
def test_candidates_that_are_not_numbers_stay_so(kinds: str) -> None:
    domain = make(kinds, 6)
    x = torch.full((2, 6), math.nan, dtype=torch.float64)
    assert domain.project(x).isnan().all()
    assert domain.tangent(x, x, x).isnan().all()
    assert domain.project(x[:0]).shape == domain.tangent(x[:0], x[:0], x[:0]).shape == (0, 6)


@pytest.mark.parametrize("kinds", ALL)
@fast
@given(seed=seeds, n=counts, d=dims, told=st.booleans())
def test_tangents_are_symmetric_linear_projectors(
    kinds: str, seed: int, n: int, d: int, told: bool
) -> None:
    domain = make(kinds, d, seed)
    x = domain.project(3 * gaussian(n, d, seed=seed))
    a, b, g = (gaussian(n, d, seed=seed + k) for k in (1, 2, 3))
    descent = g if told else None
    image_a, image_b = (domain.tangent(x, v, descent) for v in (a, b))
    torch.testing.assert_close(domain.tangent(x, image_a, descent), image_a, rtol=0, atol=1e-8)
    assert (a * image_b).sum().item() == pytest.approx((b * image_a).sum().item(), abs=1e-8)
    both = domain.tangent(x, a - 2 * b, descent)
    torch.testing.assert_close(both, image_a - 2 * image_b, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kinds", ALL)
@fast
@given(seed=seeds, d=dims)
def test_tangents_against_dense_projectors(kinds: str, seed: int, d: int) -> None:
    domain = make(kinds, d, seed)
    x = domain.project(3 * gaussian(3, d, seed=seed))
    direction, descent = gaussian(3, d, seed=seed + 1), gaussian(3, d, seed=seed + 2)
    held = torch.zeros(3, d, dtype=torch.bool)
    if isinstance(domain, Composed):
        found = domain._held(x, descent)
        held = held if found is None else found
    elif isinstance(domain, Box):
        held = domain.side(x) * descent > 0
    expected = torch.stack(
        [dense_tangent(domain, row, h) @ v for row, h, v in zip(x, held, direction, strict=True)]
    )
    given = domain.tangent(x, direction, descent)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kinds", ALL)
@fast
@given(seed=seeds, n=counts, d=dims)
def test_a_step_along_the_descent_stays_inside_to_first_order(
    kinds: str, seed: int, n: int, d: int
) -> None:
    domain = make(kinds, d, seed)
    x = domain.project(3 * gaussian(n, d, seed=seed))
    descent = gaussian(n, d, seed=seed + 1)
    along = domain.tangent(x, descent, descent)
    assert (along * descent).sum().item() >= -1e-9
    for name, part in parts(domain).items():
        if name == "Box":  # what is at a bound does not leave it
            assert (part.side(x) * along).max() <= 1e-8
        else:
            step, off = 1e-4, (part.project(x) - x).abs().max().item()
            moved = x + step * along
            left = (part.project(moved) - moved).norm(dim=1).max().item()
            assert left <= 1e-12 + 10 * off + step**2 * along.square().sum().item()


# One at a time


def test_boxes_hold_what_pushes_outward_and_nothing_else() -> None:
    box = Box((0.0, 0.0, -1.0), (1.0, 2.0, 1.0))
    x = torch.tensor([[0.0, 2.0, 0.5], [0.0, 2.0, 1.0]])
    out = torch.tensor([[-1.0, 3.0, 4.0], [1.0, -3.0, 4.0]])
    ones = torch.ones(2, 3)
    assert box.tangent(x, ones, out).tolist() == [[0, 0, 1], [1, 1, 0]]
    assert torch.equal(box.tangent(x, ones), ones)
    assert box.project(x + 5).tolist() == [[1, 2, 1], [1, 2, 1]]
    torch.testing.assert_close(Box(0.1, 0.2).project(x)[0, 0].double(), torch.tensor(0.1).double())


def test_starts_are_random_admissible_and_reproducible() -> None:
    for kinds in ALL:
        domain = make(kinds, 8)
        x, again = (domain.start(5, 8, torch.Generator().manual_seed(4)) for _ in range(2))
        assert torch.equal(x, again)
        assert x.dtype == torch.float64
        for part in parts(domain).values():
            assert (part.project(x) - x).abs().max() < 1e-6
        assert x.std(0).min() > 0
    uniform = Box(-1.0, 3.0).start(4000, 2, torch.Generator().manual_seed(1))
    torch.testing.assert_close(uniform.mean(0), torch.ones(2).double(), rtol=0, atol=0.1)
    torch.testing.assert_close(uniform.var(0), torch.full((2,), 4 / 3).double(), rtol=0, atol=0.1)
    low = subspace(12, 3).start(4000, 12, torch.Generator().manual_seed(1))
    assert low.square().sum(1).mean().item() == pytest.approx(12, rel=0.05)
    assert torch.linalg.matrix_rank(low) == 3


def test_names() -> None:
    assert Box(0, 1).name == "box [0, 1]"
    assert Box((0, 0), (1, 1)).name == "box [0, 1]"
    assert Box((0, -1), (1, 2)).name == "box with bounds for each entry in [-1, 2]"
    assert subspace(5, 2).name == "subspace of dimension 2"
    both = Composed((Sphere(), Box(0, 1), subspace(5, 2)))
    assert both.name == "sphere of radius √d ∩ box [0, 1] ∩ subspace of dimension 2"


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0.0, math.inf),
        (-math.inf, 0.0),
        (math.nan, 1.0),
        (1.0, 1.0),
        (2.0, 1.0),
        ((0.0, 1.0), 1.0),
        ((0.0, 0.0), (1.0, 1.0, 1.0)),
        (torch.zeros(2, 2), 1.0),
    ],
)
def test_boxes_without_an_inside_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="box: expected"):
        Box(low, high)


@pytest.mark.parametrize(
    "basis",
    [torch.ones(3), torch.eye(3)[:2], torch.ones(3, 2), 2 * torch.eye(3), torch.eye(3) * math.nan],
)
def test_what_is_no_orthonormal_basis_is_refused(basis: Tensor) -> None:
    with pytest.raises(ValueError, match="subspace"):
        Subspace(basis)


def test_a_basis_in_single_precision_is_made_exact() -> None:
    u = torch.linalg.qr(gaussian(40, 7)).Q
    coarse = Subspace(u.float())
    x = coarse.project(gaussian(3, 40))
    torch.testing.assert_close(coarse.project(x), x, rtol=0, atol=1e-13)
    torch.testing.assert_close(x, Subspace(u).project(gaussian(3, 40)), rtol=0, atol=1e-5)


def test_sizes_that_do_not_fit_are_refused() -> None:
    generator = torch.Generator()
    with pytest.raises(ValueError, match="2 entries, but inputs have 5"):
        Box((0, 0), (1, 1)).start(3, 5, generator)
    with pytest.raises(ValueError, match="dimension 4, but inputs have 5"):
        subspace(4, 2).start(3, 5, generator)


@pytest.mark.parametrize(
    "domains", [(), (Sphere(), Sphere(2.0)), (Sphere(), Composed((Sphere(),))), ("sphere",)]
)
def test_only_known_domains_compose(domains: tuple[Sphere, ...]) -> None:
    with pytest.raises(ValueError, match="at most one sphere"):
        Composed(domains)


# Together


@fast
@given(seeds, dims, st.sampled_from([-1.0, 0.0, 0.3]), st.sampled_from([0.9, 1.1, 2.0]))
def test_sphere_and_box_give_the_nearest_point(
    seed: int, d: int, low: float, spread: float
) -> None:
    box = Box(low, low + spread)
    nearest, farthest = box.project(torch.zeros(1)).abs().item(), max(abs(low), abs(low + spread))
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        radius = math.sqrt(d) * (nearest + share * (farthest - nearest))
        if radius == 0:
            continue
        both = Composed((Sphere(radius), box))
        points = gaussian(4, d, seed=seed)
        x = both.project(points)
        rivals = both.project(gaussian(200, d, seed=seed + 1))
        for y in (x, rivals):  # also where a row points away from all that is admissible
            torch.testing.assert_close(y.norm(dim=1), torch.full((len(y),), radius).to(y))
            assert (box.project(y) - y).abs().max() == 0
        free = box.project(1e6 * points).norm(dim=1) >= radius  # where the nearest point is known
        gap = (points * x).sum(1) - (points @ rivals.T).max(1).values  # largest ⟨z, x⟩: nearest
        assert (gap[free] >= -1e-9 * radius).all()


def test_sphere_and_box_that_do_not_meet_give_the_best_of_the_box() -> None:
    far = Composed((Sphere(10.0), Box(-1, 2)))
    x = far.project(gaussian(3, 4))
    assert torch.equal(x, torch.full((3, 4), 2.0).double())
    near = Composed((Sphere(0.5), Box(1, 2)))
    assert torch.equal(near.project(gaussian(3, 4)), torch.ones(3, 4).double())


def test_zero_finds_its_way_to_sphere_and_box() -> None:
    both = Composed((Sphere(1.0), Box(-1, 1)))
    x = both.project(torch.zeros(2, 5))
    torch.testing.assert_close(x.norm(dim=1), torch.ones(2))


def test_a_step_along_a_face_of_sphere_and_box_ends_on_it() -> None:
    both = Composed((Sphere(), Box(-1.1, 1.1)))
    x = both.project(gaussian(20, 9))
    descent = gaussian(20, 9, seed=1)
    held = both.tangent(x, torch.ones_like(x), descent).eq(0) & (x.abs() == 1.1)
    moved = both.project(x + 0.1 * both.tangent(x, descent, descent))
    assert held.sum() > 5
    inside = ~(x.abs() == 1.1)
    assert (moved[held] == x[held]).all()
    assert (moved[inside] != x[inside]).all()


@fast
@given(seeds, st.integers(2, 30))
def test_what_sphere_and_box_hold_is_what_the_best_direction_needs(seed: int, d: int) -> None:
    both = Composed((Sphere(), Box(-1.1, 1.1)))
    x, descent = both.project(gaussian(6, d, seed=seed)), gaussian(6, d, seed=seed + 1)
    along = both.tangent(x, descent, descent)
    side = torch.where(x.abs() == 1.1, x.sign(), 0)
    assert (side * along).max() <= 1e-12
    # Rivals: other admissible directions; the projection to the cone of all is the nearest.
    for rival_seed in range(20):
        other = gaussian(6, d, seed=rival_seed)
        rival = both.tangent(x, other, other)
        assert ((descent - along) * (rival - along)).sum(1).max() <= 1e-9


def test_box_and_subspace_give_the_nearest_point() -> None:
    box, flat = Box(-1.0, 1.5), subspace(20, 8)
    points = 2 * gaussian(5, 20, seed=1)
    x, correction = points, torch.zeros_like(points)
    for _ in range(20000):  # Dykstra's: slow, but sure
        inside = flat.project(x)
        x = box.project(inside + correction)
        correction = inside + correction - x
    given = Composed((box, flat)).project(points)
    assert (box.side(given) != 0).any()
    torch.testing.assert_close(given, x, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("d", "r", "bound"), [(10, 6, 1.5), (30, 20, 1.3), (100, 30, 2.0)])
def test_sphere_box_and_subspace_meet(d: int, r: int, bound: float) -> None:
    flat = subspace(d, r)
    x = Composed((Sphere(), Box(-bound, bound), flat)).project(3 * gaussian(10, d, seed=2))
    torch.testing.assert_close(x.norm(dim=1), torch.full((10,), math.sqrt(d)).double())
    assert x.abs().max() <= bound
    assert (flat.project(x) - x).abs().max() < 1e-7


# Solves


@pytest.mark.parametrize("kinds", ["box", "sphere box", "sphere subspace"])
def test_damped_steps_against_the_dense_system(kinds: str) -> None:
    n, d, p, m, damping = 3, 6, 60, 2, 0.1
    domain = make(kinds, d, seed=5)
    problem = replace(make_problem(make_features(d, p, "relu+tanh"), gaussian(p, m)), domain=domain)
    point = fitted(problem, domain.project(2 * gaussian(n, d, seed=1)))
    x = point.candidates
    jacobian = dense_jacobian(problem.features, x, point.coefficients)
    outside = torch.kron(
        dense_complement(dense_phi(problem.features, x)), torch.eye(m, dtype=torch.float64)
    )
    size = jacobian.reshape(p * m, n, d).square().sum((0, 2)) / d
    matrix = jacobian.T @ outside @ jacobian + damping * torch.diag(size.repeat_interleave(d))
    pulled = jacobian.T @ point.residual.flatten()
    if isinstance(domain, Composed):
        held = domain._held(x, pulled.reshape(n, d))
    else:
        held = domain.side(x) * pulled.reshape(n, d) > 0
    if "box" in kinds:
        assert held is not None
        assert held.any()
    rows = torch.zeros(n, d, dtype=torch.bool) if held is None else held
    dense = [dense_tangent(domain, row, h) for row, h in zip(x, rows, strict=True)]
    values, vectors = torch.linalg.eigh(torch.block_diag(*dense))
    basis = vectors[:, values > 0.5]
    expected = basis @ torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ pulled)
    step, _ = damped_step(problem, point, damping, accuracy=1e-13, products=300)
    torch.testing.assert_close(step.flatten(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kinds", ["box", "sphere box"])
def test_candidates_at_their_bounds_are_found(kinds: str) -> None:
    box = Box(-1.0, 1.0)
    domain = box if kinds == "box" else Composed((Sphere(0.9 * math.sqrt(12)), box))
    x = domain.project(2 * gaussian(4, 12))
    assert (box.side(x) != 0).double().mean() > 0.3
    features = make_features(12, 12 * 4 * 4, "relu+tanh")
    target = dense_phi(features, x).T @ gaussian(4, 1, seed=1)
    problem = replace(make_problem(features, target), domain=domain)
    start = x + 0.2 * gaussian(4, 12, seed=2)
    state = run(LevenbergMarquardt(tolerance=1e-20), problem, start, 60)
    assert state.outcome is Outcome.CONVERGED
    assert (box.project(state.fit.candidates) - state.fit.candidates).abs().max() == 0
    torch.testing.assert_close(state.fit.candidates, x, rtol=0, atol=1e-6)


def test_a_known_subspace_makes_up_for_missing_weights() -> None:
    n, d, r = 3, 30, 4
    flat = subspace(d, r)
    x = Composed((Sphere(), flat)).start(n, d, torch.Generator().manual_seed(3))
    features = make_features(d, n * r * 5)  # 60 weights for 90 entries, but 12 unknowns
    target = dense_phi(features, x).T @ gaussian(n, 1, seed=1)
    start = x + 0.2 * gaussian(n, d, seed=2)
    for domain, found in ((Composed((Sphere(), flat)), True), (Sphere(), False)):
        problem = replace(make_problem(features, target), domain=domain)
        state = run(LevenbergMarquardt(tolerance=1e-20), problem, start, 80)
        near = cosines(state.fit.candidates, x).diagonal().min().item() > 1 - 1e-8
        assert near is found


def test_the_sphere_alone_takes_the_steps_it_always_took() -> None:
    truth = case(8, 3, 4, "relu+tanh")
    point = fitted(truth.problem, Sphere().project(truth.inputs + 0.2))
    alone, _ = damped_step(truth.problem, point, 0.1, 1e-6, 40)
    composed = replace(truth.problem, domain=Composed((Sphere(),)))
    other, _ = damped_step(composed, point, 0.1, 1e-6, 40)
    torch.testing.assert_close(other, alone)
