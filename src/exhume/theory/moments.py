"""Moments T_q = Σ_i b_i x_i^{⊗q} of samples: what weights show of them, and the samples in them.

At a KKT point of margin maximisation with σ(z) = z^α weights are linear in T, with b_i = λ_i y_i:
w_k = α a_k T(w_k, …, w_k, ·) and a_k = T(w_k, …, w_k) (Shen 2026). T ∈ Sym^α(R^r) is held by the
coordinates √(α!/m!) T_m, |m| = α, whose inner products are those of the full array.
"""

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.functional import normalize, one_hot, pad

from exhume.checks import number, whole_number
from exhume.errors import InputError
from exhume.features.network import Elementwise
from exhume.models.state import StateOrFile, fit_state, read_state

# Every refusal ends with it: a model that this theory does not cover may be covered there
LOCAL = "See exhume.theory.local_identifiability for what other weights determine at a solution."
AGREEMENT = 1e-3  # most that outputs may differ: rounding is below, other functions are above


@dataclass(frozen=True, eq=False)
class Neurons:
    """Neurons make up f(x) = Σ_k a_k σ(w_k·x), with an activation σ(z) = Σ_q s_q z^q.

    A hidden bias is one more entry of w_k, where every sample has a 1: w·x + β = (w, β)·(x, 1).
    """

    first: Tensor  # w_k, (K, d) float64; (K, d + 1) with the hidden bias where there is one
    last: Tensor  # a_k, (K,)
    coefficients: tuple[float, ...]  # s_0 … s_α, the last of them not zero
    lifted: bool = False  # whether the last entry of w_k is a bias
    eps: float = torch.finfo(torch.float64).eps  # relative rounding of the weights as stored

    @property
    def degree(self) -> int:
        """Return α, the highest degree."""
        return len(self.coefficients) - 1

    @property
    def degrees(self) -> tuple[int, ...]:
        """Return the q with s_q ≠ 0, lowest first."""
        return tuple(q for q, s in enumerate(self.coefficients) if s)

    def value(self, z: Tensor) -> Tensor:
        """Return σ(z)."""
        return torch.stack([self.coefficients[q] * z**q for q in self.degrees]).sum(0)

    def slope(self, z: Tensor) -> Tensor:
        """Return σ'(z)."""
        return torch.stack([q * self.coefficients[q] * z ** (q - 1) for q in self.degrees]).sum(0)


def output(neurons: Neurons, samples: Tensor) -> Tensor:
    """Return f(x_i) = Σ_k a_k σ(w_k·x_i), (n, d) → (n,)."""
    return neurons.value(samples @ neurons.first.T) @ neurons.last


