"""Conformance checks for code of your own: one call, and a sentence about what is wrong.

from exhume.testing import check_features

def test_my_features():
    check_features(MyFeatures(...))
"""

from collections.abc import Callable

import torch
from torch import Tensor

from exhume.features import Features, Linearization
from exhume.features.replay import TrainingRun

STEP = 1e-7  # half-width of a finite difference in float64: small, so that few kinks are crossed
EXACT_DIM = 32  # up to this dimension the curvature must be exact; beyond, it may be an estimate
SHARES = 3  # into which features are divided that can be
TRIES = 3  # directions for a difference; a kink can spoil one, a wrong derivative spoils all


def check_features(
    features: Features, dim: int | None = None, samples: int = 3, seed: int = 0
) -> None:
    """Hold features to everything that solvers and search rely on.

    The products are compared with each other and with finite differences, in float64, at random
    candidates of norm √d: so many `samples` (2 or more), drawn with the `seed`; `dim` is the d to
    expect. It takes about n·d calls of `push`, so hand in a small instance. Of a training run, such
    as the `features` of a problem with a recipe, what it has is checked: its end, push and pull.

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
    after, dtype = (features.width, features.dim), features.dtype
    _require(after == before, f"to: changed width and dim from {before} to {after}.")
    _require(dtype == torch.float64, f"to: asked for float64, but dtype is {dtype} afterwards.")
    _require(dim in (None, after[1]), f"dim: expected {dim}, the features say {after[1]}.")
    if isinstance(features, TrainingRun):
        _check_run(features, samples, seed)
        return
    check = _Checks(features, samples, seed)
    check.products()
    check.derivative("push", "combine", check.here.push, lambda at: at.combine(check.a), 0.0)
    check.transpose()
    check.curvature()
    check.order()
    check.second_derivative()
    check.moment()
    check.restricted()
    check.shares()
    resident = features.resident().linearize(check.x)
    _close("resident: has other features", resident.combine(check.a), check.here.combine(check.a))


def _check_run(run: TrainingRun, n: int, seed: int) -> None:
    """Push must be the derivative of where a run ends, and pull its transpose, kept or not."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(run.device)
        for shape in ((n, run.dim), (n, run.outputs), (n, run.dim), (run.width, 1))
    ]
    x, given, along, target = drawn
    labels = given.softmax(1) if run.outputs > 1 else given.sign()
    labels, offs = labels.reshape(-1, 1), []
    at = run.linearize(x)
    _shape("combine", at.combine(labels), (run.width, 1))
    pushed = at.push(along, labels)
    for step in (STEP, 10 * STEP, 100 * STEP):  # a kink can spoil one
        ahead, behind = (run.linearize(x + s * along).combine(labels) for s in (step, -step))
        offs.append(_distance(pushed, (ahead - behind) / (2 * step)))
    _require(min(offs) < 1e-4, f"push is not the derivative of the run: off by {min(offs):.1e}.")
    pulled = at.pull(target, labels)
    _same_inner("pull is not the transpose of push", pushed, target, along, pulled)
    again = run.linearize(x)
    again.combine(labels)
    pulled = again.pull(target, labels)  # before a Jacobian is kept: backward through the steps
    _close("pull through the steps is another", pulled, at.pull(target, labels), 1e-8)


