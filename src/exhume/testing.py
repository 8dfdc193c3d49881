"""Conformance checks for code of your own: one call, and a sentence about what is wrong.

from exhume.testing import check_features

def test_my_features():
    check_features(MyFeatures(...))
"""

from collections.abc import Callable
from functools import cached_property

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
    check = _Checks(features, samples, seed)
    check.products()
    check.derivative()
    check.transpose()
    check.curvature()
    check.order()
    check.second_derivative()
    check.moment()
    check.restricted()
    resident = features.resident().linearize(check.x)
    _close("resident: has other features", resident.combine(check.a), check.here.combine(check.a))


class _Checks:
    """Features at n random candidates x, with coefficients a and a target t of two columns."""

    def __init__(self, features: Features, n: int, seed: int) -> None:
        self.features, self.n, self.d = features, n, features.dim
        self.generator = torch.Generator().manual_seed(seed)
        x = self.random(n, self.d)
        self.x = x * (self.d**0.5 / x.norm(dim=1, keepdim=True))
        self.here: Linearization = features.linearize(self.x)
        self.a, self.t = self.random(n * self.rows, 2), self.random(features.width, 2)

    def random(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.features.device)

    @cached_property
    def rows(self) -> int:
        """k, the rows of Φ that belong to one candidate."""
        shape = tuple(self.here.gram().shape)
        _require(
            len(shape) == 2 and shape[1] == shape[0] >= self.n and shape[0] % self.n == 0,
            f"gram: expected a square matrix with k rows for each of {self.n} candidates, "
            f"got shape {shape}.",
        )
        return shape[0] // self.n

    def products(self) -> None:
        """ΦΦᵀ, ΦT and ΦᵀA must be of one and the same Φ."""
        here, a, t = self.here, self.a, self.t
        gram, applied, combined = here.gram(), here.apply(t), here.combine(a)
        for name, reduced in (("gram", gram), ("apply", applied)):
            _require(
                reduced.dtype == torch.float64,
                f"{name}: sums over p must be float64, got {reduced.dtype}.",
            )
        _shape("apply", applied, (len(a), t.shape[1]))
        _shape("combine", combined, (len(t), a.shape[1]))
        _close("gram is not the same when asked again", here.gram(), gram)
        _close("gram is not symmetric", gram, gram.T)
        _scalar(
            "combine is not the transpose of apply: ⟨ΦᵀA, T⟩ and ⟨A, ΦT⟩ differ",
            (combined * t).sum(),
            (a * applied).sum(),
            combined.norm() * t.norm(),
        )
        identity = torch.eye(len(a), dtype=torch.float64, device=gram.device)
        _close("gram is not apply after combine", here.apply(here.combine(identity)), gram)

    def derivative(self) -> None:
        """Push must be the derivative of combine."""

        def off(direction: Tensor) -> float:
            pushed = self.here.push(direction, self.a)
            _shape("push", pushed, (self.features.width, self.a.shape[1]))
            return _distance(pushed, self._difference(direction, lambda at: at.combine(self.a)))

        self._at_best("push is not the derivative of combine", off)

    def transpose(self) -> None:
        """⟨push(D), T⟩ = ⟨D, pull(T)⟩."""
        direction = self.random(self.n, self.d)
        pushed, pulled = self.here.push(direction, self.a), self.here.pull(self.t, self.a)
        _shape("pull", pulled, (self.n, self.d))
        _scalar(
            "pull is not the transpose of push: ⟨push(D), T⟩ and ⟨D, pull(T)⟩ differ",
            (pushed * self.t).sum(),
            (direction * pulled).sum(),
            pushed.norm() * self.t.norm(),
        )

    def curvature(self) -> None:
        """C_ij = tr(J_iᵀJ_j)/d, from the columns of J."""
        size = self.n * self.d
        axes = torch.eye(size, dtype=torch.float64, device=self.x.device)
        columns = [self.here.push(axis.view(self.n, self.d), self.a).flatten() for axis in axes]
        jacobian = torch.stack(columns).view(self.n, -1)
        dense = jacobian @ jacobian.T / self.d
        curvature = self.here.curvature(self.a)
        _shape("curvature", curvature, (self.n, self.n))
        tolerance = 1e-9 if self.d <= EXACT_DIM else 0.5
        _close("curvature is not tr(J_iᵀJ_j)/d of push", curvature, dense, tolerance)

    def order(self) -> None:
        """Candidates in another order give the same, in that order; k rows stay together."""
        here, a, t = self.here, self.a, self.t
        order = torch.arange(self.n, device=a.device).roll(1)
        rows = torch.arange(self.rows, device=a.device)
        by_row = (order[:, None] * self.rows + rows).flatten()
        there = self.features.linearize(self.x[order])
        what = "depends on the order of the candidates"
        _close(f"gram {what}", there.gram(), here.gram()[by_row][:, by_row])
        _close(f"apply {what}", there.apply(t), here.apply(t)[by_row])
        _close(f"combine {what}", there.combine(a[by_row]), here.combine(a))
        _close(f"pull {what}", there.pull(t, a[by_row]), here.pull(t, a)[order])

    def second_derivative(self) -> None:
        """Bend must be the derivative of pull, and a symmetric matrix for each candidate alone."""
        here, a, t = self.here, self.a, self.t
        size = here.pull(t, a).abs().max().item()  # rounding leaves a part of it where bend is zero

        def off(direction: Tensor) -> float:
            bent = here.bend(direction, t, a)
            _shape("bend", bent, (self.n, self.d))
            return _distance(bent, self._difference(direction, lambda at: at.pull(t, a)), size)

        self._at_best("bend is not the derivative of pull", off)
        one, other = self.random(self.n, self.d), self.random(self.n, self.d)
        left, right = here.bend(one, t, a), here.bend(other, t, a)
        forth, back = (other * left).sum(1), (one * right).sum(1)
        wrong = (forth - back).abs() / (other.norm(dim=1) * left.norm(dim=1)).clamp_min(1e-9 * size)
        _require(
            bool((wrong < 1e-9).all()),
            f"bend is not a symmetric matrix for each candidate: off by {wrong.max().item():.1e}.",
        )
        first = torch.zeros_like(one)
        first[0] = 1
        _close("bend of one candidate moves another", here.bend(first * one, t, a), first * left)

    def moment(self) -> None:
        """The moment must be a symmetric matrix that is linear in the weights, or None."""
        p, q = self.features.width, self.random(self.d, 2)
        w, u = self.random(p), self.random(p)
        image, other, both = (self.features.moment(s, q) for s in (w, u, w + 2 * u))
        if image is None or other is None or both is None:
            _require(
                image is other is both is None, "moment: None for some weights but not for others."
            )
            return
        _shape("moment", image, tuple(q.shape))
        _close("moment is not linear in the weights", both, image + 2 * other)
        product = q.T @ image
        _close("moment is not a symmetric matrix", product, product.T)

    def restricted(self) -> None:
        """φ(Uz) must be the features of Uz, and their pull must be that of φ seen through U."""
        a, t = self.a, self.t
        basis = torch.linalg.qr(self.random(self.d, max(1, self.d - 1))).Q
        z = self.x @ basis
        inner = self.features.restrict(basis).linearize(z)
        outer = self.features.linearize(z @ basis.T)
        _close("restrict: has other features", inner.combine(a), outer.combine(a))
        _close("restrict: has another pull", inner.pull(t, a), outer.pull(t, a) @ basis)
        along = self.random(*z.shape)
        bent = outer.bend(along @ basis.T, t, a) @ basis
        _close("restrict: has another bend", inner.bend(along, t, a), bent)

    def _difference(self, direction: Tensor, of: Callable[[Linearization], Tensor]) -> Tensor:
        """The central difference of a product along a direction in the candidates."""
        ahead, behind = (self.features.linearize(self.x + s * direction) for s in (STEP, -STEP))
        return (of(ahead) - of(behind)) / (2 * STEP)

    def _at_best(self, sentence: str, off: Callable[[Tensor], float]) -> None:
        """Kinks may spoil some, not all, of the tries."""
        best = min(off(self.random(self.n, self.d)) for _ in range(TRIES))
        _require(
            best < 1e-5,
            f"{sentence}: off by {best:.1e} of its size from a central difference, at best of "
            f"{TRIES} directions.",
        )


def _shape(name: str, given: Tensor, expected: tuple[int, ...]) -> None:
    _require(
        tuple(given.shape) == expected,
        f"{name}: expected shape {expected}, got {tuple(given.shape)}.",
    )


def _distance(given: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Largest difference, relative to the largest entry expected; infinite if undefined."""
    size = max(expected.abs().max().item(), least, torch.finfo(torch.float64).tiny)
    return (given - expected).abs().max().nan_to_num(torch.inf).item() / size


def _close(sentence: str, given: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    off = _distance(given, expected)
    _require(off < tolerance, f"{sentence}: off by {off:.1e} of its largest entry.")


def _scalar(sentence: str, left: Tensor, right: Tensor, size: Tensor) -> None:
    off = ((left - right).abs() / size.clamp_min(torch.finfo(torch.float64).tiny)).item()
    _require(off < 1e-9, f"{sentence} by {off:.1e} of their size.")


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)