def explained(neurons: Neurons, samples: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_i b_i ∇θ f(x_i): a_k Σ_i b_i σ'(w_k·x_i) x_i, (K, d), and Σ_i b_i σ(w_k·x_i)."""
    z = neurons.first @ samples.T
    first = neurons.last[:, None] * ((neurons.slope(z) * multipliers) @ samples)
    return first, neurons.value(z) @ multipliers


def violation(neurons: Neurons, samples: Tensor, multipliers: Tensor) -> float:
    """Return |θ − Σ_i b_i ∇θ f(x_i)| / |θ|: how far the weights are from stationary."""
    first, last = explained(neurons, samples, multipliers)
    missed = (neurons.first - first).square().sum() + (neurons.last - last).square().sum()
    size = neurons.first.square().sum() + neurons.last.square().sum()
    return float((missed / size).sqrt())


def neurons_of(model: nn.Module, trained: StateOrFile | None) -> Neurons:
    """Return the neurons of a module with its own weights, or those given, or refuse it.

    It is Linear, `Elementwise` with a polynomial, Linear with one output and no bias; a Flatten may
    come first.
    """
    hidden, sigma, head = _layers(model)
    source = str(trained) if isinstance(trained, Path | str) else "trained weights"
    given = read_state(Path(trained)) if isinstance(trained, Path | str) else trained
    own = model.state_dict() if given is None else given
    eps = max(torch.finfo(w.dtype).eps for w in own.values() if w.is_floating_point())
    state = {n: w.cpu().double() for n, w in fit_state(own, model, source).items()}
    names = {id(w): name for name, w in model.named_parameters()}
    first, last = state[names[id(hidden.weight)]], state[names[id(head.weight)]][0]
    lifted = hidden.bias is not None
    if lifted:
        first = torch.cat([first, state[names[id(hidden.bias)]][:, None]], 1)
    neurons = Neurons(first, last, _coefficients(sigma), lifted, eps)
    size = first.norm(dim=1).max().clamp_min(torch.finfo(torch.float64).tiny)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, hidden.in_features, generator=generator, dtype=torch.float64) / size
    expected = output(neurons, pad(inputs, (0, 1), value=1.0) if lifted else inputs)
    with torch.no_grad():
        found: Tensor = functional_call(model, state, (inputs,))
    if found.numel() != 4 or (found.flatten() - expected).norm() > AGREEMENT * expected.norm():
        words = "its outputs are not Σ a_k σ(w_k·x) of its layers; write it as a Sequential."
        raise InputError(f"model: {words} {LOCAL}")
    return neurons


def _layers(model: nn.Module) -> tuple[nn.Linear, Elementwise, nn.Linear]:
    """Return the three parts, or raise a sentence on what else was found."""
    leaves = [part for part in model.modules() if not any(True for _ in part.children())]
    if leaves and isinstance(leaves[0], nn.Flatten):
        leaves = leaves[1:]
    match leaves:
        case [nn.Linear() as hidden, Elementwise() as sigma, nn.Linear() as head]:
            if head.out_features != 1 or head.bias is not None:
                found = f"{head.out_features} outputs and {'no' if head.bias is None else 'a'} bias"
                raise InputError(f"model: the last layer has {found}, not 1 without. {LOCAL}")
            return hidden, sigma, head
    found = ", ".join(type(part).__name__ for part in leaves) or "nothing"
    expected = "two linear layers and a polynomial activation (Linear, Elementwise, Linear)"
    raise InputError(f"model: expected {expected}, found {found}. {LOCAL}")


def _coefficients(sigma: Elementwise) -> tuple[float, ...]:
    """Return s_0 … s_α of an activation of degree 3 or more, or the reason why not."""
    name = sigma.activation.name
    kind, _, rest = name.partition(":")
    if kind != "polynomial":
        raise InputError(f"activation {name}: is no polynomial. {LOCAL}")
    coefficients = [float(c) for c in rest.split(",")]
    while coefficients and coefficients[-1] == 0:
        coefficients.pop()
    degree = len(coefficients) - 1
    if degree < 3:
        reason = {
            2: "shows the matrix Σ b_i x_i x_iᵀ, a sum of rank-one terms in infinitely many ways",
            1: "shows the vector Σ b_i x_i and no more",
        }.get(degree, "does not see the samples")
        raise InputError(f"activation {name}: degree {degree} {reason}; use 3 or more. {LOCAL}")
    if coefficients[0]:
        words = f"constant term {coefficients[0]:g} is not covered; use one with σ(0) = 0."
        raise InputError(f"activation {name}: its {words} {LOCAL}")
    return tuple(coefficients)


GAP = 1e3  # least ratio of neighbouring singular values that ends a span: beyond it is rounding
ROUNDED = 1e3  # singular values below so many roundings are zero: powers multiply rounding
SILENT = 1e-6  # neurons below this size, relative to the largest, hold no equation but rounding
MOST = 3000  # most unknowns: the equations are solved as a dense matrix, a minute at this size
FAINT = 1e-2  # a sample with this share of the tensor is looked for, however uncertain that is
# (α, r) where the tangent spaces of general neurons fill less than their number allows
DEFECTIVE = {(3, 5), (4, 3), (4, 4), (4, 5)}
DRAWS = 20  # pairs of random contractions tried: one may be nearly degenerate, the best is kept
STEPS = 60  # most Gauss-Newton steps of a refinement: a few near a solution, many far from one


