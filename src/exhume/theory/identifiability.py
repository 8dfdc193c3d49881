"""Whether the weights of a two-layer polynomial network determine its training samples.

At a KKT point of margin maximisation with σ(z) = z^α the weights are stationary,

    w_k = α a_k T(w_k, …, w_k, ·),    a_k = T(w_k, …, w_k),    T = Σ_i b_i x_i^{⊗α},  b_i = λ_i y_i,

and both are linear in T. If these equations have one solution only, T is known, and for α ≥ 3 its
rank-one terms are unique while the x_i are independent: every sample with λ_i ≠ 0 follows. A
polynomial σ = Σ_q s_q z^q has one such tensor for each of its degrees, and the equations are linear
in all of them together (Shen 2026; the form with symmetric coordinates is ours).

Every w_k is a combination of the x_i, so all of this happens in U, the span of the neurons: T is
determined on U. The functionals
T ↦ T(w_k, …, w_k, ·) span the tangent space at w_k of the cone of rank-one tensors. For neurons in
general position these fill the space as soon as their number allows, but for four cases
(Alexander and Hirschowitz, 1995; see `fewest_neurons`). Neurons of a KKT point are eigenvectors of
T, not in general position: so the rank is computed, not assumed. The condition is sufficient and
not necessary: that T is a sum of few rank-one terms is not made use of.

Inside: `identifiability`, `recover`, `Identifiability`, `Recovered`, `fewest_neurons`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from exhume.errors import InputError
from exhume.theory.neurons import LOCAL, Neurons, neurons_of, violation
from exhume.theory.recovery import at_scale, by_margin, decompose, refine
from exhume.theory.tensors import dimension, powers, slices

GAP = 1e3
"""Least ratio of neighbouring singular values of the neurons that ends their span."""

ROUNDED = 1e3
"""Relative singular values below so many roundings of the weights count as zero."""

SILENT = 1e-6
"""Neurons below this size, relative to the largest, hold no equation that could be read."""

MOST = 3000
"""Most unknowns: the equations are solved as a dense matrix."""

FAINT = 1e-2
"""A sample whose part in the tensor is at least so large, relatively, is always looked for."""

UNEXPLAINED = 1e-2
"""Most of the weights that recovered samples may leave unexplained."""

DEFECTIVE = {(3, 5), (4, 3), (4, 4), (4, 5)}
"""(α, r) where the tangent spaces of general neurons fill less than their number allows."""


@dataclass(frozen=True, eq=False)
class Identifiability:
    """What the weights determine.

    Attributes:
        degrees: of the polynomial σ, lowest first.
        dim: d, of a sample.
        neurons: how many hold equations.
        rank_of_neurons: r, the dimension of their span U.
        unknowns: of the symmetric tensors on U, Σ_q C(r+q−1, q).
        equations: r for each neuron, and one more if σ has several degrees.
        rank: of the equations.
        smallest: the last singular value of the equations, relative to the first; 0 if there are
            fewer equations than unknowns.
        tolerance: relative singular value that counts as zero.
        sufficient_rank: of the Gram matrix [(w_k·w_l)^{α−1}], that is the dimension of
            span{w_k^{⊗(α−1)}}; with several degrees of all (w_k^{⊗(q−1)})_q together.
        sufficient_unknowns: the rank at which it alone would do: dim Sym^{α−1}(U).
        misfit: what the best tensors leave of the equations, relative.
        samples: recovered, (n, d) float64; None if the condition fails or nothing fits.
        multipliers: b_i = λ_i y_i, (n,).
        residual: |θ − Σ_i b_i ∇θ f(x_i)| / |θ| of what was recovered.
        undetermined: sentences on what of a sample the weights cannot show.
        reasons: sentences on why the condition, or the recovery, fails.
    """

    degrees: tuple[int, ...]
    dim: int
    neurons: int
    rank_of_neurons: int
    unknowns: int
    equations: int
    rank: int
    smallest: float
    tolerance: float
    sufficient_rank: int
    sufficient_unknowns: int
    misfit: float
    samples: Tensor | None
    multipliers: Tensor | None
    residual: float | None
    undetermined: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def degree(self) -> int:
        """α, the highest degree."""
        return self.degrees[-1]

    @property
    def holds(self) -> bool:
        """Whether the equations determine the tensors."""
        return self.rank == self.unknowns

    @property
    def margin(self) -> float:
        """The last singular value over the tolerance; the condition holds above 1."""
        return self.smallest / self.tolerance

    @property
    def sufficient(self) -> bool:
        """Whether span{w_k^{⊗(α−1)}} is all of Sym^{α−1}(U), which is more than is needed."""
        return self.sufficient_rank == self.sufficient_unknowns


@dataclass(frozen=True, eq=False)
class Recovered:
    """Samples that explain the weights.

    Attributes:
        samples: (n, d) float64.
        multipliers: b_i = λ_i y_i, (n,).
        residual: |θ − Σ_i b_i ∇θ f(x_i)| / |θ|.
    """

    samples: Tensor
    multipliers: Tensor
    residual: float


def fewest_neurons(degree: int, size: int) -> int:
    """So many neurons in general position determine T ∈ Sym^α(R^r); fewer never do.

    ⌈C(r+α−1, α)/r⌉, and one more in the four defective cases of Alexander and Hirschowitz.

    Example:
        >>> [fewest_neurons(3, r) for r in (3, 4, 5)], fewest_neurons(4, 5)
        ([4, 5, 8], 15)
    """
    return math.ceil(dimension(size, degree) / size) + ((degree, size) in DEFECTIVE)


def identifiability(
    model: nn.Module,
    trained: Mapping[str, Tensor] | Path | str | None = None,
    rank: int | None = None,
    tolerance: float | None = None,
    level: float = 1.0,
) -> Identifiability:
    """Check the rank condition and, where it holds, recover the active samples.

    Args:
        model: a two-layer network with a polynomial activation of degree 3 or more, such as
            `exhume.models.architectures.two_layer` makes with activation polynomial:0,0,0,1.
        trained: its weights, or their file; the module's own if None.
        rank: r, the dimension of the neurons' span; where their singular values fall off if None.
        tolerance: relative singular value that counts as zero; from the rounding of the weights,
            and from what the neurons have outside of their span, if None.
        level: γ, the margin y f(x) of every active sample, for the norm of samples where σ has
            one degree and there is no bias; 1 in the margin problem's own units.

    Example:
        >>> from exhume.models.architectures import initialise, two_layer
        >>> found = identifiability(initialise(two_layer((3,), 2, activation="polynomial:0,0,0,1")))
        >>> found.rank_of_neurons, found.rank, found.unknowns, found.holds
        (2, 4, 4, True)
    """
    view = _view(neurons_of(model, trained), rank, tolerance, level)
    solved = _solved(view)
    holds = solved.rank == solved.unknowns
    reasons = [] if holds else [_too_few(view, solved)]
    found = _recovered(view, solved, level) if holds else None
    if found is not None and not found.residual <= UNEXPLAINED:
        reasons.append(
            f"The samples found leave {found.residual:.1e} of the weights unexplained: the weights "
            "are not at a KKT point (train longer, without a bias that is not penalised), or more "
            f"than {view.basis.shape[1]} samples are active, which is not solved here."
        )
        found = None
    sufficient = _sufficient(view)
    return Identifiability(
        degrees=view.inside.degrees,
        dim=view.dim,
        neurons=len(view.inside.first),
        rank_of_neurons=view.basis.shape[1],
        unknowns=solved.unknowns,
        equations=solved.equations,
        rank=solved.rank,
        smallest=solved.smallest,
        tolerance=view.tolerance,
        sufficient_rank=sufficient[0],
        sufficient_unknowns=sufficient[1],
        misfit=solved.misfit,
        samples=None if found is None else found.samples,
        multipliers=None if found is None else found.multipliers,
        residual=None if found is None else found.residual,
        undetermined=_undetermined(view, level, found is not None and _whole(view, found)),
        reasons=tuple(reasons),
    )


def recover(
    model: nn.Module,
    trained: Mapping[str, Tensor] | Path | str | None = None,
    rank: int | None = None,
    tolerance: float | None = None,
    level: float = 1.0,
) -> Recovered:
    """Samples from the tensor of least norm that fits the weights, whatever the condition says.

    Where it holds that tensor is the only one. Where it fails there are others, the samples are
    those of a tensor picked among them, and there is no reason why they should be true.

    Args:
        model: see `identifiability`.
        trained: likewise.
        rank: likewise.
        tolerance: likewise.
        level: likewise.
    """
    view = _view(neurons_of(model, trained), rank, tolerance, level)
    return _recovered(view, _solved(view), level)


@dataclass(frozen=True, eq=False)
class _View:
    """A network in coordinates of the span of its neurons."""

    neurons: Neurons
    inside: Neurons  # first (K, r), without silent neurons
    basis: Tensor  # U, (d, r); (d + 1, r) with a bias
    tolerance: float

    @property
    def dim(self) -> int:
        return len(self.basis) - self.neurons.lifted


def _view(neurons: Neurons, rank: int | None, tolerance: float | None, level: float) -> _View:
    if not 0 < level < math.inf:
        raise InputError(f"level: expected a number above 0, got {level}.")
    if tolerance is not None and not 0 < tolerance < 1:
        raise InputError(f"tolerance: expected a number between 0 and 1, got {tolerance}.")
    sizes, last = neurons.first.norm(dim=1), neurons.last.abs()
    heard = (sizes > SILENT * sizes.max()) & (last > SILENT * last.max())
    if not heard.any():
        raise InputError("model: every neuron is zero, so its weights hold no trace of any sample.")
    first = neurons.first[heard]
    basis, noise = _span(first, neurons.eps, rank)
    inside = replace(neurons, first=first @ basis, last=neurons.last[heard])
    blurred = max(ROUNDED * neurons.eps, 10 * noise)
    if tolerance is None and blurred >= 1:
        raise InputError(
            f"model: weights are rounded to {neurons.eps:.0e}, and {noise:.0e} of the neurons lies "
            f"outside of {basis.shape[1]} dimensions: too much for a rank to be told. Save the "
            "weights with more digits, leave out the rank, or give a tolerance below 1."
        )
    return _View(neurons, inside, basis, tolerance or blurred)


def _span(first: Tensor, eps: float, rank: int | None) -> tuple[Tensor, float]:
    """Basis (d, r) of the span of the rows, each taken at length 1, and what lies outside of it.

    Rounding and unfinished training leave something in every direction, so the span ends at the
    widest gap between singular values, if that is wide.
    """
    rows = torch.nn.functional.normalize(first, dim=1)
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    values = (values / values[0]).clamp_min(eps)
    gaps = values[:-1] / values[1:]
    if rank is not None and not 1 <= rank <= len(values):
        raise InputError(f"rank: expected a number from 1 to {len(values)}, got {rank}.")
    size = rank or (int(gaps.argmax()) + 1 if (gaps > GAP).any() else len(values))
    noise = float(values[size]) if size < len(values) else 0.0
    return vectors[:size].T.contiguous(), noise


@dataclass(frozen=True, eq=False)
class _Solved:
    """The tensors of least norm that fit the equations best."""

    tensors: dict[int, Tensor]  # T_q in coordinates, by degree
    unknowns: int
    equations: int
    rank: int
    smallest: float
    misfit: float
    uncertainty: float  # of the tensors, relative, where weights are off by the tolerance


def _equations(neurons: Neurons) -> tuple[Tensor, Tensor, float]:
    """A t = c for t = (s_q ω^q T_q)_q, with ω the root mean square of |w_k|.

    With v = w/ω a neuron's equations are Σ_q q t_q(v^{q−1}, ·) = ω² v / a and, with several
    degrees, Σ_q t_q(v^q) = a (for one degree it follows from the others and |w|² = α a²). Each
    neuron's are divided by the norm of its rows, so neither units nor sizes count.

    Returns:
        A (K·e, M), c (K·e,) and ω.
    """
    scale = float(neurons.first.square().sum(1).mean().sqrt())
    v = neurons.first / scale
    several = len(neurons.degrees) > 1
    blocks = []
    for q in neurons.degrees:
        block = q * slices(v, q)
        blocks.append(torch.cat([block, powers(v, q)[:, None, :]], 1) if several else block)
    rows = torch.cat(blocks, 2)  # (K, e, M)
    right = scale**2 * v / neurons.last[:, None]
    right = torch.cat([right, neurons.last[:, None]], 1) if several else right
    sizes = rows.flatten(1).norm(dim=1)
    rows, right = rows / sizes[:, None, None], right / sizes[:, None]
    return rows.flatten(0, 1), right.flatten(), scale


def _solved(view: _View) -> _Solved:
    neurons = view.inside
    size = neurons.first.shape[1]
    counts = [dimension(size, q) for q in neurons.degrees]
    if sum(counts) > MOST:
        raise InputError(
            f"model: its neurons span {size} dimensions, where tensors of degree "
            f"{neurons.degree} have {sum(counts)} unknowns; up to {MOST} can be checked. {LOCAL}"
        )
    rows, right, scale = _equations(neurons)
    left, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    kept = values > view.tolerance * values[0]
    solution = vectors[kept].T @ ((left[:, kept].T @ right) / values[kept])
    parts = solution.split(counts)
    return _Solved(
        tensors={
            q: part / (neurons.coefficients[q] * scale**q)
            for q, part in zip(neurons.degrees, parts, strict=True)
        },
        unknowns=sum(counts),
        equations=len(rows),
        rank=int(kept.sum()),
        smallest=float(values[-1] / values[0]) if len(values) == sum(counts) else 0.0,
        misfit=float((rows @ solution - right).norm() / right.norm()),
        uncertainty=min(FAINT, view.tolerance * float(values[0] / values[kept][-1])),
    )


def _sufficient(view: _View) -> tuple[int, int]:
    """The dimension of span{(w_k^{⊗(q−1)})_q}, and that of the whole space."""
    unit = torch.nn.functional.normalize(view.inside.first, dim=1)
    size = unit.shape[1]
    lower = [q - 1 for q in view.inside.degrees]
    values = torch.linalg.svdvals(torch.cat([powers(unit, q) for q in lower], 1))
    rank = int((values > view.tolerance * values[0]).sum())
    return rank, sum(dimension(size, q) for q in lower)


def _recovered(view: _View, solved: _Solved, level: float) -> Recovered:
    """Decompose, refine on the equations where they determine T, and put to scale."""
    neurons, degree = view.inside, view.inside.degree
    tensors = dict(solved.tensors)
    samples, multipliers, _ = decompose(
        tensors.pop(degree), neurons.first.shape[1], degree, solved.uncertainty
    )
    if tensors:
        samples, multipliers = at_scale(samples, multipliers, tensors, degree)
    if solved.rank == solved.unknowns:
        samples, multipliers = refine(neurons, samples, multipliers)
    full = samples @ view.basis.T
    if degree % 2 and len({q % 2 for q in neurons.degrees}) == 1:  # (x, b) and (−x, −b) are alike
        sign = full[:, -1].sign() if view.neurons.lifted else multipliers.sign()
        full, multipliers = full * sign[:, None], multipliers * sign
    elif view.neurons.lifted and len({q % 2 for q in neurons.degrees}) == 1:  # x and −x are alike
        full = full * full[:, -1:].sign()
    if not tensors and view.neurons.lifted:
        multipliers = multipliers * full[:, -1] ** degree
        full = full / full[:, -1:]
    elif not tensors:
        full, multipliers = by_margin(view.neurons, full, multipliers, level)
    residual = violation(view.neurons, full, multipliers)
    return Recovered(full[:, : view.dim], multipliers, residual)


def _too_few(view: _View, solved: _Solved) -> str:
    """Why the condition fails."""
    size, degree = view.basis.shape[1], view.inside.degree
    free = solved.unknowns - solved.rank
    needed = ""
    if len(view.inside.degrees) == 1:
        needed = (
            f" {fewest_neurons(degree, size)} neurons in general position would do, there are "
            f"{len(view.inside.first)}, and twins count once."
        )
    return (
        f"The equations have rank {solved.rank} for {solved.unknowns} unknowns: {free} "
        f"combination{'s' if free > 1 else ''} of the samples' moments left no trace, so that many "
        f"tensors fit the weights.{needed} {LOCAL}"
    )


def _whole(view: _View, found: Recovered) -> bool:
    """Whether the samples found cannot go on outside of the span of the neurons.

    Outside of it the weights are zero, Σ_i b_i σ'(w_k·x_i) x_i⊥ = 0 for every k: if the (K, n)
    matrix of b_i σ'(w_k·x_i) has rank n, every x_i⊥ is zero.
    """
    samples = found.samples
    if view.neurons.lifted:
        samples = torch.nn.functional.pad(samples, (0, 1), value=1.0)
    slopes = view.inside.slope(view.inside.first @ (samples @ view.basis).T)
    values = torch.linalg.svdvals(torch.nn.functional.normalize(slopes, dim=0))
    return len(values) == len(samples) and bool(values[-1] > view.tolerance * values[0])


def _undetermined(view: _View, level: float, whole: bool) -> tuple[str, ...]:
    """What of a sample the weights cannot show."""
    size, degrees = view.basis.shape[1], view.inside.degrees
    said = ["A sample with multiplier zero (beyond the margin) leaves no trace."]
    if size < len(view.basis):
        where = f"the span of the neurons ({size} of {len(view.basis)} dimensions)"
        said.append(
            f"Active samples lie in {where}: a part outside would show, unless samples that agree "
            "inside cancel there."
            if whole
            else f"Whatever of a sample lies outside {where} may leave no trace."
        )
    if view.neurons.lifted:
        return tuple(said)
    if len(degrees) == 1:
        said.append(
            "The norm of a sample leaves no trace of its own: it is set so that |f(x)| = "
            f"{level:g}, the margin that active samples are assumed to share."
        )
    if all(q % 2 == 0 for q in degrees):
        said.append("A sample and its negative leave the same trace; the sign cannot be found.")
    if all(q % 2 for q in degrees):
        said.append(
            "A sample and its label leave the same trace as the negatives of both; the sign is "
            "the one with label +1."
        )
    return tuple(said)