class _Checks:
    """Features at n random candidates x, with coefficients a and a target t of two columns."""

    def __init__(self, features: Features, n: int, seed: int) -> None:
        self.features, self.n, self.d = features, n, features.dim
        self.generator = torch.Generator().manual_seed(seed)
        x = self.random(n, self.d)
        self.x = x * (self.d**0.5 / x.norm(dim=1, keepdim=True))
        self.here: Linearization = features.linearize(self.x)
        shape = tuple(self.here.gram().shape)
        square = len(shape) == 2 and shape[1] == shape[0] >= n and shape[0] % n == 0
        _require(square, f"gram: expected a square matrix, k rows for each of {n}, got {shape}.")
        self.rows = shape[0] // n  # k, the rows of Φ that belong to one candidate
        self.a, self.t = self.random(shape[0], 2), self.random(features.width, 2)

    def random(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.features.device)

    def products(self) -> None:
        """ΦΦᵀ, ΦT and ΦᵀA must be of one and the same Φ."""
        here, a, t = self.here, self.a, self.t
        gram, applied, combined = here.gram(), here.apply(t), here.combine(a)
        for name, found in (("gram", gram.dtype), ("apply", applied.dtype)):
            _require(found == torch.float64, f"{name}: sums over p must be float64, got {found}.")
        _shape("apply", applied, (len(a), t.shape[1]))
        _shape("combine", combined, (len(t), a.shape[1]))
        _close("gram is not the same when asked again", here.gram(), gram)
        _close("gram is not symmetric", gram, gram.T)
        _same_inner("combine is not the transpose of apply", combined, t, a, applied)
        identity = torch.eye(len(a), dtype=torch.float64, device=gram.device)
        _close("gram is not apply after combine", here.apply(here.combine(identity)), gram)

    def derivative(
        self,
        name: str,
        of_name: str,
        derivative: Callable[..., Tensor],
        of: Callable[[Linearization], Tensor],
        least: float,
        *arguments: Tensor,
    ) -> None:
        """Compare with central differences; kinks may spoil some, not all, of the tries."""
        offs = []
        for _ in range(TRIES):
            along = self.random(self.n, self.d)
            found = derivative(along, *arguments, self.a)
            ahead, behind = (of(self.features.linearize(self.x + s * along)) for s in (STEP, -STEP))
            _shape(name, found, tuple(ahead.shape))
            offs.append(_distance(found, (ahead - behind) / (2 * STEP), least))
        off = f"off by {min(offs):.1e} of its size, at best of {TRIES} directions"
        _require(min(offs) < 1e-5, f"{name} is not the derivative of {of_name}: {off}.")

    def transpose(self) -> None:
        """⟨push(D), T⟩ = ⟨D, pull(T)⟩."""
        direction = self.random(self.n, self.d)
        pushed, pulled = self.here.push(direction, self.a), self.here.pull(self.t, self.a)
        _shape("pull", pulled, (self.n, self.d))
        _same_inner("pull is not the transpose of push", pushed, self.t, direction, pulled)

    def curvature(self) -> None:
        """C_ij = tr(J_iᵀJ_j)/d, from the columns of J."""
        axes = torch.eye(self.n * self.d, dtype=torch.float64, device=self.x.device)
        columns = [self.here.push(axis.view(self.n, self.d), self.a).flatten() for axis in axes]
        jacobian = torch.stack(columns).view(self.n, -1)
        curvature = self.here.curvature(self.a)
        _shape("curvature", curvature, (self.n, self.n))
        tolerance = 1e-9 if self.d <= EXACT_DIM else 0.5
        dense = jacobian @ jacobian.T / self.d
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
        self.derivative("bend", "pull", here.bend, lambda at: at.pull(t, a), size, t)
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
            known = not image is other is both is None
            _require(not known, "moment: None for some weights but not for others.")
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

    def shares(self) -> None:
        """Products of all shares must add up to those of the whole."""
        every = torch.arange(self.features.width, device=self.t.device)
        along, q = self.random(self.n, self.d), self.random(self.d, 2)
        whole = self.every_product(self.features, self.here, every, along, q)
        sums = {name: torch.zeros_like(product) for name, product in whole.items()}
        for index in range(SHARES):
            if (share := self.features.share(index, SHARES)) is None:
                return
            part, rows = share
            own = torch.cat([every[each] for each in rows])
            _require(len(own) == part.width, f"share: {part.width} wide, but has {len(own)} rows.")
            products = self.every_product(part, part.linearize(self.x), own, along, q)
            sums = {name: sums[name] + product for name, product in products.items()}
        for name, product in whole.items():
            tolerance = 0.5 if name == "curvature" and self.d > EXACT_DIM else 1e-9
            _close(f"share: {name} does not add up", sums[name], product, tolerance)

    def every_product(
        self, features: Features, here: Linearization, own: Tensor, along: Tensor, q: Tensor
    ) -> dict[str, Tensor]:
        """Products with some rows of the target; what has rows is zero in the others."""
        a, t, blank = self.a, self.t[own], torch.zeros_like(self.t)
        moment = features.moment(t[:, 0], q)  # a mean over rows
        return {
            "gram": here.gram(),
            "apply": here.apply(t),
            "combine": blank.index_copy(0, own, here.combine(a)),
            "push": blank.index_copy(0, own, here.push(along, a)),
            "pull": here.pull(t, a),
            "bend": here.bend(along, t, a),
            "curvature": here.curvature(a),
            "moment": torch.zeros_like(q) if moment is None else moment * (len(t) / len(blank)),
        }


def _shape(name: str, given: Tensor, expected: tuple[int, ...]) -> None:
    found = tuple(given.shape)
    _require(found == expected, f"{name}: expected shape {expected}, got {found}.")


def _distance(given: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Largest difference, relative to the largest entry expected; infinite if undefined."""
    size = max(expected.abs().max().item(), least, torch.finfo(torch.float64).tiny)
    return (given - expected).abs().max().nan_to_num(torch.inf).item() / size


def _close(sentence: str, given: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    off = _distance(given, expected)
    _require(off < tolerance, f"{sentence}: off by {off:.1e} of its largest entry.")


def _same_inner(sentence: str, image: Tensor, t: Tensor, a: Tensor, back: Tensor) -> None:
    """⟨MA, T⟩ = ⟨A, MᵀT⟩."""
    size = (image.norm() * t.norm()).clamp_min(torch.finfo(torch.float64).tiny)
    off = (((image * t).sum() - (a * back).sum()).abs() / size).item()
    _require(off < 1e-9, f"{sentence}: the inner products differ by {off:.1e} of their size.")


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)