def dimension(size: int, degree: int) -> int:
    """Return C(r+α−1, α), the dimension of Sym^α(R^r)."""
    return math.comb(size + degree - 1, degree)


def exponents(size: int, degree: int) -> Tensor:
    """Return the multi-indices m with |m| = α over r letters, (M, r) int64."""
    words = list(itertools.combinations_with_replacement(range(size), degree))
    letters = torch.tensor(words, dtype=torch.int64).reshape(len(words), degree)
    return one_hot(letters, size).sum(1)


def _weights(letters: Tensor) -> Tensor:
    """Return √(α!/m!) for each multi-index, (M,) float64."""
    counts = letters.double()
    logarithms = torch.lgamma(counts.sum(1) + 1) - torch.lgamma(counts + 1).sum(1)
    return logarithms.exp().round().sqrt()


def powers(vectors: Tensor, degree: int) -> Tensor:
    """Return coordinates √(α!/m!) v^m of v^{⊗α} for each row, (k, r) → (k, M)."""
    letters = exponents(vectors.shape[1], degree)
    monomials = (vectors[:, None, :] ** letters).prod(2)
    return monomials * _weights(letters).to(vectors)


def slices(vectors: Tensor, degree: int) -> Tensor:
    """Return T ↦ T(v, …, v, ·) = (1/α) ∇_v T(v^α) for each row v, as matrices, (k, r, M)."""
    letters = exponents(vectors.shape[1], degree)
    weights = _weights(letters).to(vectors)
    rows = []
    for j, axis in enumerate(torch.eye(vectors.shape[1], dtype=torch.int64)):
        monomials = (vectors[:, None, :] ** (letters - axis).clamp_min(0)).prod(2)
        rows.append(monomials * weights * letters[:, j].to(vectors) / degree)
    return torch.stack(rows, 1)


def contract(tensor: Tensor, vectors: Tensor, degree: int) -> Tensor:
    """Return coordinates of T(v, ·, …, ·) for each row v, (M,), (k, r) → (k, M')."""
    size = vectors.shape[1]
    letters, shorter = exponents(size, degree), exponents(size, degree - 1)
    entries = tensor / _weights(letters).to(tensor)
    place = {tuple(m): k for k, m in enumerate(letters.tolist())}
    raised = shorter[:, None, :] + torch.eye(size, dtype=torch.int64)  # m' + e_j, (M', r, r)
    index = torch.tensor([[place[tuple(m)] for m in row] for row in raised.tolist()])
    return (vectors @ entries[index].T) * _weights(shorter).to(tensor)


def fewest_neurons(degree: int, size: int) -> int:
    """Return how many neurons in general position determine T ∈ Sym^α(R^r); fewer never do.

    ⌈C(r+α−1, α)/r⌉, but for four cases, which need one more (Alexander and Hirschowitz, 1995).

    Example:
        >>> [fewest_neurons(3, r) for r in (3, 4, 5)], fewest_neurons(4, 5)
        ([4, 5, 8], 15)
    """
    return math.ceil(dimension(size, degree) / size) + ((degree, size) in DEFECTIVE)


@dataclass(frozen=True, eq=False)
class View:
    """A view is a network in coordinates of the span of its neurons."""

    neurons: Neurons  # the network
    inside: Neurons  # with w_k (K, r) in coordinates of the span, without silent neurons
    basis: Tensor  # U, (d, r); (d + 1, r) with a bias
    tolerance: float  # relative singular value that counts as zero

    @property
    def dim(self) -> int:
        """Return d, the dimension of a sample."""
        return len(self.basis) - self.neurons.lifted

    @property
    def rank(self) -> int:
        """Return r, the dimension of the span."""
        return self.basis.shape[1]


