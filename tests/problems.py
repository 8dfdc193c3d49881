"""Problems with a known answer, and slow oracles that share no code with what they check."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from exhume import data, victims
from exhume.equation.domain import Box, Domain, Sphere, SphereInBox
from exhume.equation.problem import Problem, ThreatModel
from exhume.errors import InputError
from exhume.features import Features
from exhume.features.activations import activation
from exhume.features.random import RandomFeatures
from exhume.features.weights import Seeded, Stored

ACTIVATIONS = ["relu", "relu+tanh", "tanh", "gelu", "erf", "softplus", "polynomial:0.5,1,-0.3,0.2"]
THREAT = ThreatModel(knows=("the weights",))


def refusals(*rows: tuple[Any, str], call: Callable[..., object] | None = None) -> Any:
    """A test for each row: a call, or what `call` is to be given, and words of the refusal."""

    @pytest.mark.parametrize(("given", "words"), rows, ids=[words for _, words in rows])
    def test(given: Any, words: str) -> None:
        with pytest.raises(InputError, match=words):
            given() if call is None else call(**given)

    return test


@dataclass(frozen=True)
class Case:
    problem: Problem
    inputs: Tensor  # (n, d) float64
    coefficients: Tensor  # (n, m) float64


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pictures(count: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


def on_sphere(count: int, dim: int, seed: int = 0) -> Tensor:
    return dim**0.5 * torch.nn.functional.normalize(gaussian(count, dim, seed=seed), dim=1)


@cache
def kkt_point(degree: int = 3, width: int = 16) -> victims.Victim:
    """An exact one, of a polynomial with four samples on the margin; not to be changed."""
    return victims.polynomial(victims.labellings(data.sphere(9, 4, 2), degree)[0], width, degree)


def make_features(
    dim: int, width: int, name: str = "relu", seed: int = 0, dtype: torch.dtype = torch.float64
) -> RandomFeatures:
    """σ(Vx) with V in memory."""
    v = Seeded(width, dim, seed).rows(0, width).to(dtype)
    return RandomFeatures(Stored(v), activation(name))


def make_problem(features: RandomFeatures, target: Tensor) -> Problem:
    return Problem(target.to(features.dtype), features, THREAT, (features.dim,))


def case(
    dim: int,
    samples: int,
    ratio: float,
    name: str = "relu",
    outputs: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    even: bool = False,
) -> Case:
    """Sphere data and θ = Φᵀ(ΦΦᵀ)⁻¹Y, with p·m = ratio·d·n; rows of A of norm 1 instead if even."""
    truth = data.sphere(dim, samples, seed)
    y = truth.targets if outputs == 1 else gaussian(samples, outputs, seed=seed)
    features = make_features(dim, round(ratio * dim * samples / outputs), name, seed)
    phi = dense_phi(features, truth.inputs)
    a = torch.linalg.solve(phi @ phi.T, y)
    a = torch.nn.functional.normalize(a, dim=1) if even else a
    return Case(make_problem(features, phi.T @ a).to("cpu", dtype), truth.inputs, a)


def close(got: Tensor, expected: Tensor, relative: float = 1e-10, least: float = 1e-30) -> None:
    """Equal up to a share of the largest entry, wherever they are and in whatever precision."""
    atol = relative * max(expected.abs().max().item(), least)
    torch.testing.assert_close(got.double().cpu(), expected.double().cpu(), rtol=0, atol=atol)


@dataclass(frozen=True, eq=False)
class Dense:
    """Features whose every product is dense algebra and autograd: the one oracle, and slow."""

    rows: Callable[[Tensor], Tensor]  # of one candidate, (d,) → (k, p)
    dim: int
    width: int
    name, device, dtype = "dense", torch.device("cpu"), torch.float64

    def linearize(self, candidates: Tensor) -> "DenseLinearization":
        return DenseLinearization(self.rows, candidates)

    def moment(self, weights: Tensor, directions: Tensor) -> None:
        return None

    def restrict(self, basis: Tensor) -> "Dense":
        return Dense(lambda z: self.rows(basis @ z), basis.shape[1], self.width)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Dense":
        return self

    def resident(self) -> "Dense":
        return self

    def share(self, index: int, count: int) -> None:
        return None


@dataclass(frozen=True, eq=False)
class DenseLinearization:
    rows: Callable[[Tensor], Tensor]
    candidates: Tensor

    @cached_property
    def phi(self) -> Tensor:
        """Φ, (n·k, p)."""
        return torch.cat([self.rows(row) for row in self.candidates]).detach()

    @cached_property
    def slopes(self) -> Tensor:
        """∂Φ/∂x of each candidate, (n, k, p, d)."""
        jacobian = torch.autograd.functional.jacobian
        return torch.stack([jacobian(self.rows, row) for row in self.candidates])

    def jacobian(self, a: Tensor) -> Tensor:
        """Of ΦᵀA in the candidates, (p, m, n, d)."""
        return torch.einsum("ikpd,ikm->pmid", self.slopes, a.view(*self.slopes.shape[:2], -1))

    def gram(self) -> Tensor:
        return self.phi @ self.phi.T

    def apply(self, target: Tensor) -> Tensor:
        return self.phi @ target

    def combine(self, a: Tensor) -> Tensor:
        return self.phi.T @ a

    def push(self, direction: Tensor, a: Tensor) -> Tensor:
        return torch.einsum("pmid,id->pm", self.jacobian(a), direction)

    def pull(self, target: Tensor, a: Tensor) -> Tensor:
        return torch.einsum("pmid,pm->id", self.jacobian(a), target)

    def bend(self, direction: Tensor, target: Tensor, a: Tensor) -> Tensor:
        weights, hvp = (a @ target.T).view(self.slopes.shape[:3]), torch.autograd.functional.hvp
        rows = zip(self.candidates, weights, direction, strict=True)
        bent = [hvp(lambda x, w=w: (self.rows(x) * w).sum(), row, v)[1] for row, w, v in rows]
        return torch.stack(bent)

    def curvature(self, a: Tensor) -> Tensor:
        j = self.jacobian(a)
        return torch.einsum("pmid,pmjd->ij", j, j) / self.candidates.shape[1]


def same_products(
    one: Features,
    other: Features | Dense,
    relative: float = 1e-10,
    n: int = 3,
    m: int = 2,
    steps: float | None = None,
) -> None:
    """Every product of two kinds of features, twice: what is kept must be right, too."""
    steps = relative if steps is None else steps  # they may be coarser
    assert (one.dim, one.width) == (other.dim, other.width)
    x = on_sphere(n, other.dim)
    here, there = one.linearize(x), other.linearize(x)
    found, gram = here.gram(), there.gram()
    close(found, gram, relative)
    for seed in (1, 5):
        a, t = gaussian(len(gram), m, seed=seed), gaussian(other.width, m, seed=seed + 1)
        direction = gaussian(n, other.dim, seed=seed + 2)
        along, target = (x.to(one.device, one.dtype) for x in (direction, t))
        own, expected = a.to(one.device), there.pull(t, a)
        applied, curvature = here.apply(t.to(one.device)), here.curvature(own)
        combined, pulled = here.combine(own), here.pull(target, own)
        close(applied, there.apply(t), relative)
        close(combined, there.combine(a), relative)
        close(here.push(along, own), there.push(direction, a), steps)
        close(pulled, expected, steps)
        close(curvature, there.curvature(a), steps)
        bent, size = there.bend(direction, t, a), expected.abs().max().item()
        close(here.bend(along, target, own), bent, steps, size)
        assert found.dtype == applied.dtype == curvature.dtype == torch.float64
        assert combined.dtype == pulled.dtype == one.dtype, "only sums over p are in double"


def dense_v(features: RandomFeatures) -> Tensor:
    return features.weights.rows(0, features.width).double().cpu()


def dense_random(features: RandomFeatures) -> Dense:
    """The oracle σ(Vx + b)."""
    v, b = dense_v(features), 0 if features.bias is None else features.bias
    return Dense(lambda x: features.activation.value(v @ x + b)[None], *reversed(v.shape))


def dense_phi(features: RandomFeatures, candidates: Tensor) -> Tensor:
    return features.activation.value(candidates @ dense_v(features).T)


def dense_complement(phi: Tensor) -> Tensor:
    """I − projector on the rows of Φ, (p, p)."""
    vectors, values, _ = torch.linalg.svd(phi.T, full_matrices=False)
    span = vectors[:, values / values[0] > 1e-10]
    return torch.eye(phi.shape[1], dtype=phi.dtype) - span @ span.T


def make_domain(kind: str, dim: int, seed: int = 0) -> Domain:
    """With bounds of its own for each entry, all around 0."""
    spread = torch.rand(2, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    box = Box(-1.2 - spread[0], 1.2 + spread[1])
    return {"sphere": Sphere(), "box": box, "both": SphereInBox(Sphere(), box)}[kind]


def dense_tangent(domain: Domain, candidates: Tensor, descent: Tensor | None) -> Tensor:
    """Projectors (n, d, d) to the directions that the sphere and the held entries allow."""
    n, d = candidates.shape
    eye, held = torch.eye(d).to(candidates), torch.zeros(n, d).bool()
    if not isinstance(domain, Sphere):
        held = domain.held(candidates, descent)
    normals = 0 * candidates if isinstance(domain, Box) else candidates
    projectors = []
    for row, own in zip(normals, held, strict=True):
        forbidden = torch.cat([row[None], eye[own], 0 * eye]).T
        vectors, values, _ = torch.linalg.svd(forbidden, full_matrices=False)
        projectors.append(eye - vectors[:, values > 1e-9] @ vectors[:, values > 1e-9].T)
    return torch.stack(projectors)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    normalize = torch.nn.functional.normalize
    return normalize(a.double()) @ normalize(b.double()).T


def with_hidden_flips(
    x: Tensor, a: Tensor, flipped: list[int], mirrored: list[int]
) -> tuple[Tensor, Tensor]:
    """The same Σ a_i relu(v·x_i) for every v: pairs ±u make good for the linear part of flips."""
    signs, shares = torch.ones(len(x), 1).to(x), torch.zeros(len(x), 1).to(x)
    signs[flipped], shares[mirrored] = -1, 0.55
    off = x[flipped].T @ a[flipped] + (shares * x).T @ a
    left, sizes, right = torch.linalg.svd(off, full_matrices=False)
    rank, radius = int((sizes > 1e-9 * sizes[0]).sum()), x[0].norm()
    u, b = radius * left[:, :rank].T, sizes[:rank, None] * right[:rank] / radius
    candidates = torch.cat([signs * x, -x[mirrored], u, -u])
    coefficients = torch.cat([(1 - shares) * a, 0.55 * a[mirrored], b, -b])
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(1))
    return candidates[order], coefficients[order]
