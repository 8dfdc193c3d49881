"""Domains: projections against slow oracles, and tangents against dense projectors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exhume.equation.domain import Beside, Box, Domain, Simplex, Span, Sphere, SphereInBox
from exhume.equation.tiles import Tiles
from problems import dense_tangent, gaussian, make_domain, refusals

seeds, dims = st.integers(0, 2**31 - 10), st.integers(2, 9)
fast = settings(max_examples=6, deadline=None)
kinds = pytest.mark.parametrize("kind", ["sphere", "box", "both"])
FACES = SphereInBox(Sphere(), Box(-1.1, 1.1))


def parts(domain: Domain) -> list[Domain]:
    return [domain.sphere, domain.box] if isinstance(domain, SphereInBox) else [domain]


@kinds
@settings(max_examples=12, deadline=None)
@given(seeds, st.integers(1, 4), dims, st.sampled_from([0.1, 1.0, 3.0]))
def test_projections_and_tangents(kind: str, seed: int, n: int, d: int, size: float) -> None:
    domain = make_domain(kind, d, seed)
    x = domain.project(size * gaussian(n, d, seed=seed))
    for part in (domain, *parts(domain)):
        torch.testing.assert_close(part.project(x), x, rtol=0, atol=1e-12)
    one = domain.project(x[:1] + 0.1)  # rows do not see each other
    torch.testing.assert_close(one, domain.project(x + 0.1)[:1], rtol=0, atol=1e-12)
    direction, descent = (gaussian(n, d, seed=seed + k) for k in (1, 2))
    for told in (descent, None):
        expected = torch.einsum("nij,nj->ni", dense_tangent(domain, x, told), direction)
        found = domain.tangent(x, told)(direction)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    along, step = domain.tangent(x, descent)(descent), 1e-4
    assert (along * descent).sum().item() >= -1e-9
    for part in parts(domain):
        if isinstance(part, Box):  # what is at a bound does not leave it
            assert (part.side(x) * along).max() <= 1e-8
        else:
            moved = x + step * along
            left = (part.project(moved) - moved).norm(dim=1).max().item()
            assert left <= 1e-11 + step**2 * along.square().sum().item()


@kinds
def test_precision_is_kept_nothing_hides_nan_and_starts_are_admissible(kind: str) -> None:
    domain = make_domain(kind, 6)
    for dtype in (torch.float32, torch.float64):
        x = domain.project(gaussian(3, 6).to(dtype))
        assert x.dtype == domain.tangent(x, x)(x).dtype == domain.tangent(x)(x).dtype == dtype
        assert all((part.project(x) - x).abs().max() < 1e-5 for part in parts(domain))
    nan = torch.full((2, 6), math.nan, dtype=torch.float64)
    assert domain.project(nan).isnan().all() and domain.tangent(nan, nan)(nan).isnan().all()
    none = nan[:0]
    assert domain.project(none).shape == domain.tangent(none, none)(none).shape == (0, 6)
    x, again = (domain.start(5, 6, torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(x, again) and x.dtype == torch.float64 and x.std(0).min() > 0
    assert all((part.project(x) - x).abs().max() < 1e-12 for part in parts(domain))


def test_boxes_hold_what_pushes_outward_start_uniformly_and_say_what_they_are() -> None:
    box, ones = Box((0.0, 0.0, -1.0), (1.0, 2.0, 1.0)), torch.ones(2, 3)
    x = torch.tensor([[0.0, 2.0, 0.5], [0.0, 2.0, 1.0]])
    out = torch.tensor([[-1.0, 3.0, 4.0], [1.0, -3.0, 4.0]])
    assert box.tangent(x, out)(ones).tolist() == [[0, 0, 1], [1, 1, 0]]
    assert torch.equal(box.tangent(x)(ones), ones)
    assert box.project(x + 5).tolist() == [[1, 2, 1], [1, 2, 1]]
    uniform = Box(-1.0, 3.0).start(4000, 2, torch.Generator().manual_seed(1))
    torch.testing.assert_close(uniform.mean(0), torch.ones(2).double(), rtol=0, atol=0.1)
    torch.testing.assert_close(uniform.var(0), torch.full((2,), 4 / 3).double(), rtol=0, atol=0.1)
    assert Box((0, -1), (1, 2)).name == "box with bounds for each entry in [-1, 2]"
    assert SphereInBox(Sphere(2.5), Box((0, 0), 1)).name == "sphere of radius 2.5 ∩ box [0, 1]"


test_what_is_no_box_is_refused = refusals(
    (lambda: Box(0.0, math.inf), "box: expected finite"),
    (lambda: Box(-math.inf, 0.0), "box: expected finite"),
    (lambda: Box(math.nan, 1.0), "box: expected finite"),
    (lambda: Box(1.0, 1.0), "low < high"),
    (lambda: Box((0.0, 1.0), 1.0), "low < high"),
    (lambda: Box((0.0, 0.0), (1.0, 1.0, 1.0)), "box: expected a number or one"),
    (lambda: Box(torch.zeros(2, 2), 1.0), "box: expected a number or one"),
    (lambda: Box((0, 0), (1, 1)).start(3, 5, torch.Generator()), "2 entries, but inputs have"),
)


@fast
@given(seeds, dims, st.sampled_from([-1.0, 0.0, 0.3]), st.sampled_from([0.9, 1.1, 2.0]))
def test_sphere_and_box_give_the_nearest_point(
    seed: int, d: int, low: float, spread: float
) -> None:
    box, points = Box(low, low + spread), gaussian(4, d, seed=seed)
    nearest, farthest = box.project(torch.zeros(1)).abs().item(), max(abs(low), abs(low + spread))
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        radius = max(0.01, math.sqrt(d) * (nearest + share * (farthest - nearest)))
        both = SphereInBox(Sphere(radius), box)
        x, rivals = both.project(points), both.project(gaussian(200, d, seed=seed + 1))
        for y in (x, rivals):  # also where a row points away from all that is admissible
            torch.testing.assert_close(y.norm(dim=1), torch.full((len(y),), radius).to(y))
            assert (box.project(y) - y).abs().max() == 0
        free = box.project(1e6 * points).norm(dim=1) >= radius  # where the nearest point is known
        gap = (points * x).sum(1) - (points @ rivals.T).max(1).values  # largest ⟨z, x⟩: nearest
        assert (gap[free] >= -1e-9 * radius).all()


def test_where_sphere_and_box_hardly_meet() -> None:
    for radius, low, nearest in ((10.0, -1, 2.0), (0.5, 1, 1.0)):
        found = SphereInBox(Sphere(radius), Box(low, 2)).project(gaussian(3, 4))
        assert torch.equal(found, torch.full((3, 4), nearest).double())
    for x in (torch.zeros(2, 5), torch.ones(2, 5)):  # all at a bound, and too long for the sphere
        found = SphereInBox(Sphere(1.0), Box(-1, 1)).project(x)
        torch.testing.assert_close(found.norm(dim=1), torch.ones(2))


def test_a_step_along_a_face_ends_on_it() -> None:
    x, descent = FACES.project(gaussian(20, 9)), gaussian(20, 9, seed=1)
    at_bound = x.abs() == 1.1
    held = FACES.tangent(x, descent)(torch.ones_like(x)).eq(0) & at_bound
    moved = FACES.project(x + 0.1 * FACES.tangent(x, descent)(descent))
    assert held.sum() > 5 and (moved[held] == x[held]).all()
    assert (moved[~at_bound] != x[~at_bound]).all()


@fast
@given(seeds, st.integers(2, 30))
def test_what_is_held_is_what_the_best_direction_needs(seed: int, d: int) -> None:
    x, descent = FACES.project(gaussian(6, d, seed=seed)), gaussian(6, d, seed=seed + 1)
    along = FACES.tangent(x, descent)(descent)
    for rival in (gaussian(6, d, seed=other) for other in range(20)):
        rival = FACES.tangent(x, rival)(rival)  # admissible too, and no nearer to the descent
        assert ((descent - along) * (rival - along)).sum(1).max() <= 1e-9


@fast
@given(seeds, dims)
def test_the_simplex_has_the_nearest_point_and_directions_that_stay(seed: int, c: int) -> None:
    x, descent, other = (gaussian(3, c, seed=seed + k) for k in range(3))
    near = Simplex().project(x)
    torch.testing.assert_close(near.sum(1), torch.ones(3, dtype=near.dtype))
    corners = torch.eye(c, dtype=near.dtype)  # no corner lies further in the direction of x
    off = x - near
    assert near.min() >= 0 and (off @ corners.T - (off * near).sum(1)[:, None]).max() < 1e-9
    along = Simplex().tangent(near, descent)(descent)
    torch.testing.assert_close(Simplex().tangent(near, descent)(along), along)  # a projector,
    across = Simplex().tangent(near, descent)(other)
    torch.testing.assert_close((across * descent).sum(), (along * other).sum())  # symmetric
    stepped = near + 1e-6 * along
    torch.testing.assert_close(Simplex().project(stepped), stepped, rtol=0, atol=1e-12)
    assert Simplex().start(5, c, torch.Generator()).sum(1).allclose(torch.ones(5, dtype=x.dtype))


def test_rows_of_two_domains_are_two() -> None:
    both, x = Beside(Box(0.0, 1.0), Simplex(), 4), 2 * gaussian(3, 7)
    near = both.project(x)
    assert torch.equal(near, torch.cat([x[:, :4].clamp(0, 1), Simplex().project(x[:, 4:])], 1))
    assert both.tangent(near)(x)[:, 4:].sum(1).abs().max() < 1e-12
    assert torch.equal(both.tangent(near)(x)[:, :4], x[:, :4])
    torch.testing.assert_close(both.project(drawn := both.start(2, 7, torch.Generator())), drawn)
    assert both.name == "box [0, 1] × simplex"


def span_of(tiles: Tiles | None, seed: int) -> Span:
    """Three random directions of inputs of 48 entries, or of all their tiles."""
    basis = torch.linalg.qr(gaussian(tiles.entries if tiles else 48, 3, seed=seed)).Q.T
    return Span(basis, Box(-1.0, 2.0), tiles)


@pytest.mark.parametrize("tiles", [None, Tiles((2, 4, 6), (2, 3))], ids=["inputs", "tiles"])
@fast
@given(seed=seeds)
def test_a_span_is_a_projector_on_orthonormal_rows(tiles: Tiles | None, seed: int) -> None:
    domain, x, y = span_of(tiles, seed), gaussian(5, 48, seed=seed), gaussian(5, 48, seed=seed + 1)
    near, rows = domain.project(x), domain.every
    assert near.norm() < x.norm()
    torch.testing.assert_close(domain.project(near), near)
    torch.testing.assert_close((near * y).sum(), (x * domain.project(y)).sum())
    assert torch.equal(domain.tangent(near, x)(y), domain.project(y))  # no bound is held
    assert rows.shape == (3 if tiles is None else 12, 48)
    torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)).double())
    torch.testing.assert_close(near, x @ rows.T @ rows)
    drawn = domain.start(5, 48, torch.Generator().manual_seed(seed))
    torch.testing.assert_close(domain.project(drawn), drawn)
    box = Box(-1.0, 2.0).start(5, 48, torch.Generator().manual_seed(seed))
    assert torch.equal(drawn, domain.project(box))
    assert domain.project(x.float()).dtype == torch.float32


def test_every_tile_is_projected_to_the_span_where_it_is() -> None:
    tiles, x = Tiles((2, 4, 6), (2, 3)), gaussian(1, 48)
    domain = span_of(tiles, 1)
    last, near = (y.view(2, 4, 6)[:, 2:, 3:].flatten() for y in (x, domain.project(x)))
    torch.testing.assert_close(near, domain.basis.T @ (domain.basis @ last))
    assert domain.name == "box [-1, 2], their tiles in a span of 3 directions"
    assert span_of(None, 1).name == "box [-1, 2], inputs in a span of 3 directions"


@fast
@given(seeds, st.floats(0.1, 3), st.floats(0.1, 3), st.sampled_from([0.1, 1.0, 10.0]))
def test_rows_are_shrunk_until_they_lie_in_the_box(
    seed: int, low: float, high: float, size: float
) -> None:
    rows = size * gaussian(6, 5, seed=seed)
    found = Box(-low, high).shrunk(rows)
    factors = (found * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
    torch.testing.assert_close(found, factors * rows)
    assert factors.min() > 0
    most = torch.maximum(found.amax(1) / high, -found.amin(1) / low)
    assert most.max() <= 1 + 1e-12
    inside = ((rows >= -low) & (rows <= high)).all(1)
    assert torch.equal(found[inside], rows[inside])
    torch.testing.assert_close(most[~inside], torch.ones_like(most[~inside]))  # and no further


def test_rows_of_other_entries_are_shrunk_to_the_widest_bounds_that_a_factor_leads_to() -> None:
    rows = torch.tensor([[4.0, -1.0], [1.0, -6.0]])
    assert Box((-1.0, -3.0, -2.0), (1.0, 1.0, 2.0)).shrunk(rows).tolist() == [[2, -0.5], [0.5, -3]]
    assert Box(0.0, 1.0).shrunk(rows).tolist() == [[1, -0.25], [1, -6]]
    assert Box(-2.0, -1.0).shrunk(2 * rows).tolist() == [[8, -2], [pytest.approx(1 / 3), -2]]
