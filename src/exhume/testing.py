"""Conformance checks for code of your own: one call, and a sentence about what is wrong.

from exhume.testing import check_features

def test_my_features():
    check_features(MyFeatures(...))
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from exhume.features import Features, Linearization

STEP = 1e-7
"""Half-width of a finite difference in float64: small, so that few kinks are crossed."""

EXACT_DIM = 32
"""Up to this dimension the curvature must be exact; beyond, it may be an estimate."""

TRIES = 3
"""Directions for a finite difference; a kink can spoil one, a wrong derivative spoils all."""


def check_features(
    features: Features, dim: int | None = None, samples: int = 3, seed: int = 0
) -> None:
    """Hold features to everything that solvers and search rely on.

    The products are compared with each other and with finite differences, in float64, at random
    candidates of norm √d. Nothing is assumed of how the features are computed. It takes about
    samples · d calls of `push`, so hand in a small instance.

    Args:
        features: to check; moved to float64 with its own `to`.
        dim: the d to expect; whatever the features say if None.
        samples: n, the number of candidates, at least 2.
        seed: of the candidates, directions and coefficients.

    Raises:
        AssertionError: with a sentence that names the method and how far it is off.

    Example:
        >>> from exhume.features.activations import activation
        >>> from exhume.features.random import RandomFeatures
        >>> from exhume.features.weights import Seeded
        >>> check_features(RandomFeatures(Seeded(width=30, dim=4, seed=0), activation("tanh")))
    """
    _require(samples >= 2, f"check_features needs samples of at least 2, got {samples}.")
    features = _moved(features, dim)
    random = _source(seed, features.device)
    d, p, m, n = features.dim, features.width, 2, samples
    x = random(n, d)
    x = x * (d**0.5 / x.norm(dim=1, keepdim=True))
    here = features.linearize(x)
    rows = _rows_per_candidate(here, n)
    a, t = random(n * rows, m), random(p, m)

    _check_products(here, a, t, n, rows)
    _check_derivative(features, here, x, a, (random(n, d) for _ in range(TRIES)))
    _check_transpose(here, random(n, d), a, t)
    _check_curvature(here, a, n, d)
    _check_order(features, here, x, a, t, rows)
    _check_bend(features, here, x, a, t, random)
    _check_moment(features, random)
    _check_restricted(features, x, a, random)
    resident = features.resident().linearize(x)
    _close("resident: has other features", resident.combine(a), here.combine(a))


def _moved(features: Features, dim: int | None) -> Features:
    before = (features.width, features.dim)
    features = features.to(features.device, torch.float64)
    after = (features.width, features.dim)
    _require(after == before, f"to: changed width and dim from {before} to {after}.")
    _require(
        features.dtype == torch.float64,
        f"to: asked for float64, but dtype is {features.dtype} afterwards.",
    )
    _require(
        dim is None or features.dim == dim, f"dim: expected {dim}, the features say {features.dim}."
    )
    return features


def _source(seed: int, device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

    return random


def _rows_per_candidate(here: Linearization, n: int) -> int:
    gram = here.gram()
    size = gram.shape[0]
    _require(
        gram.ndim == 2 and gram.shape[1] == size and size >= n and size % n == 0,
        f"gram: expected a square matrix with k rows for each of {n} candidates, "
        f"got shape {tuple(gram.shape)}.",
    )
    return size // n


def _check_products(here: Linearization, a: Tensor, t: Tensor, n: int, rows: int) -> None:
    """ΦΦᵀ, ΦT and ΦᵀA must be of one and the same Φ."""
    gram, applied, combined = here.gram(), here.apply(t), here.combine(a)
    for name, reduced in (("gram", gram), ("apply", applied)):
        _require(
            reduced.dtype == torch.float64,
            f"{name}: sums over p must be float64, got {reduced.dtype}.",
        )
    _shape("apply", applied, (n * rows, t.shape[1]))
    _shape("combine", combined, (t.shape[0], a.shape[1]))
    _close("gram is not the same when asked again", here.gram(), gram)
    _close("gram is not symmetric", gram, gram.T)
    _scalar(
        "combine is not the transpose of apply: ⟨ΦᵀA, T⟩ and ⟨A, ΦT⟩ differ",
        (combined * t).sum(),
        (a * applied).sum(),
        combined.norm() * t.norm(),
    )
    identity = torch.eye(n * rows, dtype=torch.float64, device=gram.device)
    _close("gram is not apply after combine", here.apply(here.combine(identity)), gram)


def _check_derivative(
    features: Features, here: Linearization, x: Tensor, a: Tensor, directions: Iterable[Tensor]
) -> None:
    """Push must be the derivative of combine; kinks may spoil some, not all, of the tries."""
    worst = []
    for direction in directions:
        pushed = here.push(direction, a)
        _shape("push", pushed, (features.width, a.shape[1]))
        ahead = features.linearize(x + STEP * direction).combine(a)
        behind = features.linearize(x - STEP * direction).combine(a)
        difference = (ahead - behind) / (2 * STEP)
        worst.append(_distance(pushed, difference))
    _require(
        min(worst) < 1e-5,
        f"push is not the derivative of combine: off by {min(worst):.1e} of its size from a "
        f"central difference, at best of {TRIES} directions.",
    )


def _check_transpose(here: Linearization, direction: Tensor, a: Tensor, t: Tensor) -> None:
    """⟨push(D), T⟩ = ⟨D, pull(T)⟩."""
    pushed, pulled = here.push(direction, a), here.pull(t, a)
    _shape("pull", pulled, tuple(direction.shape))
    _scalar(
        "pull is not the transpose of push: ⟨push(D), T⟩ and ⟨D, pull(T)⟩ differ",
        (pushed * t).sum(),
        (direction * pulled).sum(),
        pushed.norm() * t.norm(),
    )


def _check_curvature(here: Linearization, a: Tensor, n: int, d: int) -> None:
    """C_ij = tr(J_iᵀJ_j)/d, column by column of J."""
    dense = torch.zeros(n, n, dtype=torch.float64, device=a.device)
    for column in range(d):
        columns = []
        for i in range(n):
            direction = torch.zeros(n, d, dtype=torch.float64, device=a.device)
            direction[i, column] = 1
            columns.append(here.push(direction, a).flatten())
        stacked = torch.stack(columns).double()
        dense += stacked @ stacked.T / d
    curvature = here.curvature(a)
    _shape("curvature", curvature, (n, n))
    _close(
        "curvature is not tr(J_iᵀJ_j)/d of push", curvature, dense, 1e-9 if d <= EXACT_DIM else 0.5
    )


def _check_order(
    features: Features, here: Linearization, x: Tensor, a: Tensor, t: Tensor, rows: int
) -> None:
    """Candidates in another order give the same, in that order; k rows stay together."""
    order = torch.arange(len(x), device=x.device).roll(1)
    by_row = (order[:, None] * rows + torch.arange(rows, device=x.device)).flatten()
    there = features.linearize(x[order])
    what = "depends on the order of the candidates"
    _close(f"gram {what}", there.gram(), here.gram()[by_row][:, by_row])
    _close(f"apply {what}", there.apply(t), here.apply(t)[by_row])
    _close(f"combine {what}", there.combine(a[by_row]), here.combine(a))
    _close(f"pull {what}", there.pull(t, a[by_row]), here.pull(t, a)[order])


def _check_bend(
    features: Features,
    here: Linearization,
    x: Tensor,
    a: Tensor,
    t: Tensor,
    random: Callable[..., Tensor],
) -> None:
    """Bend must be the derivative of pull, and a symmetric matrix for each candidate alone."""
    size = here.pull(t, a).abs().max()  # what is left of it by rounding in a difference of zero
    worst = []
    for _ in range(TRIES):
        direction = random(*x.shape)
        bent = here.bend(direction, t, a)
        _shape("bend", bent, tuple(x.shape))
        ahead = features.linearize(x + STEP * direction).pull(t, a)
        behind = features.linearize(x - STEP * direction).pull(t, a)
        difference = (ahead - behind) / (2 * STEP)
        scale = torch.maximum(size, difference.abs().max()).item()
        worst.append((bent - difference).abs().max().nan_to_num(torch.inf).item() / scale)
    _require(
        min(worst) < 1e-5,
        f"bend is not the derivative of pull: off by {min(worst):.1e} of its size from a central "
        f"difference, at best of {TRIES} directions.",
    )
    one, other = random(*x.shape), random(*x.shape)
    left, right = here.bend(one, t, a), here.bend(other, t, a)
    forth, back = (other * left).sum(1), (one * right).sum(1)
    off = (forth - back).abs() / (other.norm(dim=1) * left.norm(dim=1)).clamp_min(1e-9 * size)
    _require(
        bool((off < 1e-9).all()),
        f"bend is not a symmetric matrix for each candidate: off by {off.max().item():.1e}.",
    )
    alone = torch.zeros_like(one)
    alone[0] = one[0]
    expected = torch.zeros_like(left)
    expected[0] = left[0]
    _close("bend of one candidate moves another", here.bend(alone, t, a), expected)


def _check_moment(features: Features, random: Callable[..., Tensor]) -> None:
    """A symmetric matrix that is linear in the weights, or None."""
    w, u, q = random(features.width), random(features.width), random(features.dim, 2)
    image, other, both = (features.moment(s, q) for s in (w, u, w + 2 * u))
    if image is None or other is None or both is None:
        _require(
            image is other is both is None, "moment: None for some weights but not for others."
        )
        return
    _shape("moment", image, tuple(q.shape))
    _close("moment is not linear in the weights", both, image + 2 * other)
    product = q.T @ image
    _close("moment is not a symmetric matrix", product, product.T)


def _shape(name: str, given: Tensor, expected: tuple[int, ...]) -> None:
    _require(
        tuple(given.shape) == expected,
        f"{name}: expected shape {expected}, got {tuple(given.shape)}.",
    )


def _distance(given: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry expected; infinite if undefined."""
    size = max(expected.abs().max().item(), torch.finfo(torch.float64).tiny)
    return (given - expected).abs().max().nan_to_num(torch.inf).item() / size


def _check_restricted(
    features: Features, x: Tensor, a: Tensor, random: Callable[..., Tensor]
) -> None:
    """φ(Uz) must be the features of Uz, and their pull must be that of φ seen through U."""
    basis = torch.linalg.qr(random(features.dim, max(1, features.dim - 1))).Q
    z = x @ basis
    inner, outer = features.restrict(basis).linearize(z), features.linearize(z @ basis.T)
    _close("restrict: has other features", inner.combine(a), outer.combine(a))
    t = random(features.width, a.shape[1])
    _close("restrict: has another pull", inner.pull(t, a), outer.pull(t, a) @ basis)
    direction = random(*z.shape)
    _close(
        "restrict: has another bend",
        inner.bend(direction, t, a),
        outer.bend(direction @ basis.T, t, a) @ basis,
    )


def _close(sentence: str, given: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    off = _distance(given, expected)
    _require(off < tolerance, f"{sentence}: off by {off:.1e} of its largest entry.")


def _scalar(sentence: str, left: Tensor, right: Tensor, size: Tensor) -> None:
    off = ((left - right).abs() / size.clamp_min(torch.finfo(torch.float64).tiny)).item()
    _require(off < 1e-9, f"{sentence} by {off:.1e} of their size.")


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)
