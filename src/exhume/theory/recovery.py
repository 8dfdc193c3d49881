"""From the tensor Σ_i b_i x_i^{⊗α} to the samples: decomposition, refinement, scale.

All in coordinates of the span of the neurons, r numbers a sample.
"""

import torch
from torch import Tensor
from torch.func import jacrev

from exhume.theory.neurons import Neurons, explained, output
from exhume.theory.tensors import contract, matrix, powers

DRAWS = 20
"""Pairs of random contractions that are tried: one may be nearly degenerate, the best is kept."""

STEPS = 60
"""Most Gauss-Newton steps of a refinement: near a solution it takes a few, far from one many."""


def decompose(
    tensor: Tensor, size: int, degree: int, tolerance: float
) -> tuple[Tensor, Tensor, float]:
    """Split T = Σ_i c_i v_i^{⊗α} with independent unit v_i, by simultaneous diagonalisation.

    Two contractions T(g, …, g, ·, ·) = V D Vᵀ with random g share V: it holds the eigenvectors of
    (V D Vᵀ)(V D' Vᵀ)⁻¹ = V D D'⁻¹ V⁻¹. Their number is the rank of the flattening of T.

    Args:
        tensor: coordinates of T ∈ Sym^α(R^r), (M,).
        size: r.
        degree: α, 3 or more.
        tolerance: relative singular value below which the flattening is zero.

    Returns:
        v_i (n, r), c_i (n,), and what of T is left, relative.
    """
    flattened = contract(tensor, torch.eye(size, dtype=tensor.dtype), degree)
    left, values, _ = torch.linalg.svd(flattened, full_matrices=False)
    inside: Tensor = left[:, values > tolerance * values[0]]
    generator = torch.Generator().manual_seed(0)

    def contraction() -> Tensor:
        """T(g, …, g, ·, ·) inside the span of the v_i, (n, n)."""
        direction = torch.randn(1, size, generator=generator, dtype=tensor.dtype)
        less = tensor
        for order in range(degree, 2, -1):
            less = contract(less, direction, order)[0]
        return inside.T @ matrix(less, size) @ inside

    def draw() -> tuple[Tensor, Tensor, float]:
        mixed = torch.linalg.lstsq(contraction(), contraction(), driver="gelsd").solution.T
        vectors = inside @ torch.linalg.eig(mixed).eigenvectors.real
        vectors = torch.nn.functional.normalize(vectors.T, dim=1)
        return vectors, *fitted(tensor, vectors, degree)

    return min((draw() for _ in range(DRAWS)), key=lambda found: found[2])


def fitted(tensor: Tensor, vectors: Tensor, degree: int) -> tuple[Tensor, float]:
    """Return the c_i with T ≈ Σ_i c_i v_i^{⊗α}, and the relative rest."""
    terms = powers(vectors, degree)
    strengths: Tensor = torch.linalg.lstsq(terms.T, tensor[:, None], driver="gelsd").solution[:, 0]
    tiny = torch.finfo(tensor.dtype).tiny
    return strengths, float((strengths @ terms - tensor).norm() / tensor.norm().clamp_min(tiny))


def at_scale(
    vectors: Tensor, strengths: Tensor, tensors: dict[int, Tensor], degree: int
) -> tuple[Tensor, Tensor]:
    """Return samples and multipliers from unit vectors, where several degrees tell the norm.

    T_q = Σ_i b_i |x_i|^q v_i^{⊗q}, so two degrees give |x_i|^{α−q}, and its sign that of v_i where
    α − q is odd.

    The strengths are b_i |x_i|^α, and their α is left out of the tensors by degree.
    """
    norms = torch.ones_like(strengths)
    for q in sorted(tensors):  # the last one, nearest to α, gives the norm
        ratios = strengths / fitted(tensors[q], vectors, q)[0]
        norms = ratios.abs() ** (1 / (degree - q))
        if (degree - q) % 2:
            vectors, strengths = (
                vectors * ratios.sign()[:, None],
                strengths * (ratios.sign() ** degree),
            )
    return vectors * norms[:, None], strengths / norms**degree


def by_margin(
    neurons: Neurons, samples: Tensor, multipliers: Tensor, level: float
) -> tuple[Tensor, Tensor]:
    """Return the same trace of σ = s z^α with |f(x_i)| = γ: x_i → c x_i and b_i → b_i / c^α.

    γ is the level, the margin of every active sample.
    """
    tiny = torch.finfo(samples.dtype).tiny
    scale = (level / output(neurons, samples).abs().clamp_min(tiny)) ** (1 / neurons.degree)
    return samples * scale[:, None], multipliers / scale**neurons.degree


def refine(neurons: Neurons, samples: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
    """Take Gauss-Newton steps on the stationarity equations themselves, for as long as that helps.

    Unknowns are the samples, in units of their norms, and the multipliers, in units of their own;
    each neuron's equations are divided by its size. Steps are those of least norm, so that
    directions which change nothing stay as they are.
    """
    lengths = samples.norm(dim=1, keepdim=True)
    count, size = samples.shape

    def split(unknowns: Tensor) -> tuple[Tensor, Tensor]:
        inside, factors = unknowns[: count * size], unknowns[count * size :]
        return inside.reshape(count, size) * lengths, factors * multipliers

    def missed(unknowns: Tensor) -> Tensor:
        first, last = explained(neurons, *split(unknowns))
        rows = (neurons.first - first) / neurons.first.norm(dim=1, keepdim=True)
        return torch.cat([rows.flatten(), (neurons.last - last) / neurons.last])

    unknowns = torch.cat([(samples / lengths).flatten(), torch.ones_like(multipliers)])
    rest = missed(unknowns)
    for _ in range(STEPS):
        jacobian = jacrev(missed)(unknowns)
        step = torch.linalg.lstsq(jacobian, -rest[:, None], rcond=1e-12, driver="gelsd").solution
        length = 1.0
        while length > 1e-4 and not missed(unknowns + length * step[:, 0]).norm() < rest.norm():
            length /= 2
        if length <= 1e-4:
            break
        unknowns = unknowns + length * step[:, 0]
        rest = missed(unknowns)
    return split(unknowns)
