"""The linear equations by which the weights of a two-layer polynomial network show moments.

At a KKT point of margin maximisation with σ(z) = z^α the weights are stationary,

    w_k = α a_k T(w_k, …, w_k, ·),    a_k = T(w_k, …, w_k),    T = Σ_i b_i x_i^{⊗α},  b_i = λ_i y_i,

and both are linear in T. A polynomial σ = Σ_q s_q z^q has one such tensor for each of its degrees,
and the equations are linear in all of them together (Shen 2026; the form with symmetric coordinates
is ours). Every w_k is a combination of the x_i, so all of this happens in U, the span of the
neurons.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from exhume.checks import number, whole_number
from exhume.errors import InputError
from exhume.theory.neurons import LOCAL, Neurons
from exhume.theory.tensors import dimension, powers, slices

GAP = 1e3
"""Least ratio of neighbouring singular values of the neurons that ends their span: inside of it
they are within a few orders of one another, outside of it there is rounding."""

ROUNDED = 1e3
"""Relative singular values below so many roundings of the weights count as zero: the equations
hold sums of powers of the weights, which multiply their rounding."""

SILENT = 1e-6
"""Neurons below this size, relative to the largest, hold no equation: rounding has eaten it."""

MOST = 3000
"""Most unknowns, since the equations are solved as a dense matrix, in a minute at this size."""

FAINT = 1e-2
"""A sample whose part in the tensor is at least so large, relatively, is looked for however
uncertain the tensor is: without a limit none would be."""

DEFECTIVE = {(3, 5), (4, 3), (4, 4), (4, 5)}
"""(α, r) where the tangent spaces of general neurons fill less than their number allows."""


def fewest_neurons(degree: int, size: int) -> int:
    """Return how many neurons in general position determine T ∈ Sym^α(R^r); fewer never do.

    The functionals T ↦ T(w_k, …, w_k, ·) span the tangent space at w_k of the cone of rank-one
    tensors. For neurons in general position these fill the space as soon as their number allows,
    ⌈C(r+α−1, α)/r⌉, but for four cases, which need one more (Alexander and Hirschowitz, 1995).

    Example:
        >>> [fewest_neurons(3, r) for r in (3, 4, 5)], fewest_neurons(4, 5)
        ([4, 5, 8], 15)
    """
    return math.ceil(dimension(size, degree) / size) + ((degree, size) in DEFECTIVE)


@dataclass(frozen=True, eq=False)
class View:
    """A view is a network in coordinates of the span of its neurons.

    Attributes:
        neurons: the network.
        inside: the same with w_k (K, r) in coordinates of the span, without silent neurons.
        basis: U, (d, r); (d + 1, r) with a bias.
        tolerance: relative singular value that counts as zero.
    """

    neurons: Neurons
    inside: Neurons
    basis: Tensor
    tolerance: float

    @property
    def dim(self) -> int:
        """Return d, the dimension of a sample."""
        return len(self.basis) - self.neurons.lifted

    @property
    def rank(self) -> int:
        """Return r, the dimension of the span."""
        return self.basis.shape[1]


def view_of(neurons: Neurons, rank: int | None, tolerance: float | None) -> View:
    """Return a network as its own neurons see it; arguments are those of `identifiability`."""
    if tolerance is not None and not number("tolerance", tolerance, above=0) < 1:
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
    return View(neurons, inside, basis, tolerance or blurred)


def _span(first: Tensor, eps: float, rank: int | None) -> tuple[Tensor, float]:
    """Return a basis (d, r) of the span of the rows, and the size of what lies outside of it.

    Each row counts at length 1. Rounding and unfinished training leave something in every
    direction, so the span ends at the widest gap between singular values, if that is wide.
    """
    rows = torch.nn.functional.normalize(first, dim=1)
    _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    values = (values / values[0]).clamp_min(eps)
    gaps = values[:-1] / values[1:]
    if rank is not None and whole_number("rank", rank) > len(values):
        raise InputError(f"rank: expected a number from 1 to {len(values)}, got {rank}.")
    size = rank or (int(gaps.argmax()) + 1 if (gaps > GAP).any() else len(values))
    noise = float(values[size]) if size < len(values) else 0.0
    return vectors[:size].T.contiguous(), noise


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments are the tensors of least norm that fit the equations best.

    Attributes:
        tensors: T_q in coordinates, by degree.
        unknowns: how many coordinates they have.
        equations: how many there are.
        rank: of the equations.
        smallest: their last singular value, relative to the first; 0 with too few equations.
        misfit: what the tensors leave of the equations, relative.
        uncertainty: of the tensors, relative, where weights are off by the tolerance.
    """

    tensors: dict[int, Tensor]
    unknowns: int
    equations: int
    rank: int
    smallest: float
    misfit: float
    uncertainty: float

    @property
    def determined(self) -> bool:
        """Tell whether no other tensors fit as well."""
        return self.rank == self.unknowns


def moments_of(view: View) -> Moments:
    """Solve the equations of all neurons for the tensors."""
    neurons = view.inside
    counts = [dimension(view.rank, q) for q in neurons.degrees]
    if sum(counts) > MOST:
        raise InputError(
            f"model: its neurons span {view.rank} dimensions, where tensors of degree "
            f"{neurons.degree} have {sum(counts)} unknowns; up to {MOST} can be checked. {LOCAL}"
        )
    rows, right, scale = _equations(neurons)
    left, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    kept = values > view.tolerance * values[0]
    solution = vectors[kept].T @ ((left[:, kept].T @ right) / values[kept])
    return Moments(
        tensors={
            q: part / (neurons.coefficients[q] * scale**q)
            for q, part in zip(neurons.degrees, solution.split(counts), strict=True)
        },
        unknowns=sum(counts),
        equations=len(rows),
        rank=int(kept.sum()),
        smallest=float(values[-1] / values[0]) if len(values) == sum(counts) else 0.0,
        misfit=float((rows @ solution - right).norm() / right.norm()),
        uncertainty=min(FAINT, view.tolerance * float(values[0] / values[kept][-1])),
    )


def _equations(neurons: Neurons) -> tuple[Tensor, Tensor, float]:
    """Return A (K·e, M), c (K·e,) and ω of A t = c for t = (s_q ω^q T_q)_q.

    ω is the root mean square of |w_k|. With v = w/ω a neuron's equations are
    Σ_q q t_q(v^{q−1}, ·) = ω² v / a and, with several degrees, Σ_q t_q(v^q) = a (for one degree it
    follows from the others and |w|² = α a²). Each neuron's are divided by the norm of its rows, so
    neither units nor sizes count.
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


def sufficient(view: View) -> tuple[int, int]:
    """Return the dimension of span{(w_k^{⊗(q−1)})_q}, and that of the whole space."""
    unit = torch.nn.functional.normalize(view.inside.first, dim=1)
    lower = [q - 1 for q in view.inside.degrees]
    values = torch.linalg.svdvals(torch.cat([powers(unit, q) for q in lower], 1))
    rank = int((values > view.tolerance * values[0]).sum())
    return rank, sum(dimension(view.rank, q) for q in lower)