def view_of(neurons: Neurons, rank: int | None = None, tolerance: float | None = None) -> View:
    """Return a network as its own neurons, at length 1, see it (see `identifiability`)."""
    if tolerance is not None and not number("tolerance", tolerance, above=0) < 1:
        raise InputError(f"tolerance: expected a number between 0 and 1, got {tolerance}.")
    sizes, last = neurons.first.norm(dim=1), neurons.last.abs()
    heard = (sizes > SILENT * sizes.max()) & (last > SILENT * last.max())
    if not heard.any():
        raise InputError("model: every neuron is zero, so its weights hold no trace of any sample.")
    first, eps = neurons.first[heard], neurons.eps
    _, values, vectors = torch.linalg.svd(normalize(first, dim=1), full_matrices=False)
    values = (values / values[0]).clamp_min(eps)
    gaps = values[:-1] / values[1:]
    if rank is not None and whole_number("rank", rank) > len(values):
        raise InputError(f"rank: expected a number from 1 to {len(values)}, got {rank}.")
    size = rank or (int(gaps.argmax()) + 1 if (gaps > GAP).any() else len(values))
    noise = float(values[size]) if size < len(values) else 0.0
    basis = vectors[:size].T.contiguous()
    blurred = max(ROUNDED * eps, 10 * noise)
    if tolerance is None and blurred >= 1:
        raise InputError(
            f"model: weights rounded to {eps:.0e}, with {noise:.0e} outside of {size} dimensions, "
            "tell no rank; save more digits, leave out the rank, or give a tolerance below 1."
        )
    inside = replace(neurons, first=first @ basis, last=neurons.last[heard])
    return View(neurons, inside, basis, tolerance or blurred)


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments are the tensors of least norm that fit the equations best."""

    tensors: dict[int, Tensor]  # T_q in coordinates, by degree
    unknowns: int  # how many coordinates they have
    equations: int  # how many there are
    rank: int  # of the equations
    smallest: float  # their last singular value, relative to the first; 0 with too few equations
    misfit: float  # what the tensors leave of the equations, relative
    uncertainty: float  # of the tensors, relative, where weights are off by the tolerance

    @property
    def determined(self) -> bool:
        """Tell whether no other tensors fit as well."""
        return self.rank == self.unknowns


def moments_of(view: View) -> Moments:
    """Solve the equations of all neurons, A t = c, for the tensors t = (s_q ω^q T_q)_q.

    With v = w/ω those of a neuron are Σ_q q t_q(v^{q−1}, ·) = ω² v / a and, with several degrees,
    Σ_q t_q(v^q) = a, all divided by the norm of its rows.
    """
    neurons = view.inside
    counts = [dimension(view.rank, q) for q in neurons.degrees]
    if sum(counts) > MOST:
        words = f"degree {neurons.degree} in {view.rank} dimensions have {sum(counts)} unknowns"
        raise InputError(f"model: its tensors of {words}; up to {MOST} can be checked. {LOCAL}")
    scale = float(neurons.first.square().sum(1).mean().sqrt())
    v = neurons.first / scale
    each = torch.cat([q * slices(v, q) for q in neurons.degrees], 2)  # (K, e, M)
    wanted = scale**2 * v / neurons.last[:, None]
    if len(neurons.degrees) > 1:
        each = torch.cat([each, torch.cat([powers(v, q) for q in neurons.degrees], 1)[:, None]], 1)
        wanted = torch.cat([wanted, neurons.last[:, None]], 1)
    sizes = each.flatten(1).norm(dim=1)
    rows = (each / sizes[:, None, None]).flatten(0, 1)
    right = (wanted / sizes[:, None]).flatten()
    left, values, vectors = torch.linalg.svd(rows, full_matrices=False)
    kept = values > view.tolerance * values[0]
    solution = vectors[kept].T @ ((left[:, kept].T @ right) / values[kept])
    parts = zip(neurons.degrees, solution.split(counts), strict=True)
    return Moments(
        tensors={q: part / (neurons.coefficients[q] * scale**q) for q, part in parts},
        unknowns=sum(counts),
        equations=len(rows),
        rank=int(kept.sum()),
        smallest=float(values[-1] / values[0]) if len(values) == sum(counts) else 0.0,
        misfit=float((rows @ solution - right).norm() / right.norm()),
        uncertainty=min(FAINT, view.tolerance * float(values[0] / values[kept][-1])),
    )


def decompose(
    tensor: Tensor, size: int, degree: int, tolerance: float
) -> tuple[Tensor, Tensor, float]:
    """Split T = Σ_i c_i v_i^{⊗α}, α ≥ 3, with independent unit v_i; simultaneous diagonalisation.

    Two contractions T(g, …, g, ·, ·) = V D Vᵀ with random g share V, the eigenvectors of
    (V D Vᵀ)(V D' Vᵀ)⁻¹. Returned are v_i (n, r), c_i (n,), and what of T is left, relative.
    """
    axes = torch.eye(size, dtype=tensor.dtype)
    left, values, _ = torch.linalg.svd(contract(tensor, axes, degree), full_matrices=False)
    inside: Tensor = left[:, values > tolerance * values[0]]
    generator = torch.Generator().manual_seed(0)

    def contraction() -> Tensor:
        direction = torch.randn(1, size, generator=generator, dtype=tensor.dtype)
        less = tensor
        for order in range(degree, 2, -1):
            less = contract(less, direction, order)[0]
        return inside.T @ contract(less, axes, 2) @ inside

    def draw() -> tuple[Tensor, Tensor, float]:
        mixed = torch.linalg.lstsq(contraction(), contraction(), driver="gelsd").solution.T
        vectors = normalize((inside @ torch.linalg.eig(mixed).eigenvectors.real).T, dim=1)
        return vectors, *_strengths(tensor, vectors, degree)

    return min((draw() for _ in range(DRAWS)), key=lambda found: found[2])


def _strengths(tensor: Tensor, vectors: Tensor, degree: int) -> tuple[Tensor, float]:
    """Return the c_i with T ≈ Σ_i c_i v_i^{⊗α}, and the relative rest."""
    terms = powers(vectors, degree)
    strengths: Tensor = torch.linalg.lstsq(terms.T, tensor[:, None], driver="gelsd").solution[:, 0]
    tiny = torch.finfo(tensor.dtype).tiny
    return strengths, float((strengths @ terms - tensor).norm() / tensor.norm().clamp_min(tiny))


def at_scale(
    vectors: Tensor, strengths: Tensor, tensors: dict[int, Tensor], degree: int
) -> tuple[Tensor, Tensor]:
    """Return samples and multipliers from unit vectors, where lower degrees tell the norm.

    T_q = Σ_i b_i |x_i|^q v_i^{⊗q} and strengths b_i |x_i|^α give |x_i|^{α−q}, and the sign of v_i
    where α − q is odd.
    """
    norms = torch.ones_like(strengths)
    for q in sorted(tensors):  # the last one, nearest to α, gives the norm
        ratios = strengths / _strengths(tensors[q], vectors, q)[0]
        norms = ratios.abs() ** (1 / (degree - q))
        if (degree - q) % 2:
            signs = ratios.sign()
            vectors, strengths = vectors * signs[:, None], strengths * (signs**degree)
    return vectors * norms[:, None], strengths / norms**degree


def refine(neurons: Neurons, samples: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor]:
    """Take Gauss-Newton steps on the stationarity equations themselves, for as long as that helps.

    Unknowns and equations are in units of their own sizes; steps are those of least norm.
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
